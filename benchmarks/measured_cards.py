"""Read what ``memfit doctor --time`` saved on a card: its kernels become rows as those of public tables are.

FOLDER has such files in ``doctor`` (``*.json``).
"""

from pathlib import Path

import msgspec
from measured_kernels import Row, Rows

from memfit.devices import find_device
from memfit.records import KernelMeasurement
from memfit.timing.kernel_times import KernelTimes, kind_with_precision
from memfit.timing.kernel_work import issues_nothing


def doctor(folder: Path, rows: Rows) -> None:
    """Kernels on cards that people measured; what runs several kinds of them is left out."""
    for file in sorted(folder.glob("*.json")):
        measured = msgspec.json.decode(file.read_bytes(), type=KernelMeasurement)
        device = find_device(measured.card)
        times = {tf32: KernelTimes(device, tf32=tf32) for tf32 in (False, True)}
        for kernel in measured.kernels:
            launched = [each for each in kernel.operations if not issues_nothing(each)]
            works = tuple(times[kernel.tf32].work(each) for each in launched)
            kinds = {"link" if work.over_link else kind_with_precision(work) for work in works}
            if len(kinds) == 1 and "link" not in kinds:
                row = Row(works, kernel.seconds, device, "doctor", warm=True)
                rows[kinds.pop(), device.name].append(row)


READERS = {"doctor": (doctor,)}
