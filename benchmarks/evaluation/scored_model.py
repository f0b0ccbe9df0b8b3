"""A small model that was really trained, and the tasks on which the benchmarks of evaluation score it."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
import sysconfig
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


def train(folder: Path, tokens: int) -> Path:
    """Train on sums and the standard library; return the newest checkpoint."""
    texts = folder / "texts"
    texts.mkdir()
    library = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(library.glob("*.py"))[:40]:
        shutil.copy(path, texts)
    rng = random.Random(3)
    lines = []
    for _ in range(12_000):
        a, b, sign = rng.randint(2, 99), rng.randint(2, 99), rng.choice("+-*")
        if sign == "*":
            a, b = a % 12 + 1, b % 12 + 1
        lines.append(f"{a} {sign} {b} = {eval(f'{a}{sign}{b}')}\n")
    (texts / "sums.txt").write_text("".join(lines))
    build([texts], folder / "data", vocab_size=MODEL["vocab_size"])
    phase = {
        "tokens": tokens,
        "context": CONTEXT,
        "global_batch": 4,
        "micro_batch": 4,
        "lr": 8e-3,
        "rope_base": 1e4,
    }
    run = folder / "runs" / "scored"
    run.mkdir(parents=True)
    config = {"run": {"name": "scored"}, "model": MODEL, "data": {"path": str(folder / "data")}, "phases": [phase]}
    (run / "config.json").write_text(json.dumps(config | {"parallel": {"dtype": "fp32"}}))
    subprocess.run([sys.executable, "-m", "zslurm.train", str(run)], check=True, stdout=sys.stderr)
    return max((run / "checkpoints").glob("step-*"))


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
