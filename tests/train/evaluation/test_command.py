"""evaluation.command: a real export and a real command next to a real run, and what may go wrong with them."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from pydantic import ValidationError

from tests.train.ranks import Ranks, train_on
from tests.train.runs import losses_of, make_corpus, make_run
from tests.waiting import wait_for
from zslurm.train.evaluation.command import ExportPaths
from zslurm.train.hub import open_weights
from zslurm.train.jsonl import read_jsonl
from zslurm.train.sections.metrics_config import EvaluationConfig
from zslurm.train.stop import Ending
from zslurm.train.telemetry.evaluation_command import EvaluationCommand, command_words


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("data") / "tokens.h5")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    """A finished run of two steps, with one checkpoint."""
    run = make_run(tmp_path_factory.mktemp("runs") / "trained", corpus, steps=2)
    assert train_on(run, ranks=1).returncode == 0
    return run


def command_rows(run: Path) -> list[dict[str, Any]]:
    return [row for row in read_jsonl(run / "metrics.jsonl") if row["kind"] == "evaluation_command"]


class Beside:
    """An EvaluationCommand without a trainer: what it recorded."""

    def __init__(self, run: Path, command: str) -> None:
        self.rows: list[dict[str, Any]] = []
        self.run = run
        self.checkpoint = next((run / "checkpoints").iterdir())
        self.command = EvaluationCommand(
            run,
            "a name",
            command,
            EvaluationConfig(command=command, command_every_steps=1),
            self._write,
        )

    def _write(self, kind: str, **fields: Any) -> None:
        assert kind == "evaluation_command"
        self.rows.append(fields)

    def start(self, step: int) -> ExportPaths:
        self.command.start(step, self.checkpoint)
        return ExportPaths(self.run, step)

    def end(self) -> dict[str, Any]:
        wait_for(lambda: not self.command.poll(), "the command to end")
        return self.rows[-1]


def python(program: str) -> str:
    return f"{sys.executable} -c '{program}'"


def test_a_run_evaluates_its_checkpoints(tmp_path: Path, corpus: Path) -> None:
    """If a command is due, a checkpoint is made; at its end a run waits. The training is the same."""
    program = python("import os, sys, time; time.sleep(1); print(*sys.argv[1:], *sorted(os.listdir(sys.argv[1])))")
    evaluation = {"command": program + " {model} {step} {run}", "command_every_steps": 3}
    seldom = {"every_steps": 100}
    run = make_run(tmp_path / "evaluated", corpus, steps=4, evaluation=evaluation, checkpoint=seldom)
    plain = make_run(tmp_path / "plain", corpus, steps=4, checkpoint=seldom)
    for each in (run, plain):
        done = train_on(each, ranks=2)
        assert done.returncode == 0, done.stderr
    assert losses_of(run) == losses_of(plain)
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step-00000003", "step-00000004"]
    (row,) = command_rows(run)
    assert (row["step"], row["outcome"], row["exit_code"], row["reason"]) == (3, "done", 0, None)
    assert row["seconds"] > 1
    assert row["export_seconds"] > 0
    log = Path(row["log"]).read_text().splitlines()
    assert f"{row['model']} 3 tiny config.json model.safetensors zslurm.json" in log
    with (
        open_weights(Path(row["model"])) as exported,
        open_weights(run / "checkpoints" / "step-00000003") as saved,
    ):
        for weights in (exported, saved):
            assert weights.settings.model.layers == 2
        theirs, ours = (np.empty(32, np.float32) for _ in range(2))
        exported.read("embedding.weight", 64, theirs)
        saved.read("embedding.weight", 64, ours)
        assert theirs == pytest.approx(ours, rel=2**-8), "rounded to bf16"


def test_the_words_of_a_command_hold_what_they_are_given_and_no_shell_sees_them(trained: Path) -> None:
    hostile = "$(touch /tmp/owned); `id` && rm -rf *"
    beside = Beside(
        trained, python("import sys; print(sys.argv[1:])") + f' {{model}} "--x={{step}};{{run}}" "{hostile}"'
    )
    paths = beside.start(7)
    assert beside.end()["outcome"] == "done"
    assert str([str(paths.model), "--x=7;a name", hostile]) in paths.log.read_text()


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("evaluate {model}", ["evaluate", "/a b/m"]),
        ("evaluate --model={model} '{step} {run}'", ["evaluate", "--model=/a b/m", "3 {model}"]),
        ("""evaluate --json '{"a": {step}}' {other}""", ["evaluate", "--json", '{"a": 3}', "{other}"]),
    ],
)
def test_placeholders_are_replaced_inside_of_words_once(command: str, words: list[str]) -> None:
    """A value with a space stays one word, and one that looks like a placeholder stays as it is."""
    assert command_words(command, model="/a b/m", step=3, run="{model}") == words


def test_a_command_that_fails_is_reported_and_nothing_more(
    trained: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    beside = Beside(trained, python("print(5 / 0)"))
    paths = beside.start(3)
    row = beside.end()
    assert (row["outcome"], row["exit_code"], row["reason"]) == ("failed", 1, "exit code 1")
    assert "ZeroDivisionError" in paths.log.read_text()
    assert caplog.messages == [f"evaluation.command of step 3 failed: exit code 1; see {paths.log}"]


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ("/no/such/program {model}", "/no/such/program: No such file or directory"),
        (python("import os; os.kill(os.getpid(), 9)"), "killed by signal 9"),
    ],
)
def test_whatever_happens_to_a_command_is_its_reason(trained: Path, command: str, reason: str) -> None:
    beside = Beside(trained, command)
    beside.start(3)
    row = beside.end()
    assert row["outcome"] == "failed"
    assert row["reason"] == reason


def test_a_checkpoint_that_cannot_be_exported_is_a_failure_with_its_reason(tmp_path: Path, trained: Path) -> None:
    beside = Beside(trained, "true")
    beside.checkpoint = tmp_path / "gone"
    beside.start(3)
    row = beside.end()
    assert (row["outcome"], row["exit_code"], row["seconds"]) == ("failed", None, None)
    assert "gone is not a directory" in row["reason"]


def test_it_knows_nothing_of_ranks_and_gives_way(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that saw torchrun's variables would wait for peers; at full priority it would slow the run."""
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_USE_AGENT_STORE", "ZSLURM_ATTEMPT"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("PYTHONSAFEPATH", "1")
    monkeypatch.setenv("HF_HOME", "stays")
    beside = Beside(trained, python("import os, json; print(json.dumps([dict(os.environ), os.nice(0)]))"))
    paths = beside.start(3)
    assert beside.end()["outcome"] == "done"
    environment, niceness = json.loads(paths.log.read_text().splitlines()[-1])
    assert niceness >= 10
    assert environment["HF_HOME"] == "stays"
    assert not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "ZSLURM_ATTEMPT", "PYTHONSAFEPATH"} & set(environment)
    assert not [name for name in environment if name.startswith("TORCHELASTIC")]


