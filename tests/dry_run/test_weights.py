"""from_pretrained with only the configuration on this machine: the same bytes as with the weights."""

import json
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.xdist_group("weights"), pytest.mark.warm]  # on one worker: the tests share files

MAKE = """
import sys, torch
from transformers import LlamaConfig, LlamaForCausalLM
config = LlamaConfig(vocab_size=8192, hidden_size=256, intermediate_size=512, num_hidden_layers=2,
                     num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True)
LlamaForCausalLM(config).bfloat16().save_pretrained(sys.argv[1])
"""
LOAD = """
    import os, sys, torch
    from transformers import AutoModelForCausalLM
    models = [
        AutoModelForCausalLM.from_pretrained(sys.argv[1]).to("cuda"),
        AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32, device_map="cuda"),
    ]
    print([(p.dtype, p.device.type) for model in models for p in list(model.parameters())[:1]])
    ids = torch.randint(100, (2, 64), device="cuda")
    models[0](input_ids=ids, labels=ids).loss.backward()
    print("tied", models[1].lm_head.weight is models[1].model.embed_tokens.weight)
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    subprocess.run([sys.executable, "-c", MAKE, folder], check=True, capture_output=True)
    return folder


def peaks(run):
    assert run.code == 0, run.err
    assert "[(torch.bfloat16, 'cuda'), (torch.float32, 'cuda')]" in run.out
    assert "tied True" in run.out
    return run.answer["peak"], run.answer["terms"]


def synthesized(run):
    return [note for note in run.answer["notes"] if "weights were not loaded" in note["text"]]


@pytest.mark.slow
def test_weights_synthesized_from_the_configuration_have_the_same_bytes(dry_run, checkpoint):
    with_weights = dry_run(LOAD, str(checkpoint))
    assert not synthesized(with_weights)
    (checkpoint / "model.safetensors").write_bytes(b"not weights at all")
    forbidden = dry_run(LOAD, str(checkpoint), options=("--no-weights",))
    (checkpoint / "model.safetensors").unlink()
    missing = dry_run(LOAD, str(checkpoint))
    assert peaks(missing) == peaks(forbidden) == peaks(with_weights)
    for run in (missing, forbidden):
        notes = synthesized(run)
        assert [note["provenance"] for note in notes] == ["assumed", "assumed"]
        assert [note["where"].rpartition("script.py:")[2] for note in notes] == ["5", "6"]
        assert "zero weights in torch.bfloat16." in notes[0]["text"]
        assert "zero weights in torch.float32." in notes[1]["text"]  # which the script asks for


@pytest.mark.slow
def test_without_a_dtype_in_the_configuration_no_figure_is_exact(dry_run, checkpoint):
    file = checkpoint / "config.json"
    original = file.read_text()
    file.write_text(json.dumps({key: value for key, value in json.loads(original).items() if key != "dtype"}))
    run = dry_run(LOAD, str(checkpoint), options=("--no-weights",))
    file.write_text(original)
    assert "zero weights in torch.float32 were assumed" in synthesized(run)[0]["text"]
    assert {term["provenance"] for term in run.answer["terms"]} == {"assumed"}


def test_a_folder_without_a_configuration_fails_as_without_memfit(dry_run, tmp_path):
    run = dry_run(LOAD, str(tmp_path / "nothing"), json_answer=False)
    assert run.code == 3
    assert "OSError" in run.err
