"""Synthetic batches: each is accepted by the model it was made for."""

import pytest
import torch
import transformers
from torch import nn
from transformers import BertConfig, GPT2Config, RobertaConfig, T5Config, ViTConfig

import memfit
from memfit.errors import UsageError

BERT = BertConfig(
    vocab_size=99,
    hidden_size=32,
    num_hidden_layers=1,
    num_attention_heads=2,
    intermediate_size=32,
    num_labels=2,
)
GPT2 = GPT2Config(vocab_size=99, n_positions=16, n_embd=32, n_layer=1, n_head=2, loss_type="ForCausalLM")
T5 = T5Config(
    vocab_size=99, d_model=32, d_kv=16, d_ff=32, num_layers=1, num_heads=2, decoder_start_token_id=0
)
VIT = ViTConfig(image_size=32, patch_size=8, hidden_size=32, num_hidden_layers=1, num_attention_heads=2)
ROBERTA = RobertaConfig(
    vocab_size=99,
    max_position_embeddings=18,
    hidden_size=32,
    num_hidden_layers=1,
    num_attention_heads=2,
    intermediate_size=32,
)


class Detector(nn.Sequential):
    def forward(self, images, targets=None):
        return super().forward(images), targets


def several_labels(kind):
    return kind(BertConfig(**BERT.to_diff_dict() | {"problem_type": "multi_label_classification"}))


@pytest.mark.parametrize(
    ("kind", "config", "sizes", "shapes"),
    [
        ("GPT2LMHeadModel", GPT2, {"length": 8}, {"input_ids": (2, 8), "labels": (2, 8)}),
        ("BertForMaskedLM", BERT, {"length": 8}, {"input_ids": (2, 8), "labels": (2, 8)}),
        ("BertForTokenClassification", BERT, {"length": 8}, {"labels": (2, 8)}),
        ("BertForSequenceClassification", BERT, {"length": 8}, {"labels": (2,)}),
        ("BertForQuestionAnswering", BERT, {"length": 8}, {"start_positions": (2,), "end_positions": (2,)}),
        ("T5ForConditionalGeneration", T5, {"length": 8}, {"input_ids": (2, 8), "labels": (2, 8)}),
        ("ViTForImageClassification", VIT, {}, {"pixel_values": (2, 3, 32, 32), "labels": (2,)}),
    ],
)
def test_a_transformers_model_computes_a_loss_from_its_batch(kind, config, sizes, shapes):
    model = getattr(transformers, kind)(config)
    before = torch.get_rng_state()
    batch = memfit.synthetic_batch(model, 2, **sizes)
    assert torch.equal(torch.get_rng_state(), before)
    assert shapes.items() <= {name: tuple(tensor.shape) for name, tensor in batch.items()}.items()
    assert model(**batch).loss.isfinite()


def test_a_bare_model_gets_no_labels():
    batch = memfit.synthetic_batch(transformers.BertModel(BERT), 2, length=8)
    assert set(batch) == {"input_ids", "attention_mask"}


def test_an_image_classifier_gets_images_and_every_class():
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 8), nn.Linear(8, 5)
    ).bfloat16()
    images, labels = memfit.synthetic_batch(model, 64, image=(8, 10))
    assert (images.shape, images.dtype) == ((64, 1, 8, 10), torch.bfloat16)
    assert set(labels.tolist()) == set(range(5))  # every class, and only those
    assert torch.equal(memfit.synthetic_batch(model, 64, image=(8, 10), labels=False), images)


@pytest.mark.parametrize(
    ("make", "sizes", "message"),
    [
        (lambda: transformers.GPT2LMHeadModel(GPT2), {}, "GPT2LMHeadModel is a text model: pass length="),
        (lambda: transformers.BertForPreTraining(BERT), {"length": 8}, "labels, next_sentence_label"),
        (lambda: transformers.BertForMultipleChoice(BERT), {"length": 8}, "BertForMultipleChoice"),
        (lambda: nn.Sequential(nn.Conv2d(3, 3, 3), nn.Linear(3, 3)), {}, "image="),
        (
            lambda: nn.Sequential(nn.Linear(3, 3), nn.Conv2d(3, 3, 3)),
            {"image": (8, 8)},
            "last layer is not a Linear",
        ),
        (lambda: Detector(nn.Conv2d(3, 3, 3), nn.Linear(3, 3)), {"image": (8, 8)}, "images, targets"),
        (lambda: transformers.ViTForMaskedImageModeling(VIT), {}, "its forward takes none of the labels"),
        (lambda: several_labels(transformers.BertForSequenceClassification), {"length": 8}, "labels"),
        (lambda: transformers.GPT2LMHeadModel(GPT2), {"length": 17}, "wpe supports at most 16 tokens"),
        (
            lambda: transformers.RobertaModel(ROBERTA),
            {"length": 17},
            "position_embeddings supports at most",
        ),
        (lambda: nn.Linear(3, 3), {"length": 0}, "'length' must be an integer"),
        (lambda: 3, {}, "not int"),
        (lambda: nn.Linear(3, 3), {"image": (8, 8)}, "no Conv2d"),
    ],
)
def test_unknown_inputs_and_missing_sizes_are_named(make, sizes, message):
    with pytest.raises(UsageError, match=message):
        memfit.synthetic_batch(make(), 2, **sizes)


@pytest.mark.parametrize("size", [0, 2.5])
def test_the_batch_size_must_be_a_positive_integer(size):
    with pytest.raises(UsageError, match="at least 1"):
        memfit.synthetic_batch(nn.Linear(3, 3), size)


def test_a_compiled_model_gets_the_batch_of_the_original():
    model = transformers.GPT2LMHeadModel(GPT2)
    batch = memfit.synthetic_batch(model, 2, length=8)
    compiled = memfit.synthetic_batch(torch.compile(model, backend="eager"), 2, length=8)
    assert batch.keys() == compiled.keys() == {"input_ids", "attention_mask", "labels"}


def test_the_longest_allowed_sequence_uses_every_position():
    roberta = transformers.RobertaModel(ROBERTA)
    assert roberta(**memfit.synthetic_batch(roberta, 2, length=16)).last_hidden_state.shape[1] == 16
    with pytest.raises(RuntimeError, match="out of bounds"):  # one token more fails in PyTorch
        roberta(torch.full((2, 17), 5))
