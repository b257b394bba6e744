"""When torch.compile compiles the script's code."""

from collections.abc import Callable


def follow_compilations(report: Callable[[bool], None]) -> None:
    """Call ``report`` with True when torch.compile begins to compile, and with False when it ends."""
    from torch._dynamo.callback import callback_handler

    callback_handler.register_start_callback(lambda _: report(True))
    callback_handler.register_end_callback(lambda _: report(False))
