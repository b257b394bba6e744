"""What a script does up to its first update: what it creates, what it passes to its model, and its loss."""

import functools
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from memfit.injection.optimized_models import OptimizedModels, listed, parameters_in
from memfit.patching.installed_hooks import InstalledHooks
from memfit.records import JobObservation
from memfit.scaffold.call_sites import CallSite, call_sites, creation_site
from memfit.scaffold.job_parts import NoJobError, Seen, job_of


def _classes(given: Mapping[str, Any]) -> tuple[Any, int]:
    scores = given["input"]
    return given["target"], scores.shape[min(1, scores.dim() - 1)]


_LIMITS: Mapping[str, Callable[[Mapping[str, Any]], tuple[Any, int]]] = {
    "embedding": lambda given: (given["input"], given["weight"].shape[0]),
    "cross_entropy": _classes,
    "nll_loss": _classes,
    "binary_cross_entropy": lambda given: (given["target"], 1),
}
"""By function of ``torch.nn.functional``: an argument, and the number below which its numbers must stay."""


class JobObserver:
    """Watches a script.

    Args:
        file: receives a ``JobObservation`` as JSON, before the first update.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._models = OptimizedModels()
        self._created: dict[int, CallSite | None] = {}
        """By module: the call that creates it."""
        self._called: list[CallSite] = []
        """The calls around the first call of a model since the last backward."""
        self._seen = Seen()

    def install(self, hooks: InstalledHooks) -> None:
        """Hook what a job consists of."""
        self._models.learn_names(hooks)
        hooks.wrap(nn.Module, "__init__", self._module_created)
        hooks.wrap(torch.optim.Optimizer, "__init__", self._optimizer_created)
        hooks.wrap(torch.optim.lr_scheduler.LRScheduler, "__init__", self._scheduler_created)
        for name, limit in _LIMITS.items():
            hooks.wrap(nn.functional, name, functools.partial(self._used, limit))
        hooks.wrap(torch.Tensor, "backward", self._backward)
        hooks.wrap(nn.utils, "clip_grad_norm_", self._clipped)
        hooks.add(register_optimizer_step_pre_hook(self._before_step))
        self._hooks = hooks

    def _module_created(
        self, original: Callable[..., None], module: nn.Module, *args: Any, **kwargs: Any
    ) -> None:
        original(module, *args, **kwargs)
        self._created[id(module)] = creation_site()

    def _optimizer_created(
        self,
        original: Callable[..., None],
        optimizer: torch.optim.Optimizer,
        params: Any,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        entries = listed(params)
        original(optimizer, entries, *args, **kwargs)
        self._seen.optimizers.append((optimizer, next(call_sites(), None)))
        for model in self._models.taken_by(parameters_in(entries)):
            if not any(model is each for each, _ in self._seen.models):
                self._seen.models.append((model, self._created.get(id(model))))
                handle = model.register_forward_pre_hook(self._before_forward)
                self._hooks.on_removal(handle.remove)

    def _scheduler_created(
        self, original: Callable[..., None], scheduler: Any, *args: Any, **kwargs: Any
    ) -> None:
        original(scheduler, *args, **kwargs)
        self._seen.scheduler = type(scheduler).__name__

    def _used(
        self, limit: Callable[[Mapping[str, Any]], tuple[Any, int]], original: Any, *args: Any, **kwargs: Any
    ) -> Any:
        tensor, number = limit(inspect.signature(original).bind(*args, **kwargs).arguments)
        storage, limits = tensor.untyped_storage()._cdata, self._seen.limits
        limits[storage] = min(number, limits.get(storage, number))
        return original(*args, **kwargs)

    def _before_forward(self, *_: Any) -> None:
        if not self._called and torch.is_grad_enabled():
            self._called = list(call_sites())
            self._seen.autocast = torch.is_autocast_enabled("cuda")

    def _backward(self, original: Callable[..., None], loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        if self._called and self._seen.loss is None:
            around = {id(site.frame): site for site in self._called}
            both = ((around[id(site.frame)], site) for site in call_sites() if id(site.frame) in around)
            self._seen.loss = next(both, None)
            self._seen.main = self._called[-1]
        original(loss, *args, **kwargs)

    def _clipped(
        self, original: Callable[..., Any], parameters: Any, max_norm: float, *args: Any, **kwargs: Any
    ) -> Any:
        self._seen.max_grad_norm = float(max_norm)
        return original(parameters, max_norm, *args, **kwargs)

    def _before_step(self, *_: Any) -> None:
        try:
            found = JobObservation(job_of(self._seen))
        except NoJobError as error:
            found = JobObservation(reason=str(error))
        self._file.write_bytes(msgspec.json.encode(found))
        self._called, self._created, self._seen = [], {}, Seen()  # frames, and what their variables hold
        self._hooks.remove()
