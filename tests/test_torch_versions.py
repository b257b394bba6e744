"""A failed check of benchmarks/torch_versions.py fails the command; the supported versions are recorded."""

import json
import re
import tomllib
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import environments
import outcomes
import plans
import pytest
import suites
import torch
import torch_versions
from model_counts import operations_of_forward, recomputed_operations

import memfit
from memfit.ghost.build.torch_install import OLDEST
from memfit.patching.installed_hooks import InstalledHooks
from memfit.planning.choose_checkpointing import CheckpointChooser, RegionSettings
from memfit.planning.step_memory_model import StepMemoryModel
from memfit.planning.tensor_recompute_options import tensor_recomputations
from memfit.strategies.mechanisms.recomputation_counter import OperationCounter
from memfit.strategies.mechanisms.selective_checkpointing import KeptResults
from support.planned_networks import NETWORKS, feed_forward

ROOT = Path(__file__).parents[1]
SUPPORTED = re.search(r"^VERSIONS \?= (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[1].split()


PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.mark.recorded
def test_the_supported_versions_are_the_recorded_ones_and_memfit_refuses_older_ones():
    recorded = json.loads(torch_versions.GOLDEN.read_text())
    assert {name.partition("+")[0] for name in recorded} == {*SUPPORTED}
    assert all({*found, "ranks", "strategies"} == {*torch_versions.CHECKS} for found in recorded.values())
    assert tuple(map(int, SUPPORTED[0].split(".")[:2])) == OLDEST
    oldest = "{}.{}".format(*OLDEST)
    assert f"torch>={oldest}" in PYPROJECT["dependencies"]
    for page in ("README.md", "docs/installing.md"):
        assert re.findall(r"PyTorch (\S+) or newer", (ROOT / page).read_text()) == [oldest]


def work(operation):
    return (operation.flops + operation.moved) / 1e9 if operation.creates or operation.flops else 0.0


def counted(network, regions):
    """Return the operations of a step's forward, and those that run again under a plan."""
    found, hooks = [], InstalledHooks()
    memfit.apply(
        network.model, memfit.Checkpointing(regions=[memfit.Region(**each.settings) for each in regions])
    )
    counter = OperationCounter(lambda counts, *_: found.append(counts), in_backward=False)
    counter.install(hooks)
    counter.watch(network.model)
    network.loss().backward()
    torch.optim.SGD(network.model.parameters(), lr=0.0).step()
    hooks.remove()
    memfit.revert(network.model)
    (counts,) = found
    return counts.forward, counts.recomputed


def regions_of(step):
    """Return plans of several kinds for a step."""
    memory = StepMemoryModel.of(step)
    chooser = CheckpointChooser(step, work)
    choices = [chooser.choose(int(share * chooser.plain_peak)) for share in (0.8, 0.6, 0.4)]
    options = tensor_recomputations(memory, work)
    tensors = [options[0], options[len(options) // 2], options[-1]]
    modules = [each.regions for each in choices if each is not None]
    return modules + [(RegionSettings(("",), each.save_ops, recompute="tensors"),) for each in tensors]


@pytest.mark.parametrize("make", NETWORKS)
def test_as_many_operations_run_again_as_the_planner_s_model_has(make):
    torch.manual_seed(0)
    network = make()
    step = network.record()
    for regions in regions_of(step):
        expected = operations_of_forward(step), recomputed_operations(step, regions)
        assert counted(network, regions) == expected
        assert expected[1] > 0


@pytest.mark.parametrize("region", [{}, {"split_at": ("up",)}, {"split_at": ("up", "down")}])
def test_regions_in_parts_run_as_often_as_the_planner_s_model_has(region):
    network = feed_forward()
    step = network.record()
    regions = [RegionSettings(("0", "2"), **region)]
    assert counted(network, regions) == (operations_of_forward(step), recomputed_operations(step, regions))


def test_kept_results_that_run_again_are_not_what_the_model_has(monkeypatch):
    network = feed_forward()
    step = network.record()
    regions = [RegionSettings(("0", "2"), ("aten.addmm.default:0",))]
    expected = recomputed_operations(step, regions)
    assert counted(network, regions)[1] == expected
    monkeypatch.setattr(KeptResults, "recomputation", lambda _: nullcontext())
    assert counted(network, regions)[1] == expected + 2


@pytest.fixture
def checked(monkeypatch, tmp_path, capsys):
    """Return a function that checks a version whose peaks are recorded as 1; it returns code and output."""
    golden = tmp_path / "golden.json"
    golden.write_text('{"2.16.0": {"peaks": {"job": 1}}}')
    monkeypatch.setattr(torch_versions, "GOLDEN", golden)
    monkeypatch.setattr(torch_versions, "environment", lambda version: f"python-{version}")
    monkeypatch.setattr(torch_versions, "torch_version", lambda python: python.removeprefix("python-"))

    def check(name, outcome, *options):
        monkeypatch.setitem(torch_versions.CHECKS, name, lambda _: outcome)
        monkeypatch.setattr("sys.argv", ["torch_versions.py", "2.16.0", f"--{name}", *options])
        return torch_versions.main(), capsys.readouterr().out, json.loads(golden.read_text())

    return check


def test_a_check_prints_what_it_found_and_why_tests_were_skipped(checked):
    outcome = outcomes.Outcome("9 passed", {"passed": 9}, skipped={"before PyTorch 2.17": 2})
    code, out, _ = checked("tests", outcome)
    assert code == 0
    assert "9 passed" in out
    assert "2 skipped: before PyTorch 2.17" in out
    assert "2.16.0  passed" in out


def test_a_check_that_fails_says_why_and_is_not_recorded(checked):
    code, out, golden = checked("training", outcomes.Outcome("", {"steps": 2}, ("a reason",)), "--record")
    assert code == 1
    assert "a reason" in out
    assert "2.16.0  FAILED: training" in out
    assert "training" not in golden["2.16.0"]


@pytest.mark.parametrize(("found", "options", "code"), [(1, (), 0), (2, (), 1), (2, ("--record",), 0)])
def test_peaks_must_be_the_recorded_ones(checked, found, options, code):
    outcome = outcomes.Outcome("", {"job": found})
    expected = found if options else 1
    assert checked("peaks", outcome, *options)[::2] == (code, {"2.16.0": {"peaks": {"job": expected}}})


REPORT = """\
SKIPPED [2] tests/arenas/test_cuda.py:103: before PyTorch 2.14: it allocates
SKIPPED [1] tests/other.py: before PyTorch 2.14: it allocates
SKIPPED [1] tests/other.py:7: no triton
{end} in 39.87s
"""


@pytest.mark.parametrize(
    ("end", "code", "summary", "fails"),
    [
        ("39 passed, 4 skipped", 0, "39 passed, 0 failed, 4 skipped", False),
        ("1 failed, 38 passed, 4 skipped, 2 errors", 1, "38 passed, 3 failed, 4 skipped", True),
        ("4 skipped", 0, "0 passed, 0 failed, 4 skipped", True),
    ],
)
def test_tests_are_counted_with_the_reasons_for_skipping(monkeypatch, end, code, summary, fails):
    done = SimpleNamespace(stdout=REPORT.format(end=end), stderr="", returncode=code)
    monkeypatch.setattr(suites.subprocess, "run", lambda *_, **__: done)
    found = suites.arena("python")
    assert (found.summary, bool(found.failed)) == (summary, fails)
    assert found.skipped == {"before PyTorch 2.14: it allocates": 3, "no triton": 1}


def test_a_plan_of_another_kind_or_with_other_operations_fails(monkeypatch):
    made = {"plan": {"checkpointing": {"regions": [{"modules": ["a"]}]}}}
    counts = {"model": [9, 2], "ghost": [9, 3], "again": {"aten.mm.default": 1}}

    def memfit_command(_python, _folder, command, *arguments):
        if command == "plan":
            Path(arguments[arguments.index("-o") + 1]).write_text(json.dumps(made))
        return {"operations": {"under_plan": {"recomputed": 0}}}

    monkeypatch.setattr(plans, "memfit", memfit_command)
    monkeypatch.setattr(plans, "output", lambda *_, **__: json.dumps(counts))
    monkeypatch.setattr(plans, "CASES", plans.CASES[1:2])
    assert [each.partition(": ")[2] for each in plans.plans("python").failed] == [
        "memfit plan made another one: whole blocks",
        "3 of 9 operations run again, not 2 of 9, as the model has it",
        "kept results are made again: {'aten.mm.default': 1}",
        "on the CPU, no operation runs again",
    ]


def test_an_environment_needs_nothing_of_nvidia_s(tmp_path):
    metadata = tmp_path / "torch-2.16.0.dist-info" / "METADATA"
    metadata.parent.mkdir()
    needs = ["sympy>=1.13", "nvidia-nccl-cu12==2.27; platform_system == 'Linux'", "triton==3.6"]
    metadata.write_text("".join(f"Requires-Dist: {each}\n" for each in needs))
    environments._make_nvidia_optional(tmp_path)
    assert metadata.read_text().splitlines() == [
        "Requires-Dist: sympy>=1.13",
        'Requires-Dist: nvidia-nccl-cu12==2.27; extra == "nvidia"',
        'Requires-Dist: triton==3.6; extra == "nvidia"',
    ]
