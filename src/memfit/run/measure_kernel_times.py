"""How long kernels take on this machine's card: measured in a process of its own, and kept."""

import msgspec

from memfit.atomic_files import write_output_file
from memfit.card.detect_card import detect_card
from memfit.devices import find_device
from memfit.errors import UnsuitableEnvironmentError
from memfit.python_command import output_of_module
from memfit.records import KernelMeasurement
from memfit.timing.saved_kernel_factors import kernel_times_file

_TIMEOUT = 120  # seconds; the process stops timing after 40


def measure_kernel_times() -> KernelMeasurement:
    """Time kernels on the first card, in less than a minute, and keep the result in the cache folder.

    Raises:
        UnsuitableEnvironmentError: there is no real card, or the cache folder cannot be written.
        UnknownDeviceError: memfit does not know the card.
        TargetError: the process on the card failed; the message quotes the last lines of its error.
    """
    card = detect_card("time kernels")
    if card.rehearsal:
        raise UnsuitableEnvironmentError(
            "Cannot time kernels without a real device: memfit's ghost stands in for the GPU, and runs none. "
            "Use a machine with a GPU."
        )
    device = find_device(card.name)
    printed = output_of_module("memfit.run.kernel_probe", f"time kernels on the {device.name}", _TIMEOUT)
    measured = msgspec.json.decode(printed, type=KernelMeasurement)
    path = kernel_times_file(device.name, measured.torch)
    write_output_file(path, msgspec.json.format(msgspec.json.encode(measured)))
    return measured
