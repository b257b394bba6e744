"""Compare peaks that Megatron-LM publishes of its own tests with what memfit says of the same command.

    python benchmarks/megatron.py CHECKOUT

CHECKOUT is a clone of Megatron-LM (d98e8a64 was compared); it needs einops, regex and pybind11. The test is
`gpt3_mcore_tp2_pp2_uninstall_te`, rank 7 of 8 A100s, on mock data, with `mem-max-allocated-bytes` of
`golden_values_dev_dgx_a100.json`. Its first updates overflow, which the ghost cannot know: the optimizer's
state is there from step 20 on a card, and from step 2 here. Megatron's rank 7 needs what ranks 0 and 6 send,
so memfit runs these beside: minutes. Exits with 1 if a peak differs by 0.5 % or more.
"""

import os
import sys
import tempfile
from pathlib import Path

from measuring import command_line, memfit_json, table

PUBLISHED = {1: 1905351680, 3: 2086473728}
"""Steps run on the ghost -> the bytes published: of the first step, and of every step from the twentieth."""
WITHIN = 0.005
ARGUMENTS = """
    --num-layers 12 --hidden-size 512 --num-attention-heads 8 --seq-length 1024 --max-position-embeddings 1024
    --micro-batch-size 4 --global-batch-size 32 --train-iters 50 --lr-decay-iters 320000 --lr 0.00015
    --lr-decay-style cosine --min-lr 1.0e-5 --weight-decay 1e-2 --clip-grad 1.0 --lr-warmup-fraction .01
    --log-interval 1 --eval-interval 1000 --eval-iters 10 --log-params-norm --log-num-zeros-in-grad
    --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --transformer-impl local
    --use-mcore-models --no-persist-layer-norm --no-masked-softmax-fusion --deterministic-mode
    --no-gradient-accumulation-fusion --fp16 --apply-query-key-layer-scaling --distributed-backend nccl
    --mock-data --tokenizer-type NullTokenizer --vocab-size 50256
"""
ENVIRONMENT = {
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "NCCL_ALGO": "Ring",
    "PATH": f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}",  # Megatron compiles a helper
}


def main() -> int:
    """Run the job for each published figure; return 1 if one differs."""
    parser = command_line(__doc__)
    parser.add_argument("checkout", type=Path)
    script = parser.parse_args().checkout.resolve() / "pretrain_gpt.py"
    os.environ.update(ENVIRONMENT)
    rows = []
    for steps, published in PUBLISHED.items():
        with tempfile.TemporaryDirectory() as folder:
            job = (str(script), *ARGUMENTS.split(), "--data-cache-path", f"{folder}/cache")
            options = ("--gpu", "A100-80GB", "--nproc", "8", "--rank", "7", "--steps", str(steps))
            answer, done = memfit_json("dry-run", *options, *job, folder=Path(folder), seconds=1800.0)
        if answer is None or done.returncode:
            print(done.stderr, file=sys.stderr)
            return 1
        rows.append((steps, published, answer["peak"]["allocated"]))
    cells = ((steps, f"{a:,} B", f"{b:,} B", f"{b / a - 1:+.6%}") for steps, a, b in rows)
    print(table(("steps", "published", "memfit", "difference"), "rrrr", cells))
    return int(any(abs(found / published - 1) > WITHIN for _, published, found in rows))


if __name__ == "__main__":
    sys.exit(main())
