"""DeepSpeed's engine: ZeRO-1, 2 and 3, its precisions, accumulation, checkpointing and offload."""

from functools import partial

import deepspeed
import torch
from jobs import Model, batch, check_shards, loss_of, start, variant
from libraries import lightning, trainer

BF16, FP16 = {"bf16": {"enabled": True}}, {"fp16": {"enabled": True}}
BUCKETS = {"reduce_bucket_size": 200_000, "stage3_param_persistence_threshold": 1_000}
"""Smaller than DeepSpeed's own, for a model of half a million parameters."""
CPU = {"device": "cpu", "pin_memory": True}
ADAM = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
"""What DeepSpeed's examples write: it takes its own FusedAdam or DeepSpeedCPUAdam, which nvcc and g++ compile."""


def train(stage, more=BF16, *, accumulated=1, checkpointed=False, torch_adam=True, **zero):
    """Train a model by ``deepspeed.initialize`` for three updates."""
    device = start()
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": accumulated,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage, **BUCKETS, **zero},
        **more,
    }
    if torch_adam and "optimizer" not in config:
        config |= {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}}
    with deepspeed.zero.Init(config_dict_or_path=config, enabled=stage == 3):
        model = Model(checkpointed=checkpointed)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    for _ in range(3 * accumulated):
        engine.backward(loss_of(engine, batch(device)))
        engine.step()
    check(engine)


def check(engine):
    """Check that every update was made, and that the optimizer's state is this rank's share, but for padding."""
    assert (engine.global_steps, engine.skipped_steps) == (3, 0)
    parameters = list(engine.module.parameters())
    whole = sum(getattr(each, "ds_numel", each.numel()) for each in parameters)
    padded = len(parameters) if engine.zero_optimization_partition_weights() else 2
    check_shards(engine.optimizer.optimizer, whole, engine.world_size, padded)


zero1 = partial(train, 1)
zero2 = partial(train, 2)
zero3 = partial(train, 3)
zero1_fp16 = partial(train, 1, FP16)
zero2_fp16 = partial(train, 2, FP16)
zero3_fp16 = partial(train, 3, FP16)
zero2_fused_adam = partial(train, 2, BF16 | ADAM)
zero3_fused_lion = partial(train, 3, BF16 | {"optimizer": {"type": "Lion", "params": {"lr": 1e-3}}})
zero3_cpu_adam = partial(train, 3, BF16 | ADAM, offload_optimizer=CPU, offload_param=CPU)
zero2_fp32 = partial(train, 2, {})
zero2_accumulated = partial(train, 2, accumulated=2)
zero3_accumulated = partial(train, 3, accumulated=2)
zero1_checkpointed = partial(train, 1, checkpointed=True)
zero3_checkpointed = partial(train, 3, checkpointed=True)
zero1_offloaded = partial(train, 1, offload_optimizer=CPU)
zero2_offloaded = partial(train, 2, FP16, offload_optimizer=CPU)
zero3_offloaded = partial(train, 3, offload_optimizer=CPU, offload_param=CPU)
zero3_optimizer_offloaded = partial(train, 3, FP16, offload_optimizer=CPU)


def trainer_zero3():
    automatic = dict.fromkeys(
        ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), "auto"
    )
    adam = {"optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}}}
    zero = {"zero_optimization": {"stage": 3, **BUCKETS}}
    trainer(deepspeed=automatic | BF16 | adam | zero, bf16=True, save_strategy="no")


lightning_zero2 = partial(lightning, "deepspeed_stage_2")


if __name__ == "__main__":
    variant(globals())()
    torch.distributed.destroy_process_group()
