"""The version of the public JSON that every command writes: its ``schema``."""

SCHEMA_VERSION = 1
"""Fields may be added within a version; none is removed or changes its meaning."""
