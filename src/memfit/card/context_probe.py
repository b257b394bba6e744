"""A process that uses a card for the first time, little by little, and says after each step what it holds.

``main()`` with the keyword arguments of ``stages`` as JSON on the command line; it prints ``Probed`` as JSON.
"""

import sys
from collections.abc import Iterator

import msgspec

from memfit.card.find import find_card
from memfit.card.outside_allocator import Outside
from memfit.records import ContextStage


class Probed(msgspec.Struct, frozen=True):
    """What one process saw."""

    stages: tuple[ContextStage, ...]
    way: str
    """How the process's bytes were found."""
    card: str
    driver: str
    """Empty where NVML does not say."""
    cuda: str
    """The newest that the driver serves."""
    torch: str
    total: int
    """Bytes, as cudaMemGetInfo reports them."""
    rehearsal: bool


class Settings(msgspec.Struct, frozen=True):
    """How the process differs from an ordinary one, beyond its environment."""

    cudnn: bool = True


def stages(cudnn: bool = True) -> Iterator[str]:
    """Use the card: yield the name of each step once it has been made.

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
    """Probe, and print what was seen."""
    settings = msgspec.json.decode(sys.argv[1], type=Settings)
    outside = Outside()
    import torch

    seen, way = [], ""
    for what in stages(settings.cudnn):
        torch.cuda.synchronize()
        reading = outside.look()
        seen.append(ContextStage(what, torch.cuda.memory_allocated(0), reading.reserved, reading.process))
        way = reading.way
    card = find_card("measure the context")
    print(
        msgspec.json.encode(
            Probed(
                stages=tuple(seen),
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
