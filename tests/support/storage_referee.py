"""Referee for graph dataflow: run the graph on the CPU, and observe its storages.

Shares no code with what it judges. A first run holds every tensor, so that no address is reused; a second run
releases each tensor after its last use, as the code that torch.fx generates does, and yields the lifetimes.
"""

import copy
import itertools
from dataclasses import dataclass

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from memfit.graph.fx_dataflow import dataflow_of_fx_graph
from memfit.packing.graph_packing import alias_sets


@dataclass(frozen=True)
class Memory:
    """A storage: the values in it, its bytes, and the positions between which it exists."""

    names: tuple[str, ...]
    size: int
    begin: int
    end: int


def predicted(module):
    """Return the memory that memfit computes for a graph, without its inputs."""
    return {
        Memory(s.names, s.size, s.begin, s.end)
        for s in alias_sets(dataflow_of_fx_graph(module))
        if not s.given
    }


def observed(module, inputs):
    """Return the memory of a graph in a run, without its inputs."""
    with torch.no_grad():  # autograd would hold what a backward may need
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
    """Return the storages that only memfit predicts and those that only a run has, one string each."""
    expected, actual = predicted(module), observed(module, inputs)
    only_predicted = [f"predicted {memory}" for memory in expected - actual]
    return sorted([*only_predicted, *(f"observed {memory}" for memory in actual - expected)])


class _Holder(fx.Interpreter):
    """Holds every storage, so that an address identifies one."""

    def __init__(self, module):
        super().__init__(module, garbage_collect_values=False)
        self.names, self.sizes, self.given, self._held, self._without_bytes = {}, {}, set(), [], set()

    def run_node(self, n):
        result = super().run_node(n)
        if n.op == "output":
            for storage in self._held:
                self.sizes[storage._cdata] = 0 if storage._cdata in self._without_bytes else storage.nbytes()
            self._check_disjoint()
            return result
        for index, tensor in enumerate(
            leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)
        ):
            storage = tensor.untyped_storage()
            self._held.append(storage)
            if tensor._is_zerotensor():
                self._without_bytes.add(storage._cdata)
            name = n.name if tensor is result else f"{n.name}[{index}]"
            self.names.setdefault(storage._cdata, []).append(name)
            if n.op in ("placeholder", "get_attr"):
                self.given.add(storage._cdata)
        return result

    def _check_disjoint(self):
        """Assert that storages do not overlap."""
        full = {storage._cdata: storage for storage in self._held if self.sizes[storage._cdata]}.values()
        ends = sorted((storage.data_ptr(), storage.data_ptr() + storage.nbytes()) for storage in full)
        assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(ends))


class _Runner(fx.Interpreter):
    """Releases each tensor after its last use, and records when its storage is freed."""

    def __init__(self, module, names):
        super().__init__(module)
        self._storage_of = {name: members[0] for members in names.values() for name in members}
        self._moment, self._weak, self.lives = 0, {}, {}
        for node in module.graph.nodes:
            # An Interpreter keeps unused results; the code that torch.fx generates releases them.
            if not node.users and node.op != "output":
                self.user_to_last_uses.setdefault(node, []).append(node)

    def run_node(self, n):
        self._record_freed(self._moment)  # values last used by the previous node are freed
        result = super().run_node(n)
        for index, tensor in enumerate(
            leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)
        ):
            name = n.name if tensor is result else f"{n.name}[{index}]"
            if n.op != "output" and self._storage_of[name] == name:
                self._weak[name] = tensor.untyped_storage()._weak_ref()
                self.lives[name] = (self._moment, None)
        self._moment += 1
        if n.op == "output":
            self._record_the_rest()
        return result

    def _record_freed(self, now):
        for name in [name for name, weak in self._weak.items() if torch.UntypedStorage._expired(weak)]:
            self.lives[name] = (self.lives[name][0], now)
            torch.UntypedStorage._free_weak_ref(self._weak.pop(name))

    def _record_the_rest(self):
        self._record_freed(self._moment - 1)
        for name in list(self._weak):
            self.lives[name] = (self.lives[name][0], self._moment)
            torch.UntypedStorage._free_weak_ref(self._weak.pop(name))
