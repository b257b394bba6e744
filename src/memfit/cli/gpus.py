"""``memfit gpus``."""

from typing import Annotated

from cyclopts import Parameter

import memfit
from memfit.cli.command_output import console_on_stdout, show_script_progress, text_before_runs, write_result
from memfit.cli.options import InUse, Json, Module, Script, Values, checked_script_keywords, json_output_file
from memfit.cli.price_table import read_prices
from memfit.errors import UsageError
from memfit.run.options import STEPS


def gpus(
    *command: Script,
    for_script: Annotated[bool, Parameter(name=["--for"])] = False,
    module: Module = False,
    in_use: InUse = 0,
    bitwise: bool = False,
    steps: int = STEPS,
    steps_total: int | None = None,
    price: Annotated[tuple[str, ...], Parameter(consume_multiple=False, negative="")] = (),
    json: Json = None,
    values: Values = (),
) -> int:
    """List the GPUs that --gpu accepts; with --for, which of them run a script, as written or with a plan.

    Args:
        for_script: Find out which GPUs run the script that follows. memfit runs it on the ghost, once for
            each compute capability, and looks for a plan, as memfit plan does, where it does not fit.
        bitwise: Find plans whose results are the same bit for bit.
        steps: Stop each run after this many training steps, at least 2.
        steps_total: Training steps of the whole run, for its hours and its cost on each GPU.
        price: What an hour of a GPU costs, such as RTX-4090=0.40, or a file with a table of prices and their
            date (.toml, .json); repeatable. GPUs with a price are listed first, the cheapest run first.
    """
    if not for_script:
        if price or steps_total is not None:
            raise UsageError(
                "--price and --steps-total are for a script: memfit gpus --for [OPTIONS] SCRIPT.py."
            )
        return _list(command)

    prices, priced_on = read_prices(price)
    options = checked_script_keywords(
        "gpus --for", command, {"--json": json_output_file(json)}, module=module
    )
    with show_script_progress(steps, reruns=text_before_runs("for each kind of GPU and each plan")) as show:
        result = memfit.gpus_for(
            **options,
            in_use=in_use,
            steps=steps,
            values=",".join(values),
            bitwise=bitwise,
            steps_total=steps_total,
            prices=prices,
            priced_on=priced_on,
            on_progress=show,
        )
    write_result(result, json)
    return 0


def _list(command: tuple[str, ...]) -> int:
    from memfit.devices import all_devices
    from memfit.report.terminal.gpus import print_devices

    if command:
        raise UsageError(f"memfit gpus takes no script. Did you mean memfit gpus --for {' '.join(command)}?")
    with console_on_stdout() as console:
        print_devices(all_devices(), console)
    return 0
