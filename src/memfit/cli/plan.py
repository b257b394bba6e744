"""``memfit plan``."""

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

import memfit
from memfit.cli.command_output import PlanSoFar, show_script_progress, text_before_runs, write_plan
from memfit.cli.options import (
    OUTPUT,
    Fail,
    JobSize,
    Json,
    MemoryBudget,
    Module,
    Output,
    Script,
    Values,
    checked_script_keywords,
    json_output_file,
    option_read_by,
)
from memfit.errors import UsageError
from memfit.run.options import STEPS
from memfit.units import parse_seconds

_LEAST_STEPS = 2


def plan(
    *command: Script,
    module: Module = False,
    budget: MemoryBudget = MemoryBudget(),
    ranks: JobSize = JobSize(),
    bitwise: bool = False,
    allow: tuple[Literal["amp", "bf16", "8bit"], ...] = (),
    max_slowdown: float | None = None,
    max_time: Annotated[float | None, option_read_by(parse_seconds)] = None,
    steps: int = STEPS,
    chart: Annotated[bool, Parameter(group=OUTPUT)] = False,
    html: Annotated[Path | None, Parameter(group=OUTPUT)] = None,
    output: Output = None,
    json: Json = None,
    fail: Fail = False,
    values: Values = (),
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
    script that trains on one GPU then trains on all of them, which share each of its batches:
    with DDP if that fits, otherwise with ZeRO-1 or FSDP2, which memfit applies when the script creates its
    optimizer. Times are estimated for the GPU of --gpu.

    Args:
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
            leaves the fastest so far. It has the contents of --json.
        fail: Exit with code 1 if no plan fits.
    """
    if steps < _LEAST_STEPS:
        raise UsageError(f"--steps {steps} is too few: memfit records the second training step.")
    outputs = {"-o": output, "--html": html, "--json": json_output_file(json)}
    options = checked_script_keywords("plan", command, outputs, module=module, ranks=ranks)
    found = PlanSoFar(output)
    with (
        found.named_on_ctrl_c(),
        show_script_progress(steps, reruns=text_before_runs("once for each plan")) as show,
    ):
        result = memfit.plan(
            **options,
            **vars(budget),
            steps=steps,
            values=",".join(values),
            bitwise=bitwise,
            allow=allow,
            max_slowdown=max_slowdown,
            max_time=max_time,
            policies=chart or html is not None,
            on_progress=show,
            on_found=found.keep,
        )
    write_plan(result, json, output, html)
    return 1 if fail and result.chosen is None else 0
