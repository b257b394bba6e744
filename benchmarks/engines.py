"""Run Megatron-LM's and torchtitan's own scripts as rank r of N, and compare each rank's peaks.

    python benchmarks/engines.py CHECKOUT [JOB ...]

CHECKOUT is a clone of Megatron-LM (d98e8a64 was compared; it needs einops, regex and pybind11) or torchtitan
(v0.2.2, with its requirements.txt). A job runs as one rank after the other (``--all-ranks``) and as N real
ghosts (``torchrun -m memfit``), and each rank must hold the same, to the byte: minutes.

``published`` is Megatron's test `gpt3_mcore_tp2_pp2_uninstall_te`, rank 7 of 8 A100s, on mock data, with
`mem-max-allocated-bytes` of `golden_values_dev_dgx_a100.json`. Its first updates overflow, which the ghost
cannot know: the optimizer's state is there from step 20 on a card, and from step 2 here. Rank 7 needs what
ranks 0 and 6 send, so memfit runs these beside. Exits with 1 if ranks differ, or a published peak does by
0.5 % or more.
"""

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from measuring import command_line, memfit_json, table_head, table_line

PUBLISHED = {1: 1905351680, 3: 2086473728}
"""Steps run on the ghost -> the bytes published: of the first step, and of every step from the twentieth."""
WITHIN = 0.005
_GPT = """{checkout}/pretrain_gpt.py --data-cache-path {folder}
    --num-layers 12 --hidden-size 512 --num-attention-heads 8 --seq-length 1024 --max-position-embeddings 1024
    --micro-batch-size 4 --global-batch-size 32 --train-iters 50 --lr-decay-iters 320000 --lr 0.00015
    --lr-decay-style cosine --min-lr 1.0e-5 --weight-decay 1e-2 --clip-grad 1.0 --lr-warmup-fraction .01
    --log-interval 1 --eval-interval 1000 --eval-iters 10 --log-params-norm --log-num-zeros-in-grad
    --tensor-model-parallel-size 2 --transformer-impl local --use-mcore-models --no-persist-layer-norm
    --no-masked-softmax-fusion --deterministic-mode --no-gradient-accumulation-fusion
    --distributed-backend nccl --mock-data --tokenizer-type NullTokenizer --vocab-size 50256
"""
_SMALL = f"{_GPT} --num-layers 4 --global-batch-size 16 --train-iters 3 --eval-iters 0"
_FP16 = "--pipeline-model-parallel-size 2 --fp16 --apply-query-key-layer-scaling"
_OVERLAP = "--bf16 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
_LLAMA = """-m torchtitan.train --job.config_file torchtitan/models/llama3/train_configs/debug_model.toml
    --training.steps 3 --job.dump_folder {folder} --parallelism"""
JOBS = {
    "published": (8, f"{_GPT} {_FP16}"),
    "mcore example, tp 2": (2, "{checkout}/examples/run_simple_mcore_train_loop.py"),
    "GPT, tp 2, pp 2": (4, f"{_SMALL} {_FP16}"),
    "GPT, tp 2, dp 2, distributed optimizer": (4, f"{_SMALL} {_OVERLAP}"),
    "FSDP 2": (2, f"{_LLAMA}.data_parallel_shard_degree 2"),
    "TP 2": (2, f"{_LLAMA}.tensor_parallel_degree 2"),
    "PP 2": (2, f"{_LLAMA}.pipeline_parallel_degree 2"),
    "CP 2": (2, f"{_LLAMA}.context_parallel_degree 2"),
    "FSDP 2, TP 2": (4, f"{_LLAMA}.tensor_parallel_degree 2"),
    "FSDP 2, PP 2": (4, f"{_LLAMA}.pipeline_parallel_degree 2"),
}
"""Job -> the number of ranks and the command; the last six are torchtitan's."""
COLUMNS = (
    "job",
    "ranks",
    "updates",
    "allocated / reserved by rank",
    "unexplained",
    "verdict",
    "real or published",
)
ENVIRONMENT = {
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "NCCL_ALGO": "Ring",
    "OMP_NUM_THREADS": "1",
    "PATH": f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}",  # Megatron compiles a helper
}


def run(checkout: Path, command: str, *options: str, launcher: tuple[str, ...] = ()) -> Any:
    """Dry-run a job; raise ``SystemExit`` if memfit gives no answer."""
    with tempfile.TemporaryDirectory() as new:
        job = (*options, *command.format(checkout=checkout, folder=new).split())
        folder = checkout if "-m" in job else Path(new)
        variables = {**ENVIRONMENT, "PYTHONPATH": str(checkout)}
        answer, done = memfit_json("dry-run", *job, launcher=launcher, environment=variables, folder=folder)
    if answer is None:
        raise SystemExit(done.stderr[-4000:])
    return answer


def peaks(answer: Any) -> str:
    """Return the peaks of each rank, from one bound to the other where streams race."""
    ranks: dict[str, list[int]] = {}
    for row in answer["ranks"]:
        least, most = (
            [row["peak"][size][end] for size in ("allocated", "reserved")] for end in ("least", "most")
        )
        shown = " to ".join(f"{a:,} / {b:,}" for a, b in dict.fromkeys((tuple(least), tuple(most))))
        ranks.setdefault(shown, []).extend((row["rank"], *row["also"]))
    return "; ".join(f"{', '.join(map(str, sorted(held)))}: {shown}" for shown, held in sorted(ranks.items()))


def main() -> int:
    """Run the jobs; return 1 if a peak differs."""
    parser = command_line(__doc__)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("jobs", nargs="*", metavar="JOB", help=f"{'; '.join(JOBS)} (default: the engine's)")
    arguments = parser.parse_args()
    checkout, differs = arguments.checkout.resolve(), False
    mine = (checkout / "torchtitan").exists()
    print(table_head(COLUMNS, "lrrrrll"))
    for name, (ranks, command) in JOBS.items():
        if ("torchtitan" in command) != mine or name not in (arguments.jobs or JOBS):
            continue
        count = str(ranks)
        for steps, published in (PUBLISHED if name == "published" else {0: 0}).items():
            if published:
                which = ("--gpu", "A100-80GB", "--nproc", count, "--rank", "7", "--steps", str(steps))
                alone = run(checkout, command, *which)
                allocated = alone["peak"]["allocated"]
                found, other = f"7: {allocated:,}", f"7: {published:,}"
                differs |= abs(allocated / published - 1) >= WITHIN
            else:
                alone = run(checkout, command, "--gpu", "H100", "--to-end", "--nproc", count, "--all-ranks")
                torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", count)
                found = peaks(alone)
                other = peaks(run(checkout, command, "--gpu", "H100", "--to-end", launcher=torchrun))
                differs |= found != other
            unknown = sum(term["bytes"] for term in alone["terms"] if term["name"] == "unknown")
            other = "equal" if found == other else other
            print(
                table_line((name, ranks, alone["steps"], found, unknown, alone["verdict"], other)), flush=True
            )
    return int(differs)


if __name__ == "__main__":
    sys.exit(main())
