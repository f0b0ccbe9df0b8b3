"""Scores of `zslurm eval` are those of lm-evaluation-harness through transformers, on an export of the same run.

The extra `eval` brings some thirty packages (scipy and scikit-learn among them), too many for CI. Install it to
run this: `make setup EXTRAS=trackers,eval`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.commands import Zslurm
from tests.cli.trained import CONTEXT, TEXT
from tests.train.evaluation.harness_tasks import with_harness

pytestmark = with_harness
WORDS = TEXT.split()
_FIRST = {"function": "take_first"}

TASKS: dict[str, dict[str, Any]] = {
    "choice": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{begin}}",
        "doc_to_choice": "{{words}}",
        "doc_to_target": "{{right}}",
        "num_fewshot": 1,
        "fewshot_delimiter": "\n",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}, {"metric": "acc_bytes"}],
    },
    "last-word": {
        "output_type": "loglikelihood",
        "doc_to_text": "{{begin}}",
        "doc_to_target": " {{words[right]}}",
        "metric_list": [{"metric": "perplexity"}, {"metric": "acc"}],
    },
    "text": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{long}}",
        "metric_list": [{"metric": "word_perplexity"}, {"metric": "byte_perplexity"}, {"metric": "bits_per_byte"}],
    },
    "written": {
        "output_type": "generate_until",
        "doc_to_text": "{{begin}}",
        "doc_to_target": "{{words[right]}}",
        "generation_kwargs": {"until": ["€", " lazy"], "max_gen_toks": 8, "do_sample": False},
        "filter_list": [
            {
                "name": "word",
                "filter": [{"function": "regex", "regex_pattern": r"(\w+)"}, {"function": "take_first"}],
            },
            {"name": "whole", "filter": [{"function": "remove_whitespace"}, {"function": "take_first"}]},
        ],
        "metric_list": [{"metric": "exact_match", "ignore_case": True}],
    },
}


def documents() -> list[dict[str, Any]]:
    made = []
    for number in range(2, len(WORDS) - 1):
        others = [WORDS[(number * 5) % len(WORDS)], WORDS[(number * 3 + 1) % len(WORDS)]]
        made.append(
            {
                "begin": " ".join(WORDS[:number][-6:]) + (" " if number % 4 == 0 else ""),
                "words": [*others, WORDS[number]][:: 1 if number % 2 else -1],
                "right": 2 if number % 2 else 0,
                "long": " ".join(WORDS[: number + 1]) + "\n" + TEXT * (number % 3),
            }
        )
    return made


def test_scores_are_those_of_the_harness(zslurm: Zslurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    monkeypatch.setenv("DISABLE_MULTIPROC", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf-home"))
    file = tmp_path / "documents.jsonl"
    file.write_text("".join(json.dumps(each) + "\n" for each in documents()))
    data = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(file)}},
        "test_split": "test",
        "fewshot_split": "test",
    }
    paths = []
    for name, keys in TASKS.items():
        (tmp_path / f"{name}.yaml").write_text(json.dumps({"task": name, **data, **keys}))
        paths.append(tmp_path / f"{name}.yaml")
    said = zslurm.ok("eval", "first", "--tasks", *paths, "--json").json
    zslurm.ok("checkpoint", "export", "first", tmp_path / "exported", "--dtype", "fp32")
    alone = TaskManager(include_defaults=False)  # finding its own tasks takes it minutes
    found = {}
    for name, path in zip(TASKS, paths, strict=True):
        # Its cache of logits takes the wrong ones where one input is cut into context and continuation in several
        # ways (0.4.13), as windows of texts that repeat themselves are.
        model = HFLM(
            pretrained=str(tmp_path / "exported"),
            dtype="float32",
            batch_size=64,
            device="cpu",
            max_length=CONTEXT,
            logits_cache=TASKS[name]["output_type"] != "loglikelihood_rolling",
        )
        task = json.loads(path.read_text())
        done = simple_evaluate(model=model, tasks=[task], task_manager=alone, bootstrap_iters=0, verbosity="ERROR")
        found[name] = done["results"][name]
    assert {each["task"]: len(each["metrics"]) for each in said["results"]} == {
        "choice": 3, "last-word": 2, "text": 3, "written": 2
    }  # fmt: skip
    wrong = []
    for each in said["results"]:
        theirs = found[each["task"]]
        for name, value in each["metrics"].items():
            other = theirs[name if "," in name else f"{name},none"]
            if value != pytest.approx(other, abs=1e-3, rel=1e-3):
                wrong.append((each["task"], name, value, other))
    assert wrong == []
    by_task = {each["task"]: each["metrics"] for each in said["results"]}
    assert 0 < by_task["choice"]["acc"] < 1 or by_task["choice"]["acc_norm"] < 1, "something to differ in"
