"""What a graph really does with memory: it is run on the CPU, and the storages are looked at. A referee.

It shares nothing with what it judges: every tensor is held, so that no address is used twice, and lives are
taken from a second run, in which a tensor is let go of after its last use, as the code does that torch.fx
writes.
"""

import copy
import itertools
from dataclasses import dataclass

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from memfit.graph.fx_dataflow import dataflow
from memfit.packing.alias_sets import alias_sets


@dataclass(frozen=True)
class Memory:
    """A storage: who lies in it, its bytes, and the moments in which it is there."""

    names: tuple[str, ...]
    size: int
    begin: int
    end: int


def told(module):
    """Return what memfit says of a graph's own memory."""
    return {Memory(s.names, s.size, s.begin, s.end) for s in alias_sets(dataflow(module)) if not s.given}


def real(module, inputs):
    """Return what a graph's own memory is when it runs."""
    with torch.no_grad():  # or autograd would hold what a backward may need
        holder = _Holder(module)
        holder.run(*copy.deepcopy(inputs), enable_io_processing=False)
        runner = _Runner(module, holder.names)
        runner.run(*copy.deepcopy(inputs), enable_io_processing=False)
    return {
        Memory(tuple(names), holder.sizes[address], *runner.lives[names[0]])
        for address, names in holder.names.items()
        if address not in holder.given
    }


def differences(module, inputs):
    """Return what memfit says and is not so, and what is so and memfit does not say, one string each."""
    said, so = told(module), real(module, inputs)
    return sorted([f"told {memory}" for memory in said - so] + [f"real {memory}" for memory in so - said])


class _Holder(fx.Interpreter):
    """Holds every storage; an address is a storage."""

    def __init__(self, module):
        super().__init__(module, garbage_collect_values=False)
        self.names, self.sizes, self.given, self._held, self._without_bytes = {}, {}, set(), [], set()

    def run_node(self, n):
        result = super().run_node(n)
        if n.op == "output":
            for storage in self._held:
                self.sizes[storage._cdata] = 0 if storage._cdata in self._without_bytes else storage.nbytes()
            self._distinct()
            return result
        for place, tensor in enumerate(
            leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)
        ):
            storage = tensor.untyped_storage()
            self._held.append(storage)
            if tensor._is_zerotensor():
                self._without_bytes.add(storage._cdata)
            name = n.name if tensor is result else f"{n.name}[{place}]"
            self.names.setdefault(storage._cdata, []).append(name)
            if n.op in ("placeholder", "get_attr"):
                self.given.add(storage._cdata)
        return result

    def _distinct(self):
        """Say that bytes of different storages are different bytes."""
        full = {storage._cdata: storage for storage in self._held if self.sizes[storage._cdata]}.values()
        ends = sorted((storage.data_ptr(), storage.data_ptr() + storage.nbytes()) for storage in full)
        assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(ends))


class _Runner(fx.Interpreter):
    """Lets go of each tensor after its last use, and sees when its storage is gone."""

    def __init__(self, module, names):
        super().__init__(module)
        self._storage_of = {name: members[0] for members in names.values() for name in members}
        self._moment, self._weak, self.lives = 0, {}, {}
        for node in module.graph.nodes:
            if (
                not node.users and node.op != "output"
            ):  # an Interpreter forgets to let go of these; the code that torch.fx writes does
                self.user_to_last_uses.setdefault(node, []).append(node)

    def run_node(self, n):
        self._look(self._moment)  # what the node before was the last to use is gone
        result = super().run_node(n)
        for place, tensor in enumerate(
            leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)
        ):
            name = n.name if tensor is result else f"{n.name}[{place}]"
            if n.op != "output" and self._storage_of[name] == name:
                self._weak[name] = tensor.untyped_storage()._weak_ref()
                self.lives[name] = (self._moment, None)
        self._moment += 1
        if n.op == "output":
            self._look_at_the_end()
        return result

    def _look(self, now):
        for name in [name for name, weak in self._weak.items() if torch.UntypedStorage._expired(weak)]:
            self.lives[name] = (self.lives[name][0], now)
            torch.UntypedStorage._free_weak_ref(self._weak.pop(name))

    def _look_at_the_end(self):
        self._look(self._moment - 1)
        for name in list(self._weak):
            self.lives[name] = (self.lives[name][0], self._moment)
            torch.UntypedStorage._free_weak_ref(self._weak.pop(name))
