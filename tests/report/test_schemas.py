"""The JSON Schemas in docs/ are generated from the code. To regenerate them, run this file."""

from pathlib import Path

import pytest

from memfit import records
from memfit.records import (
    AllocatorComparison,
    DryRun,
    Explanation,
    GpusFor,
    MaxBatch,
    MemoryBaseline,
    MemoryCheck,
    RunDifference,
    ScriptPlan,
    StrategyComparison,
    Verification,
)
from memfit.report.public_json import result_json_schema
from memfit.report.terminal.packing_sizes import PackingSizes

DOCS = Path(__file__).parents[2] / "docs"
SCHEMAS = {
    "baseline.schema.json": MemoryBaseline,
    "check.schema.json": MemoryCheck,
    "compare.schema.json": StrategyComparison,
    "diff.schema.json": RunDifference,
    "dry-run.schema.json": DryRun,
    "explain.schema.json": Explanation,
    "gpus-for.schema.json": GpusFor,
    "max-batch.schema.json": MaxBatch,
    "pack.schema.json": PackingSizes,
    "plan.schema.json": ScriptPlan,
    "replay.schema.json": AllocatorComparison,
    "verify.schema.json": Verification,
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_the_committed_schema_matches_the_code(name):
    assert (DOCS / name).read_bytes().strip() == result_json_schema(SCHEMAS[name]).strip()


def test_every_committed_schema_is_checked():
    assert {path.name for path in DOCS.glob("*.schema.json")} == set(SCHEMAS)
    written = {each for each in vars(records).values() if getattr(each, "json_description", "")}
    assert set(SCHEMAS.values()) == written | {PackingSizes}


if __name__ == "__main__":
    for name, result in SCHEMAS.items():
        (DOCS / name).write_bytes(result_json_schema(result).strip() + b"\n")
