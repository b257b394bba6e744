"""The device memory that NCCL takes for a communicator, as NCCL 2.30.7 allocates it (files: its ``src/``).

    bookkeeping    at creation                3 allocations per channel and 2 more, of 2 MiB each
    ring           at the first collective    per channel, connections to the next rank and from the last
    tree           at the first all-reduce    per channel, what rings lack: a chain in both directions
    multicast      at the first all-reduce    NVLink SHARP (NVLS), from Hopper on and within one machine
    peers          at the first send, receive per channel, a connection to or from each peer
    network        at the first of them       buffers that all peers on other machines share

A connection over NVLink or PCIe takes device memory on the sender's side (``transport/p2p.cc``, 2 MiB) and
on the receiver's (10 MiB: buffers of 0.5, 4.7 and 4 MiB for the protocols LL, LL128 and Simple). All three
are allocated whatever ``NCCL_PROTO`` says: it only restricts what NCCL chooses later. Through host memory
(``transport/shm.cc``) a connection takes none.

Two published measurements confirm the rule. On 4 A100, communicators of two ranks took 544 MiB on rank 0 and
larger ones 688 (NVIDIA/nccl#964, an NCCL without lazy connections), as computed here. On 8 H100, the first
all-to-all took 3.28 GB (NVIDIA/nccl#1685), where the rule has 3.12.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields

from memfit.devices import Device

KERNELS = 96 << 20
"""NCCL's kernels, loaded with a process's first communicator: a single rank on an RTX 3090 took 484 MiB,
388 of them for its 64 channels (NVIDIA/nccl#2366)."""

_MIB = 1 << 20
_GRANULARITY = 2 * _MIB  # CUDA_IPC_MIN (include/comm.h), and of cuMemCreate
_PAGE = 4096  # ncclSendMem and ncclRecvMem (include/comm.h)
_MOST_CHANNELS = 64  # MAXCHANNELS (include/device.h)
_STEPS = 8  # NCCL_STEPS (include/device.h)
_BUFFERS = {
    "NCCL_LL_BUFFSIZE": 8 * 512 * _STEPS * 16,
    "NCCL_LL128_BUFFSIZE": 120 * 640 * _STEPS * 8,
    "NCCL_BUFFSIZE": 4 * _MIB,
}
"""Variable -> bytes per connection of the protocols LL, LL128 and Simple (init.cc, ``computeBuffSizes``)."""
_SHARED_STEPS = 16  # NCCL_SHARED_STEPS (transport/net.cc)
_PAIR = 2  # ranks whose ring connects all of them in both directions
_TREE_ARITY = 3  # NCCL_MAX_TREE_ARITY (include/device.h): a parent and two children on other machines
_PEERS_PER_ROUND = 8  # NCCL_MAX_DEV_WORK_P2P_PER_BATCH (include/device.h)
_CHANNEL_BANDWIDTH = 14  # GB/s, NCCL_P2P_PER_CHANNEL_NET_BW (graph/paths.cc)

_CHANNELS = {7: 12, 8: 24, 9: 24, 10: 32}
"""Major compute capability -> channels within a machine with NVLink: "24 coll channels" in NCCL's logs of 8
A100 or H100; 12 of a DGX-1; 32 for Blackwell follows from graph/search.cc."""
_CHANNELS_BETWEEN_MACHINES = 16  # "Channel 00/16" in the log of 3 machines of 8 H100, NVIDIA/nccl#1453
_CHANNELS_WITHOUT_NVLINK = 4  # "4 coll channels, 4 p2p channels, 2 p2p channels per peer", NVIDIA/nccl#1706
_NVLINKS = {7: 6, 8: 12, 9: 18, 10: 18}
"""Major compute capability -> NVLinks of a GPU, each of them two channels per peer (graph/paths.cc)."""
_NETWORK_BANDWIDTH = {7: 12, 8: 25, 9: 50, 10: 50}
"""Major compute capability -> GB/s of the network card beside a GPU: of NVIDIA's own machines."""
_MULTICAST_CHANNELS = {9: 16, 10: 24}  # NVLS_NCHANNELS_SM90 and _SM100_NVL (include/comm.h)


@dataclass(frozen=True, slots=True, kw_only=True)
class NcclCommunicator:
    """A communicator, and what has run on it."""

    ranks: int
    local_ranks: int
    """Those on this rank's machine, itself included."""
    rank: int = 0
    all_reduces: bool = False
    """Whether it has all-reduced: over more than two ranks, NCCL may choose a tree or multicast."""
    collectives: bool = False
    """Whether another collective has run on it."""
    sends: int = 0
    """Ranks that this one has sent to, outside collectives."""
    receives: int = 0
    """Ranks that it has received from, outside collectives."""
    shares: bool = False
    """Whether it was split off with ``splitShare`` and uses the connections of its parent."""
    min_ctas: int | None = None
    max_ctas: int | None = None
    """Fewest and most channels that its ``ncclConfig_t`` asks for; None if it does not say."""


@dataclass(frozen=True, slots=True)
class NcclMemory:
    """Bytes of device memory that one rank holds for a communicator."""

    bookkeeping: int = 0
    ring: int = 0
    tree: int = 0
    multicast: int = 0
    peers: int = 0
    network: int = 0

    @property
    def total(self) -> int:
        """All of it."""
        return sum(getattr(self, field.name) for field in fields(self))


def nccl_memory(communicator: NcclCommunicator, device: Device, environment: Mapping[str, str]) -> NcclMemory:
    """Return the device memory of a communicator on one rank.

    Args:
        communicator: what was created, and what ran on it.
        device: the GPU of every rank. It decides the links: NVLink between A100, H100, H200, B200 and V100
            modules, host memory between GeForce cards, PCIe otherwise.
        environment: NCCL's variables: its buffer sizes, channels, ``NCCL_ALGO``, ``NCCL_CUMEM_ENABLE``,
            ``NCCL_RUNTIME_CONNECT``, ``NCCL_P2P_DISABLE``, ``NCCL_NVLS_ENABLE`` and a few more.

    >>> from memfit.devices import find_device
    >>> pair = NcclCommunicator(ranks=2, local_ranks=2, collectives=True)
    >>> nccl_memory(pair, find_device("H100"), {}).ring >> 20  # 24 channels x (2 MiB to send + 10 to receive)
    288
    """
    rule = _Rule(communicator, device, environment)
    eager = not rule.lazy and communicator.ranks > 1
    ring = (communicator.collectives or communicator.all_reduces or eager) and not communicator.shares
    many = communicator.ranks > _PAIR and not communicator.shares
    all_reduces = many and (communicator.all_reduces or eager)
    return NcclMemory(
        bookkeeping=rule.bookkeeping(),
        ring=rule.ring() if ring and communicator.ranks > 1 and rule.allows("ring") else 0,
        tree=rule.tree() if all_reduces and rule.allows("tree") else 0,
        multicast=rule.multicast() if all_reduces and rule.allows("nvls") else 0,
        peers=rule.peers(),
        network=rule.shared_network(eager=eager),
    )


class _Rule:
    """The sizes and counts that the parts have in common."""

    def __init__(
        self, communicator: NcclCommunicator, device: Device, environment: Mapping[str, str]
    ) -> None:
        self.of = communicator
        self.environment = environment
        self.generation = device.compute_capability[0]
        modules = ("SXM", "HBM3", "H200", "B200")  # which NVLink connects to the others of their machine
        is_slice = ":" in device.name  # it has no links to others
        self.nvlink = not is_slice and any(part in device.reported_as for part in modules)
        self.one_machine = communicator.ranks == communicator.local_ranks
        # Consumer cards have no peer-to-peer access: NCCL uses host memory.
        through_host = "GeForce" in device.reported_as or self.number("NCCL_P2P_DISABLE", 0) == 1
        ll, ll128, simple = (self.number(name, size) for name, size in _BUFFERS.items())
        self.simple = simple
        reads = self.nvlink and device.compute_capability == (
            8,
            0,
        )  # graph/paths.cc: then Simple is the sender's
        send, receive = (simple, ll + ll128) if reads else (0, ll + ll128 + simple)
        self.send = 0 if through_host else _rounded(_PAGE + send)
        self.receive = 0 if through_host else _rounded(_PAGE + receive)
        # transport/net.cc with GPUDirect RDMA: a sender's LL buffer is in host memory.
        direct = self.number("NCCL_NET_GDR_LEVEL", 1) > 0 and self.nvlink
        self.net_send = _rounded(ll128 + simple) if direct else 0
        self.net_receive = _rounded(ll + ll128 + simple) if direct else 0
        self.virtual_memory = self.number("NCCL_CUMEM_ENABLE", 1) != 0
        self.lazy = self.virtual_memory and self.number("NCCL_RUNTIME_CONNECT", 1) != 0
        self.channels = self._channels()
        self.peer_channels = self._peer_channels()

    def number(self, name: str, default: int) -> int:
        """Return a variable's value; the default if it is not set or is no number, as NCCL does."""
        try:
            return int(self.environment.get(name, ""), 0)
        except ValueError:
            return default

    def allows(self, algorithm: str) -> bool:
        """Return whether NCCL_ALGO allows an algorithm; it names some, or after a ^ those not to use."""
        text = self.environment.get("NCCL_ALGO", "").lower()
        if not text or ":" in text:  # with a colon, it is by collective
            return True
        return (algorithm in text.strip("^").split(",")) != text.startswith("^")

    def _channels(self) -> int:
        """Return the channels of rings and trees (graph/connect.cc, the end of ``ncclTopoPostset``)."""
        found = _MOST_CHANNELS  # a single rank has nothing that limits them, NVIDIA/nccl#2363
        if self.of.ranks > 1:
            within = _CHANNELS.get(self.generation, 32) if self.one_machine else _CHANNELS_BETWEEN_MACHINES
            found = within if self.nvlink else _CHANNELS_WITHOUT_NVLINK
        most = self.number("NCCL_MAX_NCHANNELS", self.number("NCCL_MAX_NRINGS", _MOST_CHANNELS))
        least = self.number("NCCL_MIN_NCHANNELS", self.number("NCCL_MIN_NRINGS", 1))
        most = min(most, self.number("NCCL_MAX_CTAS", self.of.max_ctas or _MOST_CHANNELS))
        least = max(least, self.number("NCCL_MIN_CTAS", self.of.min_ctas or 1))
        return min(_MOST_CHANNELS, max(least, min(found, most), 1))

    def _peer_channels(self) -> int:
        """Return the channels of send and receive (graph/paths.cc, ``ncclTopoComputeP2pChannels``)."""
        most = self.number("NCCL_MAX_P2P_NCHANNELS", _MOST_CHANNELS)
        return _power_of_two(max(min(self.channels, most), self.number("NCCL_MIN_P2P_NCHANNELS", 1)))

    def _channels_per_peer(self) -> int:
        between = -(-_NETWORK_BANDWIDTH.get(self.generation, 50) // _CHANNEL_BANDWIDTH)
        between = max(2, self.number("NCCL_NCHANNELS_PER_NET_PEER", between))
        within = 2 * _NVLINKS.get(self.generation, 18) if self.nvlink else 2
        each = _power_of_two(within if self.one_machine else min(within, between))
        if self.one_machine:
            return min(each, self.peer_channels)
        while each > 1 and each * -(-self.of.ranks // _PEERS_PER_ROUND) > self.peer_channels:
            each //= 2
        return each

    def bookkeeping(self) -> int:
        """Return what channel.cc and ``devCommSetup`` of init.cc allocate; little without cuMem."""
        if not self.virtual_memory:
            return 0
        each = 2 if self.of.shares else 3  # the peers of a channel are the parent's
        return (each * max(self.channels, self.peer_channels) + 2) * _GRANULARITY

    def _ends(self) -> int:
        """Return in how many channels this rank is the one that the network reaches, in each direction."""
        return 0 if self.one_machine else -(-self.channels // self.of.local_ranks)

    def ring(self) -> int:
        """Return the bytes of rings (``ncclTransportRingConnect``, transport/generic.cc)."""
        ends = self._ends()
        local = (self.channels - ends) * (self.send + self.receive)
        return local + ends * (self.net_send + self.net_receive)

    def tree(self) -> int:
        """Return what trees add (``ncclTransportTreeConnect``): on a machine, a chain in the ring's order."""
        ends = self._ends()
        if not self.one_machine:  # its ends differ from channel to channel; a rank inside is the upper bound
            local = (self.channels - ends) * (self.send + self.receive) if self.of.local_ranks > _PAIR else 0
            return local + ends * (_TREE_ARITY - 1) * (self.net_send + self.net_receive)
        first, last = self.of.rank == 0, self.of.rank == self.of.ranks - 1
        return self.channels * (self.send * (not first) + self.receive * (not last))

    def multicast(self) -> int:
        """Return what NVLink SHARP takes (``ncclNvlsBufferSetup``, ``ncclNvlsSetup``, transport/nvls.cc)."""
        usual = _MULTICAST_CHANNELS.get(self.generation, 0) if self.nvlink else 0
        if not (usual and self.one_machine and self.number("NCCL_NVLS_ENABLE", 2)):
            return 0
        channels = self.number("NCCL_NVLS_NCHANNELS", usual)
        channels = max(self.of.min_ctas or 1, min(channels, self.of.max_ctas or channels))
        buffer = self.number("NCCL_NVLS_CHUNKSIZE", 128 * 1024) * _STEPS
        bookkeeping = (channels + 1) * _GRANULARITY
        return _rounded(channels * 2 * buffer * self.of.ranks) + bookkeeping

    def peers(self) -> int:
        """Return the bytes of connections for send and receive (``transport/p2p.cc``; ``connIndex`` 1)."""
        others = self.of.local_ranks - 1
        sends, receives = min(self.of.sends, others), min(self.of.receives, others)
        return self._channels_per_peer() * (sends * self.send + receives * self.receive)

    def shared_network(self, *, eager: bool) -> int:
        """Return what peers on other machines share (``sharedNetBuffersInit``, transport/net.cc)."""
        usual = 128 * 1024 if not self.one_machine else (512 if self.nvlink else 128) * 1024
        chunk = min(usual, self.simple // _STEPS)
        each = self.peer_channels * _SHARED_STEPS * chunk
        if not self.net_send:
            return each if eager else 0
        remote = [count >= self.of.local_ranks for count in (self.of.sends, self.of.receives)]
        return max(sum(remote), eager) * each


def _rounded(size: int) -> int:
    return -(-size // _GRANULARITY) * _GRANULARITY


def _power_of_two(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()
