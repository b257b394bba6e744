"""The JSON Schemas in docs/ are generated from the code. To regenerate them, run this file."""

from pathlib import Path

import pytest

from memfit.report.schema.check_schema import BaselineJson, CheckJson
from memfit.report.schema.compare_schema import StrategyComparisonJson
from memfit.report.schema.diff_schema import DifferenceJson
from memfit.report.schema.dry_run_schema import DryRunJson
from memfit.report.schema.encoding import json_schema
from memfit.report.schema.explain_schema import ExplanationJson
from memfit.report.schema.gpus_for_schema import GpusForJson
from memfit.report.schema.max_batch_schema import MaxBatchJson
from memfit.report.schema.pack_schema import PackingJson
from memfit.report.schema.plan_schema import ScriptPlanJson
from memfit.report.schema.replay_schema import ComparisonJson
from memfit.report.schema.verification_schema import VerificationJson

DOCS = Path(__file__).parents[2] / "docs"
SCHEMAS = {
    "baseline.schema.json": BaselineJson,
    "check.schema.json": CheckJson,
    "compare.schema.json": StrategyComparisonJson,
    "diff.schema.json": DifferenceJson,
    "dry-run.schema.json": DryRunJson,
    "explain.schema.json": ExplanationJson,
    "gpus-for.schema.json": GpusForJson,
    "max-batch.schema.json": MaxBatchJson,
    "pack.schema.json": PackingJson,
    "plan.schema.json": ScriptPlanJson,
    "replay.schema.json": ComparisonJson,
    "verify.schema.json": VerificationJson,
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_the_committed_schema_matches_the_code(name):
    assert (DOCS / name).read_bytes().strip() == json_schema(SCHEMAS[name]).strip()


def test_every_committed_schema_is_checked():
    assert {path.name for path in DOCS.glob("*.schema.json")} == set(SCHEMAS)


if __name__ == "__main__":
    for name, public in SCHEMAS.items():
        (DOCS / name).write_bytes(json_schema(public).strip() + b"\n")
