"""A process that uses a card stage by stage, and reports after each stage the bytes it holds.

``main()`` takes ``ContextProbeSettings`` on the command line and prints ``ContextProbeResult``, both as JSON.
"""

import sys
from collections.abc import Iterator

import msgspec

from memfit.card.find_card import find_card
from memfit.card.outside_allocator import OutsideMemoryMeter
from memfit.records import CardContextStage


class ContextProbeResult(msgspec.Struct, frozen=True):
    """What one process measured."""

    stages: tuple[CardContextStage, ...]
    way: str
    """How the process's bytes were determined."""
    card: str
    driver: str
    """Empty without NVML."""
    cuda: str
    """The newest version that the driver supports."""
    torch: str
    total: int
    """Bytes of the card, by cudaMemGetInfo."""
    rehearsal: bool


class ContextProbeSettings(msgspec.Struct, frozen=True):
    """How the process differs from an ordinary one, beyond its environment."""

    cudnn: bool = True


def _use_card_in_stages(cudnn: bool = True) -> Iterator[str]:
    """Use the card, and yield the name of each stage when it is complete.

    Args:
        cudnn: let convolutions use cuDNN.
    """
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
    settings = msgspec.json.decode(sys.argv[1], type=ContextProbeSettings)
    meter = OutsideMemoryMeter()
    import torch

    measured, way = [], ""
    for what in _use_card_in_stages(settings.cudnn):
        torch.cuda.synchronize()
        reading = meter.read()
        measured.append(
            CardContextStage(reading.process, reading.reserved, torch.cuda.memory_allocated(0), what)
        )
        way = reading.way
    card = find_card("measure the CUDA context")
    print(
        msgspec.json.encode(
            ContextProbeResult(
                stages=tuple(measured),
                way=way,
                card=card.name,
                driver=card.driver,
                cuda=card.cuda,
                torch=str(torch.__version__),
                total=torch.cuda.mem_get_info(0)[1],
                rehearsal=card.rehearsal,
            )
        ).decode()
    )
