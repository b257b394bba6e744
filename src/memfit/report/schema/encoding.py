"""How the public JSON of every command is written, and its version. Byte counts are integers."""

import json

import msgspec

from memfit.records import SCHEMA_VERSION

__all__ = ["SCHEMA_VERSION", "encode", "json_schema"]


def encode(public: msgspec.Struct) -> bytes:
    """Encode a public result as one line of ASCII.

    With the standard library: a file name that is not UTF-8 reaches Python as lone surrogates, which
    msgspec rejects and JSON can express.
    """
    return json.dumps(msgspec.to_builtins(public), separators=(",", ":")).encode("ascii")


def json_schema(of: type[msgspec.Struct]) -> bytes:
    """Return the JSON Schema of a public result."""
    return msgspec.json.format(msgspec.json.encode(msgspec.json.schema(of)), indent=2)
