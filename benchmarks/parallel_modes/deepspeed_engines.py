"""DeepSpeed's engine: ZeRO-1, 2 and 3, its precisions, accumulation, checkpointing and offload."""

import deepspeed
import torch
from jobs import Model, batch, loss_of, start, variant
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
    held = sum(state["exp_avg"].numel() for state in engine.optimizer.optimizer.state.values())
    parameters = list(engine.module.parameters())
    whole = sum(getattr(each, "ds_numel", each.numel()) for each in parameters)
    padding = held * engine.world_size - whole
    padded = len(parameters) if engine.zero_optimization_partition_weights() else 2
    assert 0 <= padding < padded * engine.world_size, (held, whole)


def zero1():
    train(1)


def zero2():
    train(2)


def zero3():
    train(3)


def zero1_fp16():
    train(1, FP16)


def zero2_fp16():
    train(2, FP16)


def zero3_fp16():
    train(3, FP16)


def zero2_fused_adam():
    train(2, BF16 | ADAM)


def zero3_fused_lion():
    train(3, BF16 | {"optimizer": {"type": "Lion", "params": {"lr": 1e-3}}})


def zero3_cpu_adam():
    train(3, BF16 | ADAM, offload_optimizer=CPU, offload_param=CPU)


def zero2_fp32():
    train(2, {})


def zero2_accumulated():
    train(2, accumulated=2)


def zero3_accumulated():
    train(3, accumulated=2)


def zero1_checkpointed():
    train(1, checkpointed=True)


def zero3_checkpointed():
    train(3, checkpointed=True)


def zero1_offloaded():
    train(1, offload_optimizer=CPU)


def zero2_offloaded():
    train(2, FP16, offload_optimizer=CPU)


def zero3_offloaded():
    train(3, offload_optimizer=CPU, offload_param=CPU)


def zero3_optimizer_offloaded():
    train(3, FP16, offload_optimizer=CPU)


def trainer_zero3():
    automatic = dict.fromkeys(
        ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), "auto"
    )
    adam = {"optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}}}
    zero = {"zero_optimization": {"stage": 3, **BUCKETS}}
    trainer(deepspeed=automatic | BF16 | adam | zero, bf16=True, save_strategy="no")


def lightning_zero2():
    lightning("deepspeed_stage_2")


if __name__ == "__main__":
    variant(globals())()
    torch.distributed.destroy_process_group()
