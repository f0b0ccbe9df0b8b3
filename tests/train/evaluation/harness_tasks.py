"""Tasks of lm-evaluation-harness that need no network: a YAML file and a file of JSON lines."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

with_harness = pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None and os.environ.get("CI") != "true",
    reason="lm_eval is not installed: make setup EXTRAS=eval",
)
"""Skips a test without the extra, but not in CI, which installs it."""


def write_task(folder: Path, documents: Sequence[dict[str, Any]], **keys: Any) -> Path:
    """Write a task with these keys; examples are drawn from the questions."""
    name = keys["task"]
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in documents))
    path = folder / f"{name}.yaml"
    data = {
        "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": f"{name}.jsonl"}},
        "test_split": "test", "fewshot_split": "test",
    }  # fmt: skip
    path.write_text(json.dumps(data | keys))  # JSON is YAML
    return path
