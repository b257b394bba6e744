"""``memfit doctor``."""

import io
import os
import sys
from contextlib import redirect_stderr

from memfit.cli.command_output import console_on_stdout


def doctor(
    *,
    gaps: bool = False,
    context: bool = False,
    time: bool = False,
    patches: bool = False,
) -> int:
    """Check that PyTorch, the C compiler, and the ghost (memfit's stand-in for a GPU) work on this machine.

    Args:
        gaps: List the CUDA functions that PyTorch may call but the ghost does not implement.
        context: Measure, on this machine's GPU, how much memory a process holds outside PyTorch's allocator,
            and how several settings change that amount. Later dry runs for this GPU use the measured figure,
            and memfit prints it as lines that you can contribute.
        time: Measure how long this machine's processor takes for Python, PyTorch and autograd in a training
            step; and, if the machine has a GPU, how long its kernels take, in less than a minute. Later dry
            runs use the measured times, and memfit prints those of kernels as lines that you can contribute.
        patches: List every name that memfit replaces in PyTorch and in other libraries while a script runs,
            and whether the versions installed here have it.
    """
    if context:
        return _measure_context()
    if time:
        return _measure_time()
    if patches:
        return _list_patches()
    from memfit.ghost.environment_checks import diagnose
    from memfit.report.terminal.doctor import print_diagnosis

    findings = diagnose()
    with console_on_stdout() as console:
        return print_diagnosis(findings, console, details=gaps)


def _measure_context() -> int:
    from memfit.card.context_measurement import keep_measured_context, measure_context
    from memfit.report.terminal.doctor import context_toml_lines, print_context_stages

    report = measure_context()
    with console_on_stdout() as console:
        print_context_stages(report, console)
    if saved := keep_measured_context(report):
        print(f"Saved for dry runs for this GPU with this PyTorch version: {saved}", file=sys.stderr)
        print("To share it with other users, send these lines for memfit's devices.toml:", file=sys.stderr)
        print(context_toml_lines(report), file=sys.stderr)
    return 0


def _measure_time() -> int:
    from memfit.devices import find_device
    from memfit.errors import UnsuitableEnvironmentError
    from memfit.report.terminal.doctor import kernel_toml_lines, print_host_times, print_kernel_times
    from memfit.run.measure_host_times import measure_host_times
    from memfit.run.measure_kernel_times import measure_kernel_times
    from memfit.timing.saved_kernel_factors import kernel_factors, kernel_times_file

    times = measure_host_times()
    with console_on_stdout() as console:
        print_host_times(times, console)
    load, processors = os.getloadavg()[0], os.cpu_count() or 1
    if load > processors:
        print(
            f"This machine is busy (load {load:.1f} on {processors} processors): measure again when it is "
            "idle. Until then, dry runs count with these figures.",
            file=sys.stderr,
        )
    try:
        measured = measure_kernel_times()
    except UnsuitableEnvironmentError as error:
        print(f"Only the host was measured. {error}", file=sys.stderr)
        return 0
    card = find_device(measured.card)
    factors = kernel_factors(measured, card)
    with console_on_stdout() as console:
        print_kernel_times(measured, factors, console)
    saved = kernel_times_file(card.name, measured.torch)
    print(f"Saved for dry runs for this GPU with this PyTorch version: {saved}", file=sys.stderr)
    print("To share it with other users, send that file, or at least these lines:", file=sys.stderr)
    print(kernel_toml_lines(measured, card.name, factors), file=sys.stderr)
    return 0


def _list_patches() -> int:
    from memfit.patching.patches import replaced_names
    from memfit.report.terminal.doctor import print_patched_names

    with redirect_stderr(io.StringIO()):  # libraries warn when they are imported
        names = replaced_names()
    with console_on_stdout() as console:
        return print_patched_names(names, console)
