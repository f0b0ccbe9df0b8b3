"""evaluation.tasks: a run that scores its own weights on tasks between two steps."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.train.evaluation.harness_tasks import with_harness, write_task
from tests.train.ranks import train_on
from tests.train.runs import MODEL, losses_of, make_run
from tests.train.telemetry.test_metrics_fields import documented
from zslurm.train.config import TrainConfig
from zslurm.train.data.build.build import build
from zslurm.train.errors import ConfigError, DataError
from zslurm.train.evaluation.evaluate import Best, better
from zslurm.train.evaluation.run_tasks import load_run_tasks
from zslurm.train.jsonl import read_jsonl

WORDS = "the quick brown fox jumps over the lazy dog and runs into the deep dark wood".split()


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    (folder / "text.txt").write_text((" ".join(WORDS) + "\n") * 200)
    build([folder / "text.txt"], folder / "data", vocab_size=300)
    return folder / "data"


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("tasks")
    documents = [
        {"q": WORDS[number], "choices": [WORDS[number + 1], WORDS[number - 3], "cat"], "right": 0}
        for number in range(3, 14)
    ]
    choose = write_task(
        folder, documents, task="choose", output_type="multiple_choice",
        doc_to_text="{{q}}", doc_to_choice="{{choices}}", doc_to_target="{{right}}", num_fewshot=1,
        metric_list=[{"metric": "acc"}, {"metric": "acc_norm"}],
    )  # fmt: skip
    write = write_task(
        folder, documents[:5], task="write", output_type="generate_until",
        doc_to_text="{{q}}", doc_to_target="{{choices[0]}}",
        generation_kwargs={"max_gen_toks": 3, "until": []},
        metric_list=[{"metric": "exact_match"}],
    )  # fmt: skip
    return [str(choose), str(write)]


def rows_of(run: Path, kind: str) -> list[dict[str, Any]]:
    return [row for row in read_jsonl(run / "metrics.jsonl") if row["kind"] == kind]


def run_with(folder: Path, data: Path, **sections: Any) -> Path:
    settings = {"model": {**MODEL, "vocab_size": 320}, "phase": {"context": 16, "lr": 2e-2}, **sections}
    return make_run(folder, data, steps=6, **settings)


@with_harness
def test_a_run_is_scored_and_trains_as_without(tmp_path: Path, data: Path, tasks: list[str]) -> None:
    """The same on any number of ranks; the best checkpoint by a task stays."""
    evaluation = {"tasks": tasks, "tasks_every_steps": 2, "tasks_limit": 9}
    checkpoint = {"every_steps": 2, "keep_last": 1, "best_by": "choose/acc"}
    plain = run_with(tmp_path / "plain", data)
    assert train_on(plain, ranks=1).returncode == 0
    scores = []
    for ranks in (1, 2):
        run = run_with(tmp_path / f"on-{ranks}", data, evaluation=evaluation, checkpoint=checkpoint)
        done = train_on(run, ranks=ranks)
        assert done.returncode == 0, done.stderr
        rows = rows_of(run, "tasks")
        assert all(set(row) == {*documented()["Every line"], *documented()["tasks"]} for row in rows)
        assert [row["step"] for row in rows] == [2, 4, 6]
        assert rows[0]["documents"] == {"choose": 9, "write": 5}
        assert set(rows[0]["scores"]) == {"choose/acc", "choose/acc_norm", "write/exact_match"}
        scores.append([row["scores"]["choose/acc"] for row in rows])
        best = min(range(3), key=lambda place: (-rows[place]["scores"]["choose/acc"], place))
        kept = {int(path.name[5:]) for path in (run / "checkpoints").glob("step-*")}
        assert kept == {6, 2 * best + 2}
        last = [row for row in rows_of(run, "checkpoint") if row["state"] == "COMMITTED"][-1]
        assert (last["best_step"], last["best_loss"], last["best_metric"]) == (2 * best + 2, None, "choose/acc")
    assert losses_of(tmp_path / "on-1") == losses_of(plain)
    assert scores[0] == scores[1]


def test_the_best_by_one_metric_is_not_compared_with_that_by_another() -> None:
    by_loss, by_task = Best(2, 1.0, 16), Best(4, -0.25, 16, "choose/acc")
    assert better(by_task, by_loss) == by_task
    assert better(Best(6, -0.5, 16, "choose/acc"), by_task) == Best(6, -0.5, 16, "choose/acc")
    assert better(Best(6, -0.25, 16, "choose/acc"), by_task) == by_task


def config(**sections: Any) -> TrainConfig:
    phases = [{"tokens": 960, "context": 16, "global_batch": 6, "micro_batch": 1, "lr": 1e-3}]
    return TrainConfig.model_validate({"model": MODEL, "phases": phases, **sections})


@with_harness
def test_wrong_tasks_are_refused_before_a_run_starts(tmp_path: Path, tasks: list[str]) -> None:
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text(json.dumps({"task": "wrong", "dataset_path": "json", "output_type": "loglikelihood",
                                 "dataset_kwargs": {"data_files": "none.jsonl"}}))  # fmt: skip
    with pytest.raises(DataError, match=r"evaluation.tasks: .*wrong.yaml: .*none.jsonl"):
        load_run_tasks(config(evaluation={"tasks": [str(wrong)]}).evaluation, "loss")
    with pytest.raises(ConfigError, match=r"checkpoint.best_by: choose/f1: evaluation.tasks has choose/acc, "):
        load_run_tasks(config(evaluation={"tasks": tasks}).evaluation, "choose/f1")
    loaded = load_run_tasks(config(evaluation={"tasks": tasks}).evaluation, "choose/acc_norm")
    assert [task.reference for task in loaded] == tasks


def test_without_the_harness_a_run_with_tasks_is_refused_with_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(
        ConfigError, match=r"^evaluation.tasks needs lm_eval, .*: pip install 'zslurm-train\[eval\]'$"
    ):
        load_run_tasks(config(evaluation={"tasks": ["hellaswag"]}).evaluation, "loss")


def test_settings_of_tasks_need_tasks() -> None:
    with pytest.raises(ValueError, match=r"best_by .* needs evaluation.tasks"):
        config(checkpoint={"best_by": "a/b"})
    with pytest.raises(ValueError, match="tasks_every_steps needs tasks"):
        config(evaluation={"tasks_every_steps": 3})
