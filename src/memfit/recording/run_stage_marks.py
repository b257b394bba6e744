"""Mark the moments that separate the stages of a run: batches, evaluations, checkpoints.

    for batch in loader:  BATCH ... LOADER_END    module(...)  FORWARD, EVALUATION if it trains nothing
    torch.load            LOAD                    state_dict   SAVE state      torch.save   SAVE file

``analysis/run_stages.py`` makes stages of these.
"""

import itertools
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.modules.module import _global_forward_pre_hooks, register_module_forward_pre_hook

from memfit.patching.installed_hooks import InstalledHooks
from memfit.patching.patches import Patch
from memfit.recording.event_labels import LabelBook
from memfit.recording.training_steps import TrainingStepTracker
from memfit.records import MarkKind, SaveKind, UntrainedForwardReason

_LOADER = Patch("torch.utils.data.dataloader:DataLoader", "_get_iterator", why="number the loaders")
_LOADER_ITERATOR = Patch(
    "torch.utils.data.dataloader:_BaseDataLoaderIter", "__next__", why="mark each batch and the end of a pass"
)
_MODULE = Patch("torch.nn.modules.module:Module", "state_dict", why="mark checkpoints")
_OPTIMIZER = Patch("torch.optim.optimizer:Optimizer", "state_dict", why="mark checkpoints")
_FILES = Patch("torch", "save", "load", why="mark checkpoints", source="torch/serialization.py")
_SAFETENSORS = Patch("safetensors.torch", "save_file", "load_file", why="mark checkpoints")


