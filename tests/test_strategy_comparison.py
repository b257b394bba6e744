"""``memfit compare`` without processes: the runs that it makes, its conclusions, and what it prints."""

import io
import json
import re
from dataclasses import replace
from types import SimpleNamespace

import msgspec
import pytest
from rich.console import Console

from memfit.analysis.trial_result import TrialResult
from memfit.api import compare_strategies
from memfit.errors import TargetError, UsageError
from memfit.planning.strategies_to_compare import strategies_to_compare
from memfit.records import (
    Action,
    DeviceUse,
    EventLabel,
    Figure,
    ModuleCall,
    Operation,
    Phase,
    Provenance,
    ScriptEnd,
    ShardingCalls,
    StepOperations,
    StrategyComparison,
    WholeStep,
)
from memfit.report.public_json import public_json_type, result_to_json
from memfit.report.terminal.strategy_comparison import print_strategy_comparison
from memfit.trials import rank_runs
from support.traces import BASE, trace_of

MIB = 1 << 20
EXACT = Provenance.EXACT
DEVICE = DeviceUse("A100-80GB", Figure(1000 * MIB, EXACT), Figure(100 * MIB, EXACT), 0)
NCCL = Figure(10 * MIB, Provenance.ASSUMED)
DDP = ShardingCalls("DDP", "DistributedDataParallel", ("train.py:2",), ({"gradient_as_bucket_view": True},))
NO_TIME = "\N{EN DASH}"
NOT_POSSIBLE = ScriptEnd("refused", 0, "Net has no blocks")


def operation(*, flops, dtype):
    return Operation(
        "aten.mm.default", 0, -1, (), (0,), (), flops, 0, dtype, random=False, seconds=0, allocated=0
    )


def step_of(*forward, saved=0):
    call = ModuleCall("", "Net", -1, 0, 1, (), (0,), 0, 1, 0)
    return StepOperations((saved,), (call,), forward, ())


def run_of(
    mebibytes,
    *,
    nccl=None,
    shares=(),
    models=("Net (optimizer: train.py:3)",),
    stream=0,
    own=(),
    operations=None,
):
    """Return the result of a run that allocates so much, in a process of 100 MiB more."""
    size = mebibytes * MIB
    history = [(Action.SEGMENT_ALLOC, BASE, size), (Action.ALLOC, BASE, size)]
    if stream:
        history = [*history, (Action.SEGMENT_ALLOC, BASE + size, 2 * MIB, stream)]
        history = [*history, (Action.ALLOC, BASE + size, 2 * MIB, stream)]
    device = replace(DEVICE, total=Figure(1 << 40, EXACT), nccl=nccl)
    return TrialResult(
        trace_of(history, device=device, versions={"torch": "2.14.1"}), models, shares, own, operations
    )


@pytest.fixture
def compare(monkeypatch):
    """Return a function that compares strategies given the results of runs; ``made`` lists the runs."""
    made = []

    def compare(results, nproc=4, nnodes=1, rows=()):
        def trial_runner(_command, options, _on_progress, **_standby):
            def run(change, what):
                name = re.sub(r" [(]\d+ of \d+[)]$", "", what)
                made.append((name, options.rank.rank, change.finish_late))
                result = results(name, options.rank, change.finish_late)
                if result is KeyboardInterrupt:
                    raise result
                return result

            return run

        monkeypatch.setattr(rank_runs, "trial_runner", trial_runner)
        monkeypatch.setattr(compare_strategies, "checked_script_argv", lambda *_: ("train.py",))
        monkeypatch.setattr(
            compare_strategies, "resolve_ghost_settings", lambda _: SimpleNamespace(device=DEVICE)
        )
        found = compare_strategies.compare("train.py", nproc=nproc, nnodes=nnodes, rows=rows)
        return found, {run.name: run for run in found.runs}

    compare.made = made
    return compare


def test_each_row_says_what_its_run_needs_and_whether_that_fits(compare):
    sizes = {"as written": 950, "checkpointing": 100, "offload": 899}
    _found, rows = compare(lambda name, *_: run_of(sizes.get(name, 800)), nproc=1)
    assert list(rows) == [one.name for one in strategies_to_compare(1)]
    assert [rows[name].verdict for name in sizes] == ["does not fit", "fits", "fits"]
    assert rows["checkpointing"].needs.bytes == 200 * MIB
    assert rows["checkpointing"].change == -850 * MIB
    assert rows["checkpointing"].plan == ("memfit.Checkpointing()",)
    assert rows["bf16 + 2 slices"].plan == (
        "memfit.BatchSlices(count=2)",
        "memfit.Precision(dtype='bf16')",
    )
    assert rows["checkpointing + offload"].plan == (
        "memfit.Checkpointing()",
        "memfit.Offload(what='inputs')",
    )


def test_a_fit_within_the_uncertainty_of_the_context_is_tight(compare, monkeypatch):
    monkeypatch.setitem(globals(), "DEVICE", replace(DEVICE, context=Figure(100 * MIB, Provenance.ASSUMED)))
    _, rows = compare(lambda name, *_: run_of(890 if name == "offload" else 800), nproc=1)
    assert [rows[name].verdict for name in ("as written", "offload")] == ["fits", "tight"]


