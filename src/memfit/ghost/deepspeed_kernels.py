"""Run DeepSpeed's optimizers without their kernels, which DeepSpeed compiles when an optimizer is created.

The compilation needs the CUDA toolkit or a C++ compiler, and takes minutes. The kernels update tensors that
the optimizer has created in Python, and allocate nothing themselves; the ghost would not run them.
DeepSpeed's other ops are compiled as usual.
"""

import sys
from collections.abc import Callable
from typing import Any

from memfit.ghost.note_callback_protocol import NoteCallback
from memfit.patching.patches import Patch
from memfit.records import Provenance

_BUILDER = Patch(
    "deepspeed.ops.op_builder.builder:OpBuilder",
    *("load", "jit_load"),
    why="run its optimizers without compiling their kernels, and say what it compiles",
    source="csrc/adam/multi_tensor_adam.cu and the other kernels of its optimizers, DeepSpeed 0.19",
)
_FUNCTIONS = {
    "fused_adam": {"multi_tensor_adam"},
    "fused_lion": {"multi_tensor_lion"},
    "cpu_adam": {"create_adam", "adam_update", "adam_rollback", "destroy_adam"},
    "cpu_lion": {"create_lion", "lion_update", "destroy_lion"},
    "cpu_adagrad": {"create_adagrad", "adagrad_update", "destroy_adagrad"},
}
"""The functions of each op that allocate no memory."""


class _WithoutKernels:
    """Stands for the module of a compiled op: its functions do nothing, and any other name is compiled."""

    def __init__(self, functions: set[str], compile_op: Callable[[], Any]) -> None:
        self._functions, self._compile = functions, compile_op

    def __getattr__(self, name: str) -> Any:
        return (lambda *_: None) if name in self._functions else getattr(self._compile(), name)


def run_deepspeed_without_kernels(note: NoteCallback) -> None:
    """Replace the kernels of DeepSpeed's optimizers once DeepSpeed has been imported."""

    def load(original: Callable[..., Any], builder: Any, *args: Any, **options: Any) -> Any:
        functions = _FUNCTIONS.get(builder.name)
        if functions is None:
            return original(builder, *args, **options)
        note(
            Provenance.ASSUMED,
            f"DeepSpeed's {builder.name} was not compiled: its kernels compute nothing on the ghost, and by "
            "their source (DeepSpeed 0.19) allocate no memory.",
            "",
        )
        return _WithoutKernels(functions, lambda: original(builder, *args, **options))

    def jit_load(original: Callable[..., Any], builder: Any, *args: Any, **options: Any) -> Any:
        print(f"memfit: DeepSpeed compiles {builder.name}, which may take minutes.", file=sys.stderr)
        try:
            return original(builder, *args, **options)
        except Exception:
            print(
                f"memfit: DeepSpeed could not compile {builder.name}. Install the CUDA toolkit (nvcc) and a "
                "C++ compiler, or compile it when DeepSpeed is installed: "
                f"{builder.BUILD_VAR}=1 pip install deepspeed.",
                file=sys.stderr,
            )
            raise

    _BUILDER.wrap_when_imported(load=load, jit_load=jit_load)
