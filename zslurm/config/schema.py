"""The JSON schema of run files: RunSpec with every section optional, and `extends`."""

from __future__ import annotations

from typing import Any

from zslurm.config.load import recipes
from zslurm.config.spec import RunSpec


def run_file_schema() -> dict[str, Any]:
    """A JSON schema (draft 2020-12) for editors. A run file may leave out what its recipe gives."""
    schema = RunSpec.model_json_schema()
    schema["title"] = "zslurm run file"
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema.pop("required", None)
    schema["properties"]["extends"] = {
        "type": "string",
        "description": "a recipe or a file that this one is laid over",
        "examples": sorted(recipes()),
    }
    return schema
