"""`memfit doctor --context` in rehearsal, and the effect of a kept measurement on later dry runs."""

import os
import subprocess
import tomllib
from dataclasses import replace

import pytest

import memfit
from memfit.card import context_measurement
from memfit.card.context_measurement import keep_measured_context, saved_context_measurement
from memfit.devices import find_device
from memfit.errors import TargetError
from memfit.ghost.build.torch_install import find_torch
from memfit.records import CardContextReport, CardContextStage, CardContextTrial, MachineKind, Provenance
from memfit.report.terminal.doctor import context_toml_lines
from memfit.run.options import RunOptions
from memfit.run.resolve_ghost_settings import resolve_ghost_settings

MIB = 1 << 20
TORCH = find_torch().version


@pytest.fixture
def report(tmp_path, monkeypatch):
    monkeypatch.setenv("MEMFIT_CACHE", str(tmp_path))
    stages = (
        CardContextStage(302 * MIB, 2 * MIB, 512, "one 4-byte tensor"),
        CardContextStage(647 * MIB, 26 * MIB, 20 * MIB, "first backward"),
    )
    return CardContextReport(
        "NVIDIA A100-SXM4-80GB",
        "580.1",
        "13.0",
        TORCH,
        80 << 30,
        MachineKind.CARD,
        "NVML",
        "2026-01-02",
        stages,
        (),
    )


@pytest.mark.slow
def test_the_table_shows_each_stage_and_the_effect_of_each_change(memfit):
    run = memfit("doctor", "--context")
    assert run.code == 0, run.err
    lines = [line.split() for line in run.out.splitlines()]
    stages = {tuple(line[:-4]): line[-4:] for line in lines if "matmul" in line or "tensor" in line}
    # On the ghost, only the context assumed by the table of GPUs is outside PyTorch's allocator.
    assert stages["one", "4-byte", "tensor"] == ["0.0", "2.0", "514.0", "512.0"]
    assert stages["first", "matmul"][-1] == "512.0"
    (workspaces,) = (line for line in lines if line[:1] == ["CUBLAS_WORKSPACE_CONFIG=:0:0"])
    assert float(workspaces[-4]) < 0  # allocated: PyTorch's allocator holds cuBLAS's workspace
    assert float(workspaces[-1]) == 0
    assert "REHEARSAL" in run.out
    assert "Kept" not in run.err


def test_a_rehearsal_is_never_kept(report):
    assert keep_measured_context(replace(report, machine=MachineKind.REHEARSAL)) is None


def test_a_kept_measurement_is_the_context_of_that_card_and_torch(report):
    kept = keep_measured_context(report)
    assert kept is not None
    figure = saved_context_measurement(find_device("A100-80GB"), TORCH)
    assert figure is not None
    assert figure.bytes == 621 * MIB
    assert figure.provenance is Provenance.MEASURED
    for part in ("doctor --context", "2026-01-02", "driver 580.1", TORCH, "first backward"):
        assert part in figure.source
    assert saved_context_measurement(find_device("H100"), TORCH) is None
    assert saved_context_measurement(find_device("A100-80GB:1g.10gb"), TORCH) is None
    assert saved_context_measurement(find_device("A100-80GB"), "2.0.0") is None


def test_a_kept_measurement_with_every_kernel_loaded_is_for_dry_runs_with_that_setting(report):
    card = find_device("A100-80GB")
    keep_measured_context(report)
    assert saved_context_measurement(card, TORCH, eager=True) is None
    stages = (CardContextStage(1_926 * MIB, 26 * MIB, 20 * MIB, "first backward"),)
    keep_measured_context(
        replace(report, trials=(CardContextTrial("CUDA_MODULE_LOADING=EAGER", "", stages),))
    )
    assert saved_context_measurement(card, TORCH, eager=True).bytes == 1_900 * MIB
    assert saved_context_measurement(card, TORCH).bytes == 621 * MIB


