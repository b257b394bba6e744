"""The cases of plans.toml, and the plan files that plans.py makes of them: CASE@SHARE.json."""

import subprocess
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from measuring import ROOT, memfit_json

HERE = Path(__file__).resolve().parent
AS_WRITTEN = 1.0
SECONDS = 600  # time limit of one search


@dataclass(frozen=True)
class PlanCase:
    """One case of plans.toml."""

    name: str
    script: str
    """Path of the script from the root of the repository."""
    arguments: tuple[str, ...]
    shares: tuple[float, ...]
    """Budgets: shares of what the script needs as written, the CUDA context apart."""
    options: tuple[str, ...] = ("--bitwise",)
    """Options of ``memfit plan``."""
    needs: tuple[str, ...] = ()
    """Packages that the script imports."""
    warm_up: int = 4
    """Steps of each run that are not timed."""
    seconds: int = 60
    """Time limit of one run."""


def plan_cases(path: Path = HERE / "plans.toml") -> list[PlanCase]:
    """Read the list of cases."""
    return [msgspec.convert(row, PlanCase) for row in tomllib.loads(path.read_text(encoding="utf-8"))["case"]]


def plan_path(folder: Path, case: PlanCase, share: float) -> Path:
    """Return where the plan for one budget is."""
    return folder / f"{case.name}@{share:g}.json"


def make_plans(case: PlanCase, gpu: str, outside: int, folder: Path) -> list[str]:
    """Write the plans of a case that are not there yet, each by ``memfit plan -o``.

    Args:
        case: what to plan for.
        gpu: a name of the device table.
        outside: bytes of the CUDA context.
        folder: where the plans go.

    Returns:
        Why plans are missing.
    """
    written = plan_path(folder, case, AS_WRITTEN)
    if not written.exists() and (why := _plan(case, gpu, (), written)):
        return [f"{written.name}: {why}"]
    needs = read_json(written)["as_written"]["needs"]["bytes"]
    missing = []
    for share in case.shares:
        path = plan_path(folder, case, share)
        if path.exists():
            continue
        budget = int(share * (needs - outside)) + outside
        if why := _plan(case, gpu, (*case.options, "--budget", str(budget)), path):
            missing.append(f"{path.name}: {why}")
    return missing


def _plan(case: PlanCase, gpu: str, options: tuple[str, ...], path: Path) -> str:
    """Run ``memfit plan``; return why there is no plan."""
    options = ("--gpu", gpu, *options, "-o", str(path.resolve()))
    try:
        _, done = memfit_json(
            "plan", *options, "--", case.script, *case.arguments, folder=ROOT, seconds=SECONDS
        )
    except subprocess.TimeoutExpired:
        return f"took more than {SECONDS} s"
    if done.returncode:
        return (done.stderr.splitlines() or ["no output"])[-1]
    return "" if path.exists() else done.stdout.splitlines()[0]


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON file."""
    content: dict[str, Any] = msgspec.json.decode(path.read_bytes())
    return content


def described(plan: dict[str, Any]) -> str:
    """Say in a few words what a plan changes."""
    settings = plan["plan"]
    parts = [name for name in settings if name not in ("checkpointing", "accumulation")]
    if "checkpointing" in settings:
        regions = settings["checkpointing"].get("regions", [])
        modules = sum(len(region.get("modules", ())) for region in regions)
        kinds = {region["recompute"] for region in regions if "recompute" in region}
        parts.insert(0, f"{modules} modules recomputed{''.join(f' ({kind})' for kind in sorted(kinds))}")
    if plan["micro_batches"]:
        parts.insert(0, f"{plan['micro_batches']['count']} micro-batches")
    parts += ["fused optimizer"] * bool(plan["fused"])
    parts += ["expandable segments"] * ("expandable" in plan["allocator"])
    return ", ".join(parts) or "as written"