def test_where_streams_race_a_second_run_gives_the_range(compare):
    def results(name, _rank, late):
        return run_of(900 if late else 800, stream=int(name == "offload"))

    _, rows = compare(results, nproc=1)
    assert [made for made in compare.made if made[2]] == [("offload", 0, True)]
    peak = rows["offload"].peak
    assert (peak.allocated.least, peak.allocated.most) == (802 * MIB, 902 * MIB)
    assert rows["offload"].verdict == "may not fit"
    assert rows["offload"].provenance is Provenance.ASSUMED


def test_ranks_that_hold_the_same_are_run_once(compare):
    compare(lambda *_: run_of(100))
    assert len(compare.made) == len(list(strategies_to_compare(4)))
    assert {made[:2] for made in compare.made if made[0].startswith(("DDP", "FSDP2"))} == {
        (one.name, 1) for one in strategies_to_compare(4) if one.name.startswith(("DDP", "FSDP2"))
    }


def test_zero1_runs_the_rank_with_the_largest_share(compare):
    def results(name, rank, _late):
        sharded = name.startswith("ZeRO-1")
        return run_of(300 if sharded and rank.rank == 0 else 200, shares=(90, 10, 20, 5) if sharded else ())

    _, rows = compare(results)
    ran = [made[:2] for made in compare.made if made[0].startswith("ZeRO-1")]
    assert ran[:3] == [("ZeRO-1", 1), ("ZeRO-1", 0), ("ZeRO-1", 2)]
    assert {rank for _, rank in ran[3:]} == {0}
    assert rows["ZeRO-1"].rank == rows["ZeRO-1 + offload"].rank == 0
    assert rows["ZeRO-1"].peak.allocated.most == 300 * MIB


def test_a_script_that_trains_on_several_gpus_itself_runs_on_each_rank(compare):
    def results(_name, rank, _late):
        assert not rank.own_gpu_only
        return run_of(300 if rank.rank == 2 else 200, nccl=NCCL)

    found, rows = compare(results)
    assert [made[1] for made in compare.made if made[0] == "as written"] == [0, 1, 2, 3]
    assert found.distributed
    assert rows["as written"].rank == rows["checkpointing"].rank == 2
    assert rows["as written"].needs.bytes == 410 * MIB  # with NCCL's 10


def test_rows_are_chosen_by_their_names_and_by_groups_of_them(compare):
    _, rows = compare(lambda *_: run_of(100), nproc=1, rows=["bf16", "optimizer"])
    assert list(rows) == [
        *("as written", "bf16", "step in backward", "optimizer state offloaded", "8-bit optimizer state")
    ]
    with pytest.raises(
        UsageError, match=r"there is no row 'bf17'. Groups of rows: precision, slices, .*4 slices"
    ):
        compare(lambda *_: run_of(100), nproc=1, rows=["bf17"])
    assert len(compare.made) == len(rows)
    assert list(compare(lambda *_: run_of(100), nproc=1, rows=["as written"])[1]) == ["as written"]


def test_a_script_that_computes_in_half_precision_itself_gets_no_other(compare):
    product = operation(flops=10, dtype="float16")
    found, rows = compare(lambda *_: run_of(100, operations=step_of(product)), nproc=1)
    refused = {name for name, row in rows.items() if row.reason == "the script itself computes in float16"}
    assert refused == {name for name in rows if name.startswith(("bf16", "fp16"))} != set()
    assert not any(made[0] in refused for made in compare.made)
    assert "bf16 + 2 slices + checkpointing: the script itself computes in float16.\n" in printed(found)


def test_times_are_those_of_whole_steps(compare):
    seconds = {"as written": 1, "bf16": 0.5, "2 slices": 2, "offload": 1.5}
    label = EventLabel(Phase.FORWARD, "", "", -1)

    def results(name, *_):
        moved = round(1e13 * seconds.get(name, 1))
        kernel = Operation("k", -1, -1, (), (), (), 0, moved, "float32", False, 0.0, 0, launches=1)
        run = run_of(100)
        step = WholeStep((kernel,), (0,), (0,))
        return replace(run, trace=replace(run.trace, step=step, labels=(label,)))

    _, rows = compare(results, nproc=1)
    assert {name: round(rows[name].time, 4) for name in seconds} == seconds
    sharded = compare(results)[1]
    assert sharded["DDP"].time == sharded["FSDP2"].time == 1


def test_an_option_that_fails_does_not_stand_for_the_others(compare):
    fails = "gradient_as_bucket_view=True"
    own = replace(DDP, others=({"static_graph": True},))

    def results(name, *_):
        return NOT_POSSIBLE if name == fails else run_of(100, nccl=NCCL, own=(own,))

    _, rows = compare(results)
    assert {name for name, row in rows.items() if row.reason} == {fails, f"{fails} + checkpointing"}
    assert rows[fails].own_sharding == {"DistributedDataParallel": {"gradient_as_bucket_view": True}}
    assert [made[0] for made in compare.made if made[0].startswith("g")] == [fails]


