"""A small model that was really trained, and the tasks on which the benchmarks of evaluation score it."""

from __future__ import annotations

import importlib
import json
import random
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zlib
from pathlib import Path
from typing import Any

import yaml

from zslurm.train.data.build.build import build
from zslurm.train.evaluation.tasks.task import Task, load_task
from zslurm.train.evaluation.tasks.task_documents import load_documents

MODEL: dict[str, Any] = {
    "vocab_size": 2048, "hidden_size": 128, "layers": 4, "query_heads": 4, "kv_heads": 2, "head_dim": 32,
    "experts": 4, "expert_hidden_size": 128, "router_hidden_size": 32, "skip_rule": "zero",
}  # fmt: skip
CONTEXT = 256
MODULES = "json math os re random time itertools functools collections shutil threading socket pathlib".split()


def trained(tokens: int) -> Path:
    """Return the newest checkpoint of a model trained on so many tokens; it is kept for the next benchmark."""
    kept = Path(tempfile.gettempdir()) / f"zslurm-scored-{tokens}-{_recipe()}"
    if not (kept / "done").exists():
        shutil.rmtree(kept, ignore_errors=True)
        kept.mkdir()
        train(kept, tokens)
        (kept / "done").touch()
    return max((kept / "runs" / "scored" / "checkpoints").glob("step-*"))


def _recipe() -> str:
    """Return what the model and its data are made by, in short."""
    return f"{zlib.crc32(Path(__file__).read_bytes()):08x}"


def train(folder: Path, tokens: int) -> None:
    """Train on sums, imports and the standard library."""
    texts = folder / "texts"
    texts.mkdir()
    library = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(library.glob("*.py"))[:12]:
        shutil.copy(path, texts)
    rng = random.Random(3)
    (texts / "sums.txt").write_text("".join(_sum(rng) for _ in range(40_000)))
    imports = [f"from {module} import {name}\n" for module in MODULES for name in _names(module)]
    (texts / "imports.txt").write_text("".join(rng.choice(imports) for _ in range(20_000)))
    build([texts], folder / "data", vocab_size=MODEL["vocab_size"])
    phase = {
        "tokens": tokens,
        "context": CONTEXT,
        "global_batch": 8,
        "micro_batch": 8,
        "lr": 8e-3,
        "rope_base": 1e4,
        "warmup_steps": 20,
    }
    run = folder / "runs" / "scored"
    run.mkdir(parents=True)
    config = {"run": {"name": "scored"}, "model": MODEL, "data": {"path": str(folder / "data")}, "phases": [phase]}
    (run / "config.json").write_text(json.dumps(config | {"parallel": {"dtype": "fp32", "threads": 1}}))
    subprocess.run([sys.executable, "-m", "zslurm.train", str(run)], check=True, stdout=sys.stderr)


def _sum(rng: random.Random) -> str:
    """Return a line as the task `arithmetic` asks it, whose questions are drawn alike."""
    a, b, sign = rng.randint(2, 99), rng.randint(2, 99), rng.choice("+-*")
    if sign == "*":
        a, b = a % 12 + 1, b % 12 + 1
    return f"{a} {sign} {b} = {eval(f'{a}{sign}{b}')}\n"


def _names(module: str) -> list[str]:
    """Return public names of a module."""
    return [name for name in dir(importlib.import_module(module)) if not name.startswith("_")]


def written_out(name: str, folder: Path, limit: int | None = None) -> Path:
    """Write a shipped task as lm-evaluation-harness reads it: the same keys, and the path of its documents."""
    task = load_task(name)
    path = folder / f"{name}.jsonl"
    documents = load_documents(Task(path=task.path, config=task.config), limit).questions
    path.write_text("".join(json.dumps(each.fields) + "\n" for each in documents))
    keys = yaml.safe_load(task.path.read_text())
    del keys["data"]
    keys.setdefault("doc_to_text", "")
    keys |= {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(path)}}, "test_split": "test"}
    if keys.get("num_fewshot"):
        keys["fewshot_split"] = "test"
    for metric in keys.get("metric_list", ()):
        metric |= {"higher_is_better": "perplexity" not in metric["metric"]}
    if any(metric["metric"] == "token_perplexity" for metric in keys.get("metric_list", ())):
        keys["metric_list"] = [each for each in keys["metric_list"] if each["metric"] != "token_perplexity"]
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump(keys))
    return file
