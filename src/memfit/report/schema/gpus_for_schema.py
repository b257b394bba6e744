"""The public JSON of ``memfit gpus --for``; docs/gpus-for.schema.json is generated from it."""

import msgspec

from memfit.records import GpusFor
from memfit.report.schema.encoding import SCHEMA_VERSION, encode
from memfit.report.schema.plan_schema import ScriptPlanJson, script_plan_json


class GpusForJson(msgspec.Struct, frozen=True):
    """What ``memfit gpus --for --json`` writes."""

    schema: int
    gpus: tuple[ScriptPlanJson, ...]
    """A plan for each GPU, in ascending order of their memory: ``plan`` is empty if the script fits as
    written, and null if no plan fits."""
    failed: dict[str, str]
    """By GPU: why the script as written does not run on it."""
    command: tuple[str, ...]
    versions: dict[str, str]


def to_json(result: GpusFor) -> bytes:
    """Encode which GPUs run a script as one line of ASCII."""
    return encode(
        GpusForJson(
            schema=SCHEMA_VERSION,
            gpus=tuple(map(script_plan_json, result.plans)),
            failed=dict(result.failed),
            command=result.command,
            versions=dict(result.versions),
        )
    )
