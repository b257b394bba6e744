"""NCCL's own memory, against published measurements, and as NCCL's environment variables change it."""

import pytest

from memfit.devices import find_device
from memfit.ghost.ranks.nccl_memory import KERNELS, NcclCommunicator, nccl_memory

MIB = 1 << 20
A100, H100 = find_device("A100-80GB"), find_device("H100")
CONNECTION = 12 * MIB  # 2 to send and 10 to receive; on A100 6 and 6


def pair(**used):
    return NcclCommunicator(ranks=2, local_ranks=2, **used)


def machine(rank=0, **used):
    return NcclCommunicator(ranks=8, local_ranks=8, rank=rank, **used)


@pytest.mark.parametrize(("ranks", "published"), [(2, 544), (3, 688), (4, 688)])
def test_rank_0_of_a_communicator_takes_what_was_measured_on_4_a100(ranks, published):
    """NVIDIA/nccl#964, August 2023: an NCCL that connected all ranks at once, without cuMem."""
    communicator = NcclCommunicator(ranks=ranks, local_ranks=ranks, all_reduces=True)
    assert nccl_memory(communicator, A100, {"NCCL_CUMEM_ENABLE": "0"}).total == published * MIB


def test_a_lone_rank_takes_what_was_measured_on_an_rtx_3090():
    """NVIDIA/nccl#2366: 484 MiB. The rule's figure for NCCL's kernels is what this leaves over."""
    alone = NcclCommunicator(ranks=1, local_ranks=1, all_reduces=True)
    assert nccl_memory(alone, find_device("RTX 3090"), {}).total + KERNELS == 484 * MIB


def test_an_all_to_all_takes_what_was_measured_on_8_h100_within_5_percent():
    """NVIDIA/nccl#1685: 4.34 GB after and 1.06 GB before, in 32 channels for each of 7 peers."""
    memory = nccl_memory(machine(sends=7, receives=7), H100, {})
    assert memory.peers == 7 * 32 * CONNECTION
    assert memory.total + KERNELS == pytest.approx(3.28e9, rel=0.05)


def test_ranks_connect_only_for_what_has_run():
    nothing, ring, reduced = (
        nccl_memory(machine(rank=3, **used), H100, {})
        for used in ({}, {"collectives": True}, {"all_reduces": True})
    )
    assert nothing.total == nothing.bookkeeping == (3 * 32 + 2) * 2 * MIB
    assert (ring.ring, ring.tree, ring.multicast) == (24 * CONNECTION, 0, 0)
    assert (reduced.ring, reduced.tree) == (24 * CONNECTION, 24 * CONNECTION)
    assert reduced.multicast == 8 * 16 * 2 * 8 * 128 * 1024 + 17 * 2 * MIB  # NVLink SHARP: a buffer per rank


def test_the_first_and_the_last_rank_of_a_chain_lack_one_direction_of_its_trees():
    first, last = (nccl_memory(machine(rank=rank, all_reduces=True), H100, {}).tree for rank in (0, 7))
    assert (first, last) == (24 * 10 * MIB, 24 * 2 * MIB)


@pytest.mark.parametrize(
    ("environment", "ring"),
    [
        ({"NCCL_BUFFSIZE": str(16 * MIB)}, 24 * 24 * MIB),
        ({"NCCL_LL_BUFFSIZE": "0", "NCCL_LL128_BUFFSIZE": "0"}, 24 * 8 * MIB),
        ({"NCCL_MAX_NCHANNELS": "4"}, 4 * CONNECTION),
        ({"NCCL_MIN_NCHANNELS": "32"}, 32 * CONNECTION),
        ({"NCCL_MAX_CTAS": "2"}, 2 * CONNECTION),
        ({"NCCL_P2P_DISABLE": "1"}, 0),
        ({"NCCL_ALGO": "Tree"}, 0),
        ({"NCCL_ALGO": "^ring"}, 0),
        ({"NCCL_PROTO": "LL"}, 24 * CONNECTION),  # its buffers are allocated whether or not they may be used
        ({"NCCL_BUFFSIZE": "many"}, 24 * CONNECTION),
    ],
)
def test_nccls_environment_variables_change_what_a_ring_takes(environment, ring):
    assert nccl_memory(pair(collectives=True), H100, environment).ring == ring


def test_a_configuration_limits_the_channels_unless_a_variable_does():
    few = pair(collectives=True, max_ctas=8)
    assert nccl_memory(few, H100, {}).ring == 8 * CONNECTION
    assert nccl_memory(few, H100, {"NCCL_MAX_CTAS": "16"}).ring == 16 * CONNECTION


def test_multicast_can_be_switched_off_and_does_not_exist_before_hopper():
    all_reduced = machine(all_reduces=True)
    assert nccl_memory(all_reduced, H100, {"NCCL_NVLS_ENABLE": "0"}).multicast == 0
    assert nccl_memory(all_reduced, A100, {}).multicast == 0


def test_geforce_cards_are_connected_through_host_memory():
    memory = nccl_memory(machine(all_reduces=True, sends=7, receives=7), find_device("RTX 4090"), {})
    assert memory.total == memory.bookkeeping


def test_a_split_that_shares_takes_no_connections_of_its_own():
    memory = nccl_memory(machine(all_reduces=True, shares=True), H100, {})
    assert memory.total == memory.bookkeeping == (2 * 32 + 2) * 2 * MIB


def test_more_machines_do_not_take_more_for_a_ring():
    rings = [
        nccl_memory(NcclCommunicator(ranks=8 * machines, local_ranks=8, collectives=True), H100, {}).ring
        for machines in (2, 16, 128)
    ]
    # 16 channels: this rank is the end of two, where the network's buffers are 10 MiB each way.
    assert rings == [14 * CONNECTION + 2 * 20 * MIB] * 3


def test_peers_on_other_machines_share_buffers():
    world = NcclCommunicator(ranks=16, local_ranks=8, sends=15, receives=15)
    memory = nccl_memory(world, H100, {})
    assert memory.peers == 7 * 4 * CONNECTION  # 4 channels a peer: 50 GB/s at 14 a channel
    assert memory.network == 2 * 16 * 16 * 128 * 1024


def test_the_root_of_a_scatter_sends_and_the_others_receive():
    root, other = nccl_memory(machine(sends=7), H100, {}), nccl_memory(machine(receives=1), H100, {})
    assert (root.peers, other.peers) == (7 * 32 * 2 * MIB, 32 * 10 * MIB)
