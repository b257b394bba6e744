"""``memfit gpus --for``: a script on several GPUs, as written and with a plan."""

import re
import textwrap
from dataclasses import replace

import msgspec
import pytest

import memfit
from memfit.cli.main import run_command
from memfit.cli.price_table import read_prices
from memfit.devices import find_device
from memfit.errors import FileFormatError, TargetError, UsageError
from memfit.records import GpusFor
from memfit.report.public_json import public_json_type, result_to_json

SCRIPT = """
    import torch
    from torch import nn
    blocks = [nn.Sequential(nn.Linear(1024, 1024), nn.GELU(), nn.Dropout()) for _ in range(10)]
    network = nn.Sequential(*blocks).cuda()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    while True:
        network(torch.randn(152 << 10, 1024, device="cuda")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def on(cards, monkeypatch, script, **options):
    monkeypatch.setattr(
        "memfit.api.gpus_for_script.all_devices", lambda: [find_device(name) for name in cards]
    )
    return memfit.gpus_for(script, **options)


@pytest.mark.slow
@pytest.mark.usefixtures("warm_scripts")
def test_each_gpu_gets_a_plan_if_the_script_does_not_fit_it(tmp_path, monkeypatch):
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(SCRIPT))
    found = on(["T4", "V100-16GB", "GTX 1660", "B200"], monkeypatch, script)
    plans = {plan.device.name: plan for plan in found.plans}
    assert list(plans) == ["GTX 1660", "T4", "B200"]  # by memory
    assert plans["B200"].chosen is plans["B200"].as_written
    planned = plans["T4"].chosen
    assert planned.changes
    assert planned.needs.bytes <= find_device("T4").total_bytes < plans["T4"].as_written.needs.bytes
    assert plans["GTX 1660"].chosen.time > planned.time
    # The same run with the context of each, on GPUs whose sizes are multiples of 2 MiB.
    without_context = [plans[name].as_written.needs.bytes - find_device(name).context_bytes for name in plans]
    assert abs(without_context[0] - without_context[1]) < 2 << 20
    assert "has no kernels for V100-16GB" in found.failed["V100-16GB"]
    shown = str(found)
    assert shown.startswith("RUNS ON 1 OF 4 GPUS as written, and on 2 more with a plan")
    assert re.search(r"GTX-1660.*[0-9]%\* ", shown)  # no table of this card
    assert re.search(r"T4 .*[0-9]%  ", shown)
    fewer = replace(found, plans=(replace(found.plans[0], chosen=None, smallest=planned), *found.plans[1:]))
    assert str(fewer).startswith("RUNS ON 1 OF 4 GPUS as written, and on 1 more with a plan")
    assert "does not fit" in str(fewer)
    assert "may fit as written" not in str(found)
    bare = replace(found.plans[0], without_workspaces=found.plans[0].budget)
    may_fit = str(replace(found, plans=(bare, *found.plans[1:])))
    assert "GTX 1660: the script may fit as written. Where memory is short" in may_fit
    public = msgspec.json.decode(result_to_json(fewer), type=public_json_type(GpusFor))
    assert [each.plan is None for each in public.gpus] == [True, False, False]


@pytest.mark.usefixtures("warm_scripts")
def test_a_script_that_runs_on_no_gpu_is_reported_as_such(tmp_path, monkeypatch):
    script = tmp_path / "train.py"
    script.write_text("import torch; torch.ones(1, device='cuda'); raise ValueError('no data')")
    with pytest.raises(TargetError, match="ValueError: no data"):
        on(["T4"], monkeypatch, script)


def rows(found):
    """Return the GPUs in the order in which they are listed."""
    return [line.split()[0] for line in str(found).splitlines() if line.startswith(("B200", "RTX", "T4"))]


@pytest.mark.usefixtures("warm_scripts")
def test_the_cheapest_run_comes_first_with_its_hours_and_cost_and_the_hosts_limit(tmp_path, monkeypatch):
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(SCRIPT).replace("152 << 10", "1 << 10"))
    prices = {"B200": 0.01, "RTX-4090": 3600.0}
    found = on(["T4", "RTX 4090", "B200"], monkeypatch, script, prices=prices, priced_on="2026-11-30")
    seconds = {plan.device.name: plan.seconds for plan in found.plans}
    assert found.hours == pytest.approx({name: each * 1000 / 3600 for name, each in seconds.items()})
    assert found.costs == pytest.approx(
        {"RTX 4090": 1000 * seconds["RTX 4090"], "B200": seconds["B200"] / 360}
    )
    assert "per 1,000 steps" in str(found)
    whole = replace(found, steps_total=10**6)
    assert whole.costs == pytest.approx({name: 1000 * cost for name, cost in found.costs.items()})
    assert rows(whole) == ["B200", "RTX-4090", "T4"]  # without a price last
    assert "Prices from tables are of 2026-11-30." in str(whole)
    assert re.search("1,000,000 steps +cost", str(whole))
    public = msgspec.json.decode(result_to_json(whole), type=public_json_type(GpusFor))
    assert (public.steps_total, public.hours, public.costs) == (10**6, whole.hours, whole.costs)
    assert [plan.device.name for plan in public.gpus] == ["B200", "RTX 4090", "T4"]
    assert [plan.step_time.is_bound_by_host for plan in public.gpus] == [True, True, False]
    shown = str(whole).splitlines()
    assert [line.split()[0] for line in shown if "†" in line] == ["B200", "RTX-4090", "†"]
    assert max(map(len, shown)) <= 100
    assert "†" not in str(replace(whole, plans=whole.plans[2:]))


def test_a_run_has_at_least_one_step(tmp_path):
    with pytest.raises(UsageError, match="steps_total must be at least 1, not 0"):
        memfit.gpus_for(tmp_path / "train.py", steps_total=0)


TABLES = {
    "prices.toml": '[prices]\ndate = 2026-11-30\n"RTX 4090" = 0.40  # spot\nH100 = 2\n',
    "prices.json": '{"prices":\n{"date": "2026-11-30",\n"RTX 4090": 0.40,\n"H100": 2}}',
}


@pytest.fixture
def table(tmp_path):
    """Return a function that writes a table, and reads it."""

    def read(name, text, *others):
        (tmp_path / name).write_text(text)
        return read_prices([str(tmp_path / name), *others])

    return read


@pytest.mark.parametrize("name", TABLES)
def test_a_table_has_prices_and_their_date(table, name):
    assert table(name, TABLES[name]) == ({"RTX 4090": 0.4, "H100-80GB": 2.0}, "2026-11-30")
    assert table(name, TABLES[name], "RTX-4090=0.35")[0]["RTX 4090"] == 0.35


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize(
    ("old", "new", "line", "why"),
    [
        ("RTX 4090", "RTX 9999", 3, "no GPU named 'RTX 9999'. Nearest: RTX 5090"),
        ("RTX 4090", "H100-80GB", 4, "H100 is H100-80GB, which has a price already"),
        ("0.40", '"0.40"', 3, "'0.40' is no price of RTX 4090. Write what an hour costs"),
        ("0.40", "-1", 3, "-1 is no price"),
        ("0.40", "true", 3, "True is no price"),
        ("2026-11-30", "2026-11-31", 2, ""),
    ],
)
def test_a_fault_in_a_table_is_reported_with_its_line(table, name, old, new, line, why):
    with pytest.raises(FileFormatError, match=rf"line {line}\b.*{re.escape(why)}"):
        table(name, TABLES[name].replace(old, new, 1))


def test_a_file_without_prices_says_what_to_write(table):
    for text in ("", "[prices]\nH100 = 2\n", "prices = 3"):
        with pytest.raises(FileFormatError, match="it has no date of its prices under \\[prices\\], such as"):
            table("prices.toml", text)
    with pytest.raises(FileFormatError, match="it is not valid TOML"):
        table("prices.toml", "[prices")
    with pytest.raises(UsageError, match=r"or a table of prices .* not cheap"):
        read_prices(["cheap"])


def test_a_script_without_for_is_pointed_out(capsys):
    assert run_command(["gpus", "train.py"]) == 2
    assert "Did you mean memfit gpus --for train.py?" in capsys.readouterr().err
    assert run_command(["gpus", "--price", "T4=0.1"]) == 2
    assert "memfit gpus --for [OPTIONS] SCRIPT.py" in capsys.readouterr().err
    assert run_command(["gpus", "--for"]) == 2
    assert "No script given" in capsys.readouterr().err
