"""Trainers of libraries: transformers, Accelerate, Lightning and its Fabric."""

import os
from functools import partial

import torch
from jobs import LENGTH, VOCABULARY, Block, Model, batch, loss_of, updates, variant


def causal(vocabulary):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
    )
    return LlamaForCausalLM(config)


def trainer(**options):
    from transformers import Trainer, TrainingArguments

    texts = [{"input_ids": row, "labels": row} for row in torch.randint(VOCABULARY, (64, 32))]
    arguments = TrainingArguments("out", max_steps=3, per_device_train_batch_size=4, report_to=[], **options)
    done = Trainer(causal(VOCABULARY), arguments, train_dataset=texts, eval_dataset=texts[:16])
    done.train()
    return done


def trainer_ddp():
    trainer(save_strategy="no").evaluate()


trainer_saves = partial(trainer, save_steps=2, gradient_checkpointing=True)


def trainer_fsdp(version, **options):
    wrapped = {"version": version, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
    trainer(fsdp="full_shard auto_wrap", fsdp_config=wrapped, save_strategy="no", **options)


trainer_fsdp1 = partial(trainer_fsdp, 1)
trainer_fsdp2 = partial(trainer_fsdp, 2, bf16=True, gradient_accumulation_steps=2)


def prepared(accelerator, model_first):
    """Return a model and its optimizer; FSDP1's is created after its flat parameters, or it would get no gradients."""
    model = Model()
    if model_first:
        model = accelerator.prepare(model)
        return model, accelerator.prepare(torch.optim.AdamW(model.parameters()))
    return accelerator.prepare(model, torch.optim.AdamW(model.parameters()))


def accelerated(*, model_first=False, **options):
    from accelerate import Accelerator

    accelerator = Accelerator(**options)
    model, optimizer = prepared(accelerator, model_first)
    for _ in range(3):
        loss = loss_of(model, batch(accelerator.device))
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        accelerator.gather(loss.detach())
    accelerator.wait_for_everyone()
    accelerator.gather_for_metrics([{"a": 1}], use_gather_object=True)
    state = accelerator.get_state_dict(model)
    accelerator.print(len(state))


accelerate_ddp = partial(accelerated, mixed_precision="bf16")


def launched_ddp(steps=1):
    """Train as the options of ``accelerate launch`` say, with an update after every ``steps`` batches."""
    from accelerate import Accelerator

    accelerator = Accelerator(gradient_accumulation_steps=steps)
    model, optimizer = prepared(accelerator, os.environ.get("FSDP_USE_ORIG_PARAMS") == "false")
    for _ in range(3 * steps):
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, batch(accelerator.device)))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    accelerator.end_training()


launched_accumulating = partial(launched_ddp, 2)
launched_fsdp1 = partial(launched_ddp)
launched_fsdp1_flat = partial(launched_ddp)
launched_fsdp2 = partial(launched_ddp, 2)


def accelerate_fsdp1(version=1):
    from accelerate import FullyShardedDataParallelPlugin

    wrapped = {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["Block"]}
    plugin = FullyShardedDataParallelPlugin(fsdp_version=version, **wrapped)
    accelerated(model_first=version == 1, fsdp_plugin=plugin)


accelerate_fsdp2 = partial(accelerate_fsdp1, 2)


def fabric(strategy="ddp"):
    from lightning.fabric import Fabric

    made = Fabric(accelerator="cuda", devices=int(os.environ["LOCAL_WORLD_SIZE"]), strategy=strategy)
    made.launch()
    model = Model()
    model, optimizer = made.setup(model, torch.optim.AdamW(model.parameters()))
    for _ in updates(optimizer):
        made.backward(loss_of(model, batch(made.device)))
    made.barrier()


fabric_fsdp = partial(fabric, "fsdp")


def lightning(strategy="ddp"):
    import lightning

    class Task(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = Model()

        def training_step(self, text):
            return loss_of(self.model, text)

        def configure_optimizers(self):
            return torch.optim.AdamW(self.trainer.model.parameters())

    made = lightning.Trainer(
        accelerator="cuda",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        strategy=strategy,
        max_steps=3,
        logger=False,
        enable_checkpointing=False,
    )
    texts = torch.randint(VOCABULARY, (128, LENGTH + 1))
    made.fit(Task(), torch.utils.data.DataLoader(texts, batch_size=4))


lightning_fsdp = partial(lightning, "fsdp")


def lightning_checkpointed():
    from lightning.pytorch.strategies import FSDPStrategy

    policy = {Block}
    lightning(FSDPStrategy(auto_wrap_policy=policy, activation_checkpointing_policy=policy))


if __name__ == "__main__":
    variant(globals())()
