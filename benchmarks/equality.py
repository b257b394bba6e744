"""Compare strategies with hand-written loops on random networks: gradients, updated parameters, buffers.

    python benchmarks/equality.py [--networks 200] [--seed 0] [--device cuda] [--examples]

Networks are MLPs and convolutions of up to five blocks with norms, attention, LSTMs, dropout, tied weights,
frozen and shared modules, residuals and in-place operations (tests/support/random_networks.py). Each trains
for three steps, or one for the approximate comparisons. Strategies that do the same arithmetic in the same
order must give results equal bit for bit, dropout and batch norms included. Accumulation sums in a
different order than the whole batch: its results must be within 1e-6 of the norm in float32 and 1e-12 in
float64, for networks whose samples do not mix and that draw no random numbers. Exits with 1 if a comparison
fails. The same seed repeats a run.

With --examples, twelve scripts of examples/ train on the CPU in two batch slices instead: the first update's
gradients must be within the same limits, the losses of three steps within ten times these, as updates amplify
rounding, and ``memfit verify`` must agree.

On a GPU, PyTorch uses deterministic kernels where it has them, and no TF32. A difference is counted apart,
and is no failure, if two runs of the hand-written loop do not agree either.
"""

import json
import os
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from contextlib import closing
from functools import partial
from pathlib import Path

import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from measuring import ROOT, command_line

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support.random_networks import Network, networks
from support.rank_pool import RankPool
from support.strategy_mixes import CLOSE, EXACT, LIMITS, differing, error, error_of_ranks, is_reproducible

RANKS = "2 slices on each of 2 ranks = whole batch"
RECORD = ROOT / "tests/support/recorded_training.py"
EXAMPLES = (
    "mlp.py",
    "whole_run.py --samples 64 --eval-samples 64 --checkpoint /dev/null",
    "gpt.py --context 16 --batch-size 2",
    "gpt_chunked_head.py --context 16 --batch-size 2",
    "hf_trainer.py --layers 2 --sequence-length 32",
    "hf_trainer.py --model gpt2 --layers 2 --sequence-length 32",
    "accumulation.py --sequence-length 8 --micro-batch-size 4",
    "checkpointed.py --sequence-length 8 --layers 1 --batch-size 4",
    "longest_batch.py --width 64",
    "lstm.py --batch-size 8 --length 16",
    "gru.py --batch-size 8",
    "masked.py",
)


def main() -> int:
    """Print a line for each combination; return 1 if a comparison fails."""
    parser = command_line(__doc__)
    parser.add_argument("--networks", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--examples", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.examples:
        return int(sum([not example_is_equal(each.split()) for each in EXAMPLES]) > 0)
    if arguments.device == "cuda":
        use_gpu()
    # memfit warns of checkpointing that saves nothing, and of offload from a CPU.
    warnings.simplefilter("ignore")
    worst: dict[tuple[str, torch.dtype], float] = {}
    where = torch.cuda.get_device_name() if arguments.device == "cuda" else "CPU"
    print(f"{arguments.networks} networks of each kind, seed {arguments.seed}")
    print(f"{where}, torch {torch.__version__}")
    failed = bit_for_bit(drawn(arguments.networks, arguments.seed, divisible=False))
    with closing(RankPool(2)) as two_ranks:
        errors = {name: partial(error, name) for name in CLOSE}
        if arguments.device == "cpu":
            errors[RANKS] = partial(error_of_ranks, two_ranks)
        for network in drawn(arguments.networks, arguments.seed, divisible=True):
            for name, of in errors.items():
                for dtype in LIMITS:
                    worst[name, dtype] = max(worst.get((name, dtype), 0.0), of(network, dtype))
    for name in errors:
        found = [worst[name, dtype] for dtype in LIMITS]
        failed += sum(off > limit for off, limit in zip(found, LIMITS.values(), strict=True))
        print(
            f"{name:58}{arguments.networks:6} equal to {found[0]:.1e} in float32, {found[1]:.1e} in float64"
        )
    return int(failed > 0)


def example_is_equal(command: list[str]) -> bool:
    """Print by how much an example differs in batch slices, and return whether that is rounding."""
    name, *more = command
    script, cells, equal = [str(ROOT / "examples" / name), *more], [], True
    with tempfile.TemporaryDirectory() as folder:
        plan = Path(folder, "plan.json")
        plan.write_text(json.dumps({"plan": {"batch_slices": {"count": 2}}}))
        memfit = [sys.executable, "-m", "memfit"]
        for dtype, limit in LIMITS.items():
            found = []
            for prefix in ([sys.executable], [*memfit, "train", "--plan", str(plan)]):
                file = Path(folder, "found.pt")
                words = [*prefix, str(RECORD), str(file), str(dtype).removeprefix("torch."), *script]
                subprocess.run(words, cwd=folder, capture_output=True, check=True)
                found.append(torch.load(file))
            (losses, gradients), (ours, their) = found
            apart = relative_difference(gradients, their)
            most = max(abs(one / other - 1) for one, other in zip(losses, ours, strict=True))
            equal = equal and apart <= limit and most <= 10 * limit
            cells.append(f"gradients {apart:.1e}, losses {most:.1e} in {dtype}")
        verify = [*memfit, "verify", "--plan", str(plan), *script]
        done = subprocess.run(verify, cwd=folder, capture_output=True, text=True, check=False)
    print(f"{' '.join(command):68}{'; '.join(cells)}; {done.stdout.split()[0]}", flush=True)
    return equal and done.returncode == 0


def relative_difference(ones: list[torch.Tensor], others: list[torch.Tensor]) -> float:
    """Return by how much tensors differ, by norm."""
    apart = sum((one - other).double().square().sum() for one, other in zip(ones, others, strict=True))
    return float((apart / sum(one.double().square().sum() for one in ones)) ** 0.5)


def use_gpu() -> None:
    """Build networks on the GPU, and compute there in a way that can be repeated."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # a condition of deterministic matrix products
    torch.use_deterministic_algorithms(mode=True, warn_only=True)
    torch.backends.cudnn.allow_tf32 = False
    torch.set_default_device("cuda")


def bit_for_bit(networks: list[Network]) -> int:
    """Print a line for each combination that must equal its loop; return how many comparisons failed."""
    unequal: Counter[str] = Counter()
    irreproducible: Counter[str] = Counter()
    for network in networks:
        for name in EXACT:
            found = differing(name, network)
            if found and not is_reproducible(name, network):
                irreproducible[name] += 1
            elif found:
                unequal[name] += 1
                print(f"{name}: {', '.join(found)} differ: {network}", file=sys.stderr)
    for name in EXACT:
        equal = len(networks) - unequal[name] - irreproducible[name]
        apart = f", {irreproducible[name]} not by hand either" * bool(irreproducible[name])
        print(f"{name:58}{equal:6} equal bit for bit, {unequal[name]} not{apart}")
    return unequal.total()


def drawn(count: int, number: int, *, divisible: bool) -> list[Network]:
    """Return ``count`` different networks, the same ones for the same seed."""
    seen: dict[Network, None] = {}

    @seed(number)
    @settings(
        max_examples=count * 3,  # hypothesis draws some networks twice
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(networks(divisible=divisible))
    def draw(network: Network) -> None:
        seen[network] = None

    draw()
    if len(seen) < count:
        raise SystemExit(f"Only {len(seen)} of {count} different networks were drawn.")
    return list(seen)[:count]


if __name__ == "__main__":
    sys.exit(main())
