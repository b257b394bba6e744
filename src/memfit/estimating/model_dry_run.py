"""Run a serialised model on the ghost, and report a failure of its script as one of the model."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from memfit.errors import TargetError
from memfit.estimating.serialise_training_step import SerialisedModel
from memfit.records import DeviceUse, DryRun, Note, Provenance
from memfit.temporary_folders import TemporaryFolder

_LOSS_CALL = (
    "memfit called the loss as loss(model, inputs); such a loss must run the forward itself. To use a loss "
    "of (output, target), pass a criterion module: loss=nn.MSELoss(), inputs=(x, target)."
)


@dataclass(frozen=True, slots=True)
class ModelDryRun:
    """Runs a model's training step on the ghost of any GPU; ``Estimate`` keeps it for ``fits(gpu)``."""

    model: SerialisedModel
    dry_run: Callable[..., DryRun]
    """Runs a module on the ghost with the options of the estimate."""

    def __call__(self, gpu: str, memory: int | None, *, beyond: DeviceUse | None = None) -> DryRun:
        """Run on a GPU, by name, with so many bytes; None for that GPU's own memory.

        If ``beyond`` is a GPU that is too small, the result says what the model needs (``needs``).

        Raises:
            TargetError: the model, the loss or the optimizer failed on the ghost.
            UsageError: there is no such GPU.
        """
        with TemporaryFolder() as folder:
            file = Path(folder) / "model.job"
            file.write_bytes(self.model.data)
            script = "memfit.estimating.training_loop"
            result = self.dry_run(script, [str(file)], gpu=gpu, memory=memory, beyond=beyond)
        if result.end.reason == "interrupted":
            raise KeyboardInterrupt
        if result.end.reason == "exception":
            raise TargetError(self._failure(result))
        notes = tuple(Note(Provenance.ASSUMED, text, sizes=True) for text in self.model.notes)
        return replace(result, command=(self.model.name,), notes=(*notes, *result.notes))

    def _failure(self, result: DryRun) -> str:
        gaps = " ".join(note.text for note in result.notes if note.sizes)
        where = f" ({result.end.where})" if result.end.where else ""
        called = f" {_LOSS_CALL}" if self.model.calls_loss else ""
        return f"The model failed on the ghost{where}: {result.end.exception}.{called} {gaps}".rstrip()