@pytest.mark.parametrize(("value", "more"), [("EAGER", 1_250 * MIB), ("LAZY", 0), ("DEFAULT", 0)])
def test_loading_every_kernel_adds_what_it_added_on_a_card(monkeypatch, value, more):
    monkeypatch.setenv("CUDA_MODULE_LOADING", value)
    context = resolve_ghost_settings(RunOptions(gpu="RTX-3060")).device.context
    assert context.bytes == find_device("RTX-3060").context_bytes + more
    assert context.provenance is Provenance.ASSUMED
    assert ("CUDA_MODULE_LOADING" in context.source) is bool(more)


def test_the_plain_measurement_is_without_the_settings_that_are_tried(monkeypatch):
    seen = []

    def run(command, *, env, **_others):
        seen.append(env)
        return subprocess.CompletedProcess(command, 1, stdout="", stderr="no GPU")

    monkeypatch.setattr(subprocess, "run", run)
    for name, value in (("CUDA_MODULE_LOADING", "EAGER"), ("CUBLAS_WORKSPACE_CONFIG", ":0:0")):
        monkeypatch.setenv(name, value)
    for environment in ({}, {"CUDA_MODULE_LOADING": "EAGER"}):
        with pytest.raises(TargetError, match="no GPU"):
            context_measurement._probe(environment)
    assert [env.get("CUDA_MODULE_LOADING") for env in seen] == [None, "EAGER"]
    assert not any("CUBLAS_WORKSPACE_CONFIG" in env for env in seen)
    assert seen[0]["PATH"] == os.environ["PATH"]


def test_a_measurement_is_contributed_as_lines_of_the_table_of_gpus(report):
    lines = context_toml_lines(replace(report, torch="2.14.1+cu130"))
    seen = tomllib.loads(f"seen = [\n{lines}\n]")["seen"]
    same = {"card": "NVIDIA A100-SXM4-80GB", "torch": "2.14.1", "cuda": "13.0", "driver": "580.1"}
    same["source"] = "memfit doctor --context, 2026-01-02"
    assert seen == [{**same, "what": "bare", "mib": 300}, {**same, "what": "after work", "mib": 621}]
    assert find_device(seen[0]["card"]).name == "A100-80GB"


def test_the_latest_measurement_is_used(report):
    keep_measured_context(report)
    later = replace(report, day="2026-03-04", driver="590.2", stages=report.stages[:1])
    keep_measured_context(later)
    figure = saved_context_measurement(find_device("A100-80GB"), TORCH)
    assert figure is not None
    assert figure.bytes == 300 * MIB


@pytest.mark.parametrize("content", ["", "{}", "[1, 2]", '{"card": 3}'])
def test_a_damaged_measurement_file_is_ignored(report, content):
    kept = keep_measured_context(report)
    assert kept is not None
    kept.write_text(content)
    assert saved_context_measurement(find_device("A100-80GB"), TORCH) is None


def test_a_rehearsal_among_the_kept_files_is_ignored(report):
    kept = keep_measured_context(report)
    assert kept is not None
    kept.write_text(kept.read_text().replace('"card",', '"rehearsal",'))
    assert '"rehearsal"' in kept.read_text()
    assert saved_context_measurement(find_device("A100-80GB"), TORCH) is None


@pytest.mark.slow
@pytest.mark.process
def test_a_dry_run_uses_the_kept_context(report, tmp_path, monkeypatch):
    keep_measured_context(report)
    script = tmp_path / "script.py"
    script.write_text("import torch; x = torch.empty(1, device='cuda')")
    answer = memfit.dry_run(script)
    (context,) = (term.figure for term in answer.terms if term.name == "CUDA context")
    assert (context.bytes, context.provenance) == (621 * MIB, "measured")
    assert answer.peak_process.provenance == "measured"
    assert answer.peak_process.bytes == answer.peak_reserved + 621 * MIB
