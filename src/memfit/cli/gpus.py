"""``memfit gpus``."""

from memfit.cli.console import stdout


def gpus() -> int:
    """List the GPUs that memfit dry-run --gpu accepts."""
    from memfit.devices import all_devices
    from memfit.report.terminal.devices import print_devices

    with stdout() as console:
        print_devices(all_devices(), console)
    return 0