def test_only_one_runs_at_a_time(trained: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    beside = Beside(trained, "sleep 1000")
    beside.start(3)
    beside.start(5)
    assert [(row["step"], row["outcome"]) for row in beside.rows] == [(5, "skipped")]
    assert caplog.messages == ["evaluation.command: step 5 is left out: that of step 3 still runs"]
    beside.command.kill()
    assert beside.rows[-1]["outcome"] == "killed"
    assert beside.rows[-1]["step"] == 3


def test_its_checkpoint_is_kept_until_it_is_exported(trained: Path) -> None:
    beside = Beside(trained, "sleep 1000")
    paths = beside.start(3)
    reads = beside.command.checkpoints_in_use()
    assert reads == {3} or paths.model.exists()
    wait_for(paths.model.exists, "the export")
    assert beside.command.checkpoints_in_use() == frozenset()
    beside.command.kill()


def test_the_newest_export_stays(trained: Path) -> None:
    beside = Beside(trained, "true")
    for step in (12, 13):
        beside.start(step)
        assert beside.end()["outcome"] == "done"
    exports = sorted(path.name for path in (trained / "exports").iterdir() if path.is_dir())
    assert exports == ["step-00000013"]
    again = Beside(trained, "true")
    again.start(13)
    assert again.end()["outcome"] == "done", "an attempt may come to a step a second time"


def children_of(name: str) -> list[psutil.Process]:
    return [p for p in psutil.process_iter() if name in " ".join(_words(p))]


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline() if process.status() != psutil.STATUS_ZOMBIE else []
    except psutil.Error:
        return []


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM])
def test_it_ends_with_the_run(tmp_path: Path, corpus: Path, signum: signal.Signals) -> None:
    """A trainer that is killed takes the command along, and so does one that is asked to save and stop."""
    marker = f"evaluate-{os.getpid()}-{signum}"
    evaluation = {"command": f"bash -c 'sleep 1000; echo {marker}' {{model}}", "command_every_steps": 2}
    run = make_run(tmp_path / "run", corpus, steps=5000, evaluation=evaluation)
    ranks = Ranks(run, 1)
    wait_for(lambda: bool(children_of(marker)) and (run / "exports" / "step-00000002").exists(), "the command")
    ranks.send_signal(signum)
    if signum == signal.SIGTERM:
        assert ranks.wait().returncode == Ending.INTERRUPTED
        assert command_rows(run)[-1]["outcome"] == "killed"
    else:
        ranks.processes[0].join()
    wait_for(lambda: not children_of(marker), "the command to end")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"command": "evaluate 'x", "command_every_steps": 1}, "No closing quotation"),
        ({"command": "  ", "command_every_steps": 1}, "command is empty"),
        ({"command": "evaluate"}, "command and command_every_steps need each other"),
        ({"command_every_steps": 5}, "command and command_every_steps need each other"),
        ({"every_steps": 5}, "every_steps needs data"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        EvaluationConfig.model_validate(settings)
