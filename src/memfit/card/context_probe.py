"""A process that uses a card stage by stage, and reports after each stage the bytes it holds.

``main()`` takes from the command line whether convolutions use cuDNN, and prints a ``CardContextReport``.
"""

import sys
from collections.abc import Iterator
from datetime import UTC, datetime

import msgspec

from memfit.card.detect_card import detect_card
from memfit.card.outside_allocator import OutsideMemoryMeter
from memfit.records import CardContextReport, CardContextStage, MachineKind


def _use_card_in_stages(cudnn: bool) -> Iterator[str]:
    """Use the card, and yield the name of each stage when it is complete."""
    import torch

    torch.backends.cudnn.enabled = cudnn
    kept = [torch.empty(1, device="cuda")]
    yield "one 4-byte tensor"
    weight = torch.randn(512, 512, device="cuda", requires_grad=True)
    product = weight @ weight
    yield "first matmul"
    images = torch.randn(4, 16, 32, 32, device="cuda")
    kernel = torch.randn(32, 16, 3, 3, device="cuda", requires_grad=True)
    convolved = torch.nn.functional.conv2d(images, kernel, padding=1)
    yield "first convolution"
    torch.autograd.backward(product.sum() + convolved.sum() + kept[0].sum())
    yield "first backward"


def main() -> None:
    """Run the stages, and print the bytes held after each."""
    cudnn = msgspec.json.decode(sys.argv[1], type=bool)
    meter = OutsideMemoryMeter()
    import torch

    measured, way = [], ""
    for what in _use_card_in_stages(cudnn):
        torch.cuda.synchronize()
        reading = meter.read()
        measured.append(
            CardContextStage(reading.process, reading.reserved, torch.cuda.memory_allocated(0), what)
        )
        way = reading.way
    card = detect_card("measure the CUDA context")
    print(
        msgspec.json.encode(
            CardContextReport(
                card=card.name,
                driver=card.driver,
                cuda=card.cuda,
                torch=str(torch.__version__),
                total=torch.cuda.mem_get_info(0)[1],
                machine=MachineKind.REHEARSAL if card.rehearsal else MachineKind.CARD,
                way=way,
                day=datetime.now(UTC).date().isoformat(),
                stages=tuple(measured),
            )
        ).decode()
    )