class RunStageMarker:
    """Marks batches, evaluations and checkpoints from ``install`` on.

    Args:
        book: receives the marks.
        steps: knows the optimizers, and ends the script when its time is up.
        wanted: whether to mark anything: a run that is ended after a few steps has one stage.
        labelled: whether the recorder labels modules, and so calls ``enter_root`` itself.
    """

    def __init__(self, book: LabelBook, steps: TrainingStepTracker, *, wanted: bool, labelled: bool) -> None:
        self._book, self._steps, self._labelled = book, steps, labelled
        self.wanted = wanted
        """Whether to mark anything; it may be changed before ``install``."""
        self._number: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # of each loader
        self._next_number = itertools.count()
        self._loader_of: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()  # by iterator
        self._trained: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self._untrained: weakref.WeakKeyDictionary[torch.nn.Module, object] = weakref.WeakKeyDictionary()
        """Modules without parameters in any optimizer, and the optimizers with the number of their groups."""
        self._making_state = False
        self._thread = threading.main_thread()  # the last that read a batch
        self._reading = False  # a batch: a data set may read its samples from files, or write a cache

    def install(self, hooks: InstalledHooks) -> None:
        """Hook loaders, and what reads and writes checkpoints."""
        if not self.wanted:
            return
        hooks.wrap(_LOADER, "_get_iterator", self._begin)
        hooks.wrap(_LOADER_ITERATOR, "__next__", self._next)
        hooks.wrap(_MODULE, "state_dict", self._make_state)
        hooks.wrap(_OPTIMIZER, "state_dict", self._make_state)
        hooks.wrap(_FILES, "save", self._save)
        hooks.wrap(_FILES, "load", self._load)
        hooks.wrap_when_imported(_SAFETENSORS, save_file=self._save, load_file=self._load)
        if not self._labelled:
            forwards = NextForwardWatcher(lambda: self._steps.in_backward, self._enter_unlabelled_root)
            forwards.install(hooks, self._book)

    def enter_root(self, module: torch.nn.Module) -> bool:
        """Mark a forward of an outermost module that may be part of an evaluation; return whether it may."""
        if not self.wanted:
            return False
        gradients = torch.is_grad_enabled()
        if next(module.parameters(), None) is None:
            kind = UntrainedForwardReason.NO_PARAMETERS
        elif gradients and module.training:
            return False
        elif module.training or not self._is_trained(module):
            kind = UntrainedForwardReason.NO_GRADIENTS
        else:
            kind = UntrainedForwardReason.EVAL_MODE if gradients else UntrainedForwardReason.EVALUATES
        self._book.mark(MarkKind.EVALUATION, kind)
        return True

    def _enter_unlabelled_root(self, module: torch.nn.Module) -> bool:
        self._steps.enter_forward()
        return self.enter_root(module)

    def _is_trained(self, module: torch.nn.Module) -> bool:
        if module in self._trained:
            return True
        optimizers = self._steps.optimizers
        # References, which never equal those of later optimizers, and do not keep these alive.
        now = tuple((weakref.ref(optimizer), len(optimizer.param_groups)) for optimizer in optimizers)
        if self._untrained.get(module) == now:
            return False
        groups = (group for optimizer in optimizers for group in optimizer.param_groups)
        own = {id(parameter) for parameter in module.parameters()}
        if any(id(parameter) in own for group in groups for parameter in group["params"]):
            self._trained.add(module)
            return True
        self._untrained[module] = now
        return False

    def _begin(self, original: Callable[..., Any], loader: Any) -> Any:
        iterator = original(loader)
        self._loader_of[iterator] = loader
        if loader not in self._number:
            self._number[loader] = next(self._next_number)
        return iterator

    def _next(self, original: Callable[..., Any], iterator: Any) -> Any:
        loader = self._loader_of.get(iterator)
        if loader is None:
            return original(iterator)
        self._steps.end_in_time()
        self._thread = threading.current_thread()
        number = self._number[loader]
        try:
            # The mark comes first: a pinned batch is made inside.
            self._book.mark(MarkKind.BATCH, number)
            self._reading = True
            return original(iterator)
        except StopIteration:
            self._book.mark(MarkKind.LOADER_END, number)
            raise
        finally:
            self._reading = False

    def _make_state(self, original: Callable[..., Any], holder: Any, *args: Any, **kwargs: Any) -> Any:
        if self._making_state:  # a module's calls its submodules'
            return original(holder, *args, **kwargs)
        self._making_state = True
        self._book.mark(MarkKind.SAVE, SaveKind.STATE)
        try:
            return original(holder, *args, **kwargs)
        finally:
            self._making_state = False

    def _save(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not self._reading:
            beside = threading.current_thread() not in (threading.main_thread(), self._thread)
            self._book.mark(MarkKind.SAVE, SaveKind.FILE_BESIDE if beside else SaveKind.FILE)
        return original(*args, **kwargs)

    def _load(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not self._reading:
            self._book.mark(MarkKind.LOAD, 0)
        return original(*args, **kwargs)


_OF_FORWARDS = (MarkKind.FORWARD, MarkKind.EVALUATION)


class NextForwardWatcher:
    """Notices the first forward after each mark, and all forwards that train nothing.

    PyTorch calls a hook on all modules several hundred times in a step of a large model. The hook here is in
    PyTorch's table from a mark of the run until its first call, which is the outermost module's.

    Modules without parameters, such as losses, are not noticed.

    Args:
        in_backward: returns whether a backward pass is running, which makes a forward a recomputation.
        on_root: called with an outermost module that is about to run; returns whether the forward may train
            nothing. If so, the next one is noticed, too: it may train, and no mark is between.
    """

    def __init__(self, in_backward: Callable[[], bool], on_root: Callable[[torch.nn.Module], bool]) -> None:
        self._in_backward, self._on_root = in_backward, on_root
        self._hooks: InstalledHooks
        self._key = -1  # in PyTorch's table
        self._awaited = False

    def install(self, hooks: InstalledHooks, book: LabelBook) -> None:
        """Notice forwards from now on."""
        handle = register_module_forward_pre_hook(self._enter)
        hooks.add(handle)
        self._hooks, self._key, self._awaited = hooks, handle.id, True
        book.listeners.append(self._after_mark)

    def _after_mark(self, kind: MarkKind, _index: int) -> None:
        if kind not in _OF_FORWARDS and not self._awaited:
            self._await()

    def _await(self) -> None:
        self._awaited = True
        if not (self._hooks.are_suspended or self._hooks.removed):  # resuming puts it back
            _global_forward_pre_hooks[self._key] = self._enter

    def _enter(self, module: torch.nn.Module, _arguments: tuple[object, ...]) -> None:
        if torch.compiler.is_compiling() or self._in_backward():
            return
        if not self._awaited:  # it was suspended meanwhile, and put back
            _global_forward_pre_hooks.pop(self._key, None)
            return
        if next(module.parameters(), None) is None:
            return
        self._awaited = False
        _global_forward_pre_hooks.pop(self._key, None)
        if self._on_root(module):
            self._await_after(module)

    def _await_after(self, module: torch.nn.Module) -> None:
        """Notice the next forward when a module has returned, or failed."""

        def leave(*_: object) -> None:
            handle.remove()
            self._await()

        handle = module.register_forward_hook(leave, always_call=True)
