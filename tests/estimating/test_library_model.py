"""Models of torchvision, timm and transformers by name, in a training loop on random inputs."""

import json

import pytest
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from memfit.estimating import library_model
from support.warm_process import memfit

TINY = {"n_layer": 1, "n_head": 2, "n_embd": 8, "vocab_size": 32, "n_positions": 16}


@pytest.fixture
def gpt2(tmp_path):
    """Return a folder with the configuration of a tiny GPT-2."""
    config = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], **TINY}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def train(*arguments):
    """Train on the CPU for a step, and return the parameters that were trained."""
    trained = []

    def note(optimizer, *_):
        trained.extend(parameter for group in optimizer.param_groups for parameter in group["params"])

    handle = register_optimizer_step_post_hook(note)
    try:
        library_model.main([*arguments, "--device", "cpu", "--steps", "1", "--batch-size", "2"])
    finally:
        handle.remove()
    return trained


@pytest.mark.parametrize(
    "arguments",
    [
        ("torchvision:squeezenet1_1", "--image-size", "64"),
        ("torchvision:lraspp_mobilenet_v3_large", "--image-size", "64"),
        ("torchvision:ssdlite320_mobilenet_v3_large", "--image-size", "64"),
        ("timm:test_vit", "--optimizer", "sgd"),
        ("timm:test_resnet", "--dtype", "bfloat16"),
    ],
)
def test_models_of_images_are_trained(arguments):
    assert any(parameter.grad is not None and parameter.grad.any() for parameter in train(*arguments))


def test_a_folder_with_a_configuration_is_a_model(gpt2):
    for name in (gpt2, gpt2 / "config.json"):
        trained = train(f"hf:{name}", "--length", "16", "--amp")
        assert sum(each.numel() for each in trained) == 32 * 8 + 16 * 8 + 872 + 16
        assert all(each.grad is not None for each in trained)


@pytest.mark.parametrize("kind", ["bert", "vit", "t5"])
def test_the_kind_of_model_follows_from_the_configuration(kind, monkeypatch):
    import transformers

    small = {
        "num_hidden_layers": 1,
        "num_layers": 1,
        "hidden_size": 16,
        "d_model": 16,
        "intermediate_size": 16,
    }
    heads = {"num_attention_heads": 2, "num_heads": 2, "d_ff": 16, "d_kv": 8, "image_size": 32}
    config = transformers.AutoConfig.for_model(kind, **small, **heads)
    monkeypatch.setattr(transformers.AutoConfig, "for_model", lambda _: config)
    names = {
        "bert": "BertForMaskedLM",
        "vit": "ViTForImageClassification",
        "t5": "T5ForConditionalGeneration",
    }
    made = []
    original = nn.Module.train
    monkeypatch.setattr(nn.Module, "train", lambda self, mode=True: made.append(self) or original(self, mode))
    train(f"hf:{kind}", "--length", "8")
    assert type(made[0]).__name__ == names[kind]


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("torchvision:resnet5", "torchvision has no model 'resnet5'. Nearest: resnet50"),
        ("torchvision:r3d_18", "takes videos"),
        ("timm:test_vitt", "timm has no model 'test_vitt'. Nearest: test_vit"),
        ("hf:gpt22", "transformers has no model 'gpt22'. Nearest: gpt2"),
        ("hf:wav2vec2", "no language model and no classifier"),
        ("keras:resnet", "names no model"),
        ("timm:", "names no model"),
    ],
)
def test_what_is_no_model_is_refused_by_name(model, message):
    with pytest.raises(SystemExit) as refused:
        library_model.main([model, "--device", "cpu"])
    assert message in str(refused.value)


def test_a_library_that_is_missing_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "timm", None)
    with pytest.raises(SystemExit, match="timm is not installed: pip install timm"):
        library_model.main(["timm:test_vit"])


@pytest.mark.process
def test_commands_take_such_a_name_in_place_of_a_script(gpt2):
    done = memfit("dry-run", "--json", "-", f"hf:{gpt2}", "--length", "16", "--batch-size", "4")
    result = json.loads(done.stdout)
    assert result["verdict"] in ("fits", "fits so far")
    assert result["command"] == [
        "memfit.estimating.library_model",
        f"hf:{gpt2}",
        "--length",
        "16",
        "--batch-size",
        "4",
    ]
