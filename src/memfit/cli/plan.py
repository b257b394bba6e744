"""``memfit plan``."""

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from memfit.atomic_files import check_outputs
from memfit.cli.console import PlanSoFar, progress, write_plan
from memfit.cli.options import (
    GHOST,
    OUTPUT,
    TARGET,
    expect_script,
    json_file,
    launched_job,
    memory_or_none,
    script_file,
)
from memfit.devices import DEFAULT
from memfit.errors import UsageError
from memfit.run.options import STEPS, RunOptions
from memfit.run.rank import Rank
from memfit.units import parse_seconds

USAGE = "Usage: memfit plan [OPTIONS] SCRIPT.py [ARGS...]\n       memfit plan [OPTIONS] -m MODULE [ARGS...]"
_LEAST_STEPS = 2
_RUNS = (
    "memfit: running the script once for each plan, without terminal input and with its output hidden. Each "
    "run writes the script's output files again."
)


def plan(  # noqa: PLR0913 - one parameter an option
    *command: Annotated[str, Parameter(show=False, allow_leading_hyphen=True)],
    module: Annotated[bool, Parameter(name=["-m", "--module"], negative="")] = False,
    budget: Annotated[str | None, Parameter(group=TARGET)] = None,
    gpu: Annotated[str, Parameter(group=TARGET)] = DEFAULT,
    in_use: Annotated[str, Parameter(group=TARGET)] = "0",
    nproc: Annotated[int, Parameter(group=TARGET)] = 1,
    nnodes: Annotated[int, Parameter(group=TARGET)] = 1,
    bitwise: Annotated[bool, Parameter(negative="")] = False,
    allow: Annotated[tuple[Literal["amp", "bf16", "8bit"], ...], Parameter(negative="")] = (),
    max_slowdown: float | None = None,
    max_time: str | None = None,
    steps: int = STEPS,
    chart: Annotated[bool, Parameter(negative="", group=OUTPUT)] = False,
    html: Annotated[Path | None, Parameter(group=OUTPUT)] = None,
    output: Annotated[Path | None, Parameter(name=["-o", "--output"], group=OUTPUT)] = None,
    json: Annotated[str | None, Parameter(group=OUTPUT, allow_leading_hyphen=True)] = None,
    fail: Annotated[bool, Parameter(negative="", group=OUTPUT)] = False,
    values: Annotated[tuple[str, ...], Parameter(negative="", group=GHOST)] = (),
) -> int:
    """Find the fastest way to make a script fit a memory budget, without a GPU.

    memfit runs the unmodified script on the ghost, operation by operation. Where samples do not depend on
    each other, it divides batches into micro-batches, whose gradients one update sums; and it solves for the
    activations to recompute: in part or in full, module by module. It then runs the script under that plan.
    If the plan is over the budget, or leaves too much of it unused, memfit corrects its model and solves
    again. Every figure of needs comes from such a run. Recomputation changes no result, bit for bit; with
    micro-batches, sums are taken in another order. Where gradients and the optimizer's state hold much, it
    also tries to update parameters in the backward, and to keep the state on the host: bit for bit, too.

    With --nproc, the plan is one for every rank, and its needs are those of the rank that needs most. A
    script that trains on one GPU then trains on all of them, each rank on batches of the script's own size:
    with DDP if that fits, otherwise with ZeRO-1 or FSDP2, which memfit applies when the script creates its
    optimizer.

    Args:
        command: The script and its own arguments.
        module: Run a module, as python -m does.
        budget: How much GPU memory the script may use, for example 8GiB. It includes the CUDA context, as
            with memfit dry-run --memory. By default, the memory of the GPU.
        gpu: The GPU to assume: a name that memfit gpus lists, or a MIG slice such as A100-80GB:1g.10gb.
            Times are estimated for it.
        in_use: Assume that the desktop or other jobs already use this much GPU memory, for example 1.5GiB.
        nproc: Plan for this many processes, with a GPU each, as torchrun --nproc-per-node would start them.
        nnodes: Assume this many machines, each with --nproc processes.
        bitwise: Find a plan whose results are the same bit for bit: batches are not divided into
            micro-batches, and the optimizer computes as it does.
        allow: Other numerics that the plan may use: amp (bf16 autocast), bf16 (parameters in bf16) or 8bit
            (the state of Adam or AdamW in 8 bits, by bitsandbytes). memfit never uses them otherwise. May be
            repeated.
        max_slowdown: How many times as long as the script as written a step may take, at least 1, for example
            1.3. If no plan that fits is predicted to be that fast, memfit reports the fastest that it found,
            and chooses none.
        max_time: End the search after this time, for example 2min, with the fastest plan found by then. If
            there is none, the answer is NO PLAN FOUND IN TIME: plans that were not run may fit.
        steps: Stop each run after this many training steps, at least 2.
        chart: Draw time against memory for everything that ran, and run three policies that people use beside
            it: checkpoint every block, every second one, and every block with matrix products kept.
        html: Write this chart, every plan that ran, and what to change as an HTML page to this file: a single
            page that loads no other files. Includes --chart.
        output: Write the plan to this file, for example plan.json. memfit.apply(model, "plan.json") carries
            it out. memfit writes it as soon as a plan fits, and again for each faster one, so that Ctrl-C
            leaves the fastest so far.
        json: Write the result as JSON to this file. With -, print the JSON instead of the table. A plan file
            has the same contents.
        fail: Exit with code 1 if no plan fits.
        values: The values that the script gets when it reads from the GPU, as for memfit dry-run. May be
            repeated.
    """
    from memfit import api

    expect_script("plan", command, {"--json": json, "-o": output, "--html": html})
    if steps < _LEAST_STEPS:
        raise UsageError(f"--steps {steps} is too few: memfit records the second training step.")
    launched, nproc, nnodes = launched_job(command, nproc, nnodes, module=module)
    outputs = {"-o": output, "--html": html, "--json": json_file(json)}
    check_outputs(outputs, script_file(launched.command[0], module=launched.module))
    allowed = api.allowed_changes(bitwise=bitwise, allow=allow, max_slowdown=max_slowdown)
    options = RunOptions(
        module=launched.module,
        steps=steps,
        gpu=gpu,
        memory=memory_or_none(budget),
        rank=Rank(nproc=nproc, nnodes=nnodes),
        in_use=memory_or_none(in_use) or 0,
        values=",".join(values),
    )
    found = PlanSoFar(output)
    with found.named_on_ctrl_c(), progress(options.steps, reruns=_RUNS) as show:
        result = api.plan_on_ghost(
            launched.command[0],
            launched.command[1:],
            options,
            show,
            allowed,
            policies=chart or html is not None,
            max_time=None if max_time is None else parse_seconds(max_time),
            on_found=found.keep,
        )
    write_plan(result, json, output, html)
    return 1 if fail and result.chosen is None else 0
