"""Task files for tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

CHOICES: dict[str, Any] = {
    "output_type": "multiple_choice",
    "doc_to_text": "q",
    "doc_to_choice": "choices",
    "doc_to_target": "right",
}


def write_task(folder: Path, documents: list[dict[str, Any]], name: str = "example", **keys: Any) -> Path:
    """Write a task file and its documents; JSON is YAML."""
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in documents))
    path = folder / f"{name}.yaml"
    path.write_text(json.dumps({"task": name, "data": f"{name}.jsonl", **keys}))
    return path