def test_a_script_that_shards_itself_in_another_way_is_compared_with_no_sharding(compare):
    found, rows = compare(lambda *_: run_of(100, nccl=NCCL))
    assert not any(name.startswith(("DDP", "ZeRO", "FSDP2")) for name in rows)
    assert "To train with an option" not in printed(found)


def test_what_cannot_be_applied_is_not_tried_again_with_more(compare):
    def results(name, *_):
        return NOT_POSSIBLE if "checkpointing" in name else run_of(100)

    _, rows = compare(results)
    alone = [name for name in rows if name.startswith("checkpointing (")]
    assert [made[0] for made in compare.made if "checkpointing" in made[0]] == ["checkpointing", *alone]
    assert {rows[name].reason for name in rows if "checkpointing" in name} == {"Net has no blocks"}
    assert rows["DDP + checkpointing"].peak is None


def test_a_script_that_fails_with_a_strategy_has_a_row_with_its_error(compare):
    end = ScriptEnd("exception", 1, "RuntimeError: no", "train.py:9")
    _, rows = compare(lambda name, *_: end if name == "DDP" else run_of(100))
    assert rows["DDP"].reason == "the script ended with RuntimeError: no (train.py:9)"
    assert rows["DDP + offload"].peak is not None


def test_a_script_that_fails_as_written_is_not_compared(compare):
    with pytest.raises(
        TargetError, match=r"As rank 0 of 4, train[.]py cannot be compared: the script ended with"
    ):
        compare(lambda *_: ScriptEnd("exception", 1, "RuntimeError: no"))
    assert len(compare.made) == 1


def test_an_interrupted_comparison_keeps_its_rows(compare):
    found, rows = compare(lambda name, *_: KeyboardInterrupt if name == "DDP" else run_of(100))
    assert found.interrupted
    assert list(rows) == [one.name for one in strategies_to_compare(1)]
    assert "Interrupted: the other strategies were not tried." in printed(found)


def test_an_interruption_before_the_first_row_interrupts_the_command(compare):
    with pytest.raises(KeyboardInterrupt):
        compare(lambda *_: KeyboardInterrupt)


def printed(found, width=160):
    console = Console(file=io.StringIO(), width=width, highlight=False, markup=False, emoji=False)
    print_strategy_comparison(found, console)
    return console.file.getvalue()


def test_the_table_has_the_figures_and_what_to_write(compare):
    found, _ = compare(lambda name, *_: NOT_POSSIBLE if "checkpointing" in name else run_of(100))
    text = printed(found)
    lines = {line.split("  ")[0]: line.split() for line in text.splitlines()}
    numbers = ["200.00", "MiB", "██████████", "100.00", "MiB", "exact", "100.00", "MiB"]
    assert lines["DDP"][1:] == [*numbers, NO_TIME, "bit", "for", "bit", "1", "fits"]
    assert lines["DDP + checkpointing"][-1] == NO_TIME
    assert "Not possible: checkpointing, checkpointing (every 2nd), checkpointing (products kept)," in text
    assert text.count("Net has no blocks") == 1
    assert re.search(
        r"    DDP [+] offload +\[memfit[.]Offload[(][)], "
        r"memfit[.]Sharding[(]mode='ddp', split_batch=True[)]\]\n",
        text,
    )
    assert "torch.distributed.init_process_group()" in text
    assert "The ranks share each batch of the script's." in text


def test_a_script_with_a_sharding_of_its_own_is_told_what_to_add_to_it(compare):
    found, rows = compare(lambda *_: run_of(100, nccl=NCCL, own=(DDP,)))
    assert not any(name.startswith(("DDP", "FSDP2")) for name in rows)
    text = printed(found)
    assert "    ZeRO-1  " not in text  # nothing is to be applied to the model
    assert (
        "\nTo train with an option of DDP, pass it in each call of DistributedDataParallel: train.py:2\n"
        in text
    )
    assert re.search(r"    ZeRO-1 [+] checkpointing +\[memfit[.]Checkpointing[(][)]\]\n", text)
    assert 'optimizer = memfit.Sharding("zero1").optimizer(optimizer, model)  # for ZeRO-1 only' in text
    assert "init_process_group" not in text


def test_the_json_holds_every_row(compare):
    found, rows = compare(lambda name, *_: NOT_POSSIBLE if name == "DDP" else run_of(100))
    public = msgspec.json.decode(result_to_json(found), type=public_json_type(StrategyComparison))
    assert [run.name for run in public.runs] == list(rows)
    encoded = json.loads(result_to_json(found))
    by_name = {run["name"]: run for run in encoded["runs"]}
    assert by_name["FSDP2"]["peak"]["allocated"] == {"least": 100 * MIB, "most": 100 * MIB}
    assert by_name["DDP"]["reason"] == "Net has no blocks"
    assert (by_name["DDP"]["peak"], by_name["DDP"]["rank"], by_name["DDP"]["change"]) == (None, None, None)
    assert (encoded["nproc"], encoded["nnodes"], encoded["distributed"]) == (4, 1, False)
