"""Collecting the nodes' answers, with a stand-in for srun that prints what the real one printed."""

from __future__ import annotations

import json
import os
import re
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from tests.waiting import with_limit_that_suffices
from zslurm.core.errors import SlurmRefused, SlurmUnavailable
from zslurm.slurm.on_nodes.run_on_nodes import SETUP_VARIABLE, answer, run_on_nodes

ANSWER = "zslurm-answer NODE 0 1 VALUE"
QUEUED = "srun: job 12 queued and waiting for resources"
STARTED = "srun: job 12 has been allocated resources"


@pytest.fixture
def srun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The program that is started; a test writes what it does."""
    program = tmp_path / "bin/srun"
    program.parent.mkdir()
    program.touch(mode=0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    return program


def says(srun: Path, script: str) -> None:
    srun.write_text(f"#!/bin/bash\n{script}\n")


def answers_of(node: str, value: object) -> str:
    return f"echo '{ANSWER.replace('NODE', node).replace('VALUE', json.dumps(value))}'"


def test_answers_are_found_between_other_lines_with_their_times(srun: Path) -> None:
    says(srun, f"echo a prolog speaks; {answers_of('node0', 1)}; printf 'no end: '; {answers_of('node1', [2])}")
    found = run_on_nodes("some.module", nodes=["node0", "node1"])
    assert {name: answer.value for name, answer in found.items()} == {"node0": 1, "node1": [2]}
    assert all(answer.received > 0 for answer in found.values())


def test_a_node_that_ended_badly_is_an_error_with_the_reason(srun: Path) -> None:
    words = "srun: error: node1: task 1: Exited with exit code 1"
    says(srun, f"{answers_of('node0', 1)}; echo '{words}' >&2; exit 1")
    found = run_on_nodes("some.module", nodes=["node0", "node1"])
    assert found["node0"].error is None
    assert found["node1"].error == "the question ended badly: Exited with exit code 1"


def test_a_node_that_does_not_answer_in_time_is_an_answer_too(srun: Path) -> None:
    says(srun, f"{answers_of('node0', 1)}; exec sleep 600")
    found = with_limit_that_suffices(
        lambda limit_s: run_on_nodes("some.module", nodes=["node0", "node1"], timeout_s=limit_s),
        lambda found: found["node0"].error is None,
    )
    assert found["node0"].value == 1
    assert re.fullmatch(r"no answer within \d+ s", found["node1"].error or "")


def test_no_job_is_left_of_a_survey_that_is_given_up(srun: Path, tmp_path: Path) -> None:
    """srun may die before it knows that it has a job; one that ended by itself has none."""
    scancel = srun.with_name("scancel")
    scancel.write_text(f'#!/bin/bash\necho "$@" >> {tmp_path}/cancelled\n')
    scancel.chmod(0o755)
    says(srun, f'echo "$@" >> {tmp_path}/asked; {answers_of("node0", 1)}')
    run_on_nodes("some.module", nodes=["node0"])
    assert not (tmp_path / "cancelled").exists()
    says(srun, f'echo "$@" >> {tmp_path}/asked; exec sleep 600')
    run_on_nodes("some.module", nodes=["node0"], timeout_s=1, job_id="12")
    assert not (tmp_path / "cancelled").exists(), "the step of a job that runs on"

    def given_up(limit_s: float) -> list[str]:
        (tmp_path / "asked").write_text("")
        (tmp_path / "cancelled").unlink(missing_ok=True)
        with suppress(SlurmUnavailable, SlurmRefused):
            run_on_nodes("some.module", nodes=["node0"], timeout_s=limit_s)
        return re.findall(r"--job-name=(\S+)", (tmp_path / "asked").read_text())

    names = []
    for _ in range(2):
        names += with_limit_that_suffices(given_up, bool)
        assert (tmp_path / "cancelled").read_text() == f"--name={names[-1]}\n"
    assert len(set(names)) == 2, "each has a name of its own"


def test_while_the_job_waits_its_id_is_reported(srun: Path) -> None:
    reported: list[str] = []
    says(srun, f"echo '{QUEUED}' >&2; sleep 0.5; echo '{STARTED}' >&2; sleep 0.5; {answers_of('node0', 1)}")
    run_on_nodes("some.module", waiting=reported.append)
    assert set(reported) == {"12"}
    before = len(reported)
    says(srun, f"echo '{QUEUED}' >&2; exec sleep 600")

    def waiting(limit_s: float) -> str:
        try:
            run_on_nodes("some.module", nodes=["node0"], timeout_s=limit_s, waiting=reported.append)
        except SlurmRefused as error:
            return str(error)
        except SlurmUnavailable:
            return ""
        raise AssertionError("a job that waits is a failure")

    assert re.search(r"job 12 did not start within \d+ s$", with_limit_that_suffices(waiting, bool))
    assert len(reported) > before


def test_lines_of_the_site_run_before_the_module(srun: Path, tmp_path: Path) -> None:
    """They travel in the environment: everybody can read command lines."""
    module = tmp_path / "asked.py"
    module.write_text(
        "import os; from zslurm.slurm.on_nodes.run_on_nodes import answer; answer(os.environ['SITE'])\n"
    )
    says(srun, f'cd {tmp_path}; while [[ $1 == --* ]]; do shift; done; printf "%s\\n" "$@" > words; exec "$@"')
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    found = run_on_nodes("asked", setup=["export SITE=secret"], environ=environ)
    assert [answer.value for answer in found.values()] == ["secret"]
    words = (tmp_path / "words").read_text()
    assert "secret" not in words
    assert SETUP_VARIABLE in words


def test_no_node_to_ask_is_an_error(srun: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    says(srun, "echo 'srun: error: Unable to allocate resources: Invalid account' >&2; exit 1")
    with pytest.raises(SlurmRefused, match="Invalid account"):
        run_on_nodes("some.module", nodes=["node0"])
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(SlurmUnavailable, match="srun: not found on PATH"):
        run_on_nodes("some.module")


def test_long_answers_arrive_whole_though_their_lines_are_mixed(
    srun: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Slurm cuts a line after 1,024 characters, and writes the pieces of all nodes as they come."""
    long = {"a": "x" * 5000, "b": "two  spaces"}
    for node in ("node0", "node1"):
        answer(long, {"SLURMD_NODENAME": node})
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) < 1000
    mixed = sorted(lines, key=lambda line: line.split()[2])
    says(srun, "cat <<'END'\n" + "\n".join(mixed) + "\nEND")
    found = run_on_nodes("some.module", nodes=["node0", "node1"])
    assert {name: answer.value for name, answer in found.items()} == {"node0": long, "node1": long}


def test_an_answer_of_which_a_part_is_missing_is_none(srun: Path) -> None:
    says(srun, f"{answers_of('node0', 1)}; echo 'zslurm-answer node1 0 2 [1,'; echo last words >&2")
    found = run_on_nodes("some.module", nodes=["node0", "node1"])
    assert (found["node0"].value, found["node1"].value, found["node1"].error) == (1, None, "last words")
