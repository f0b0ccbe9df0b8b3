"""A command of Slurm is repeated if that helps, and fails in one clear line if it does not.

The commands here are scripts that say what the real ones were recorded to say; tests/on_slurm has the real ones.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.slurm.recordings import recorded
from tests.waiting import with_limit_that_suffices
from zslurm.core.errors import Exit, NotFound, SlurmRefused, SlurmUnavailable
from zslurm.slurm.client import SlurmClient
from zslurm.slurm.run_command import Retries, controller_was_away
from zslurm.slurm.states import JobState

Program = Callable[[str, str], None]
AT_ONCE = Retries(attempts=3, first_pause_s=0.0)


@pytest.fixture
def program(tmp_path: Path) -> Program:
    """Puts a shell script under a name on the PATH that `client` uses."""

    def write(name: str, script: str) -> None:
        path = tmp_path / name
        path.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/{name}.calls\n{script}\n')
        path.chmod(0o755)

    return write


def client(tmp_path: Path, timeout_s: float = 30.0) -> SlurmClient:
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SQUEUE_FORMAT": "%i", "SLURM_CONF": "/etc/slurm.conf"}
    return SlurmClient(environment, timeout_s, retries=AT_ONCE)


def calls(tmp_path: Path, name: str) -> int:
    return (tmp_path / f"{name}.calls").read_text().count("\n")


def says(message: str, code: int) -> str:
    return f"printf %s {shlex.quote(message)} >&2; exit {code}"


def test_a_controller_that_comes_back_is_asked_again(tmp_path: Path, program: Program) -> None:
    away = f"[ $(wc -l < {tmp_path}/squeue.calls) -lt 3 ] && {{ {says(recorded.CONTROLLER_DOWN, 1)}; }}"
    program("squeue", f"{away}\nprintf %s {shlex.quote(recorded.SQUEUE)}")
    assert len(client(tmp_path).queue()) == 9
    assert calls(tmp_path, "squeue") == 3


def test_a_controller_that_stays_away_is_an_error_with_its_own_code(tmp_path: Path, program: Program) -> None:
    program("squeue", says(recorded.CONTROLLER_DOWN, 1))
    with pytest.raises(SlurmUnavailable, match=r"does not answer \(3 tries\).*Unable to contact") as caught:
        client(tmp_path).queue()
    assert caught.value.exit_code is Exit.SLURM_UNAVAILABLE
    assert calls(tmp_path, "squeue") == 3


def test_requeue_is_repeated_only_where_it_was_surely_not_done(tmp_path: Path, program: Program) -> None:
    program("scontrol", says(recorded.CONTROLLER_DOWN_REQUEUE, 1))
    with pytest.raises(SlurmUnavailable):
        client(tmp_path).requeue("1")
    assert calls(tmp_path, "scontrol") == 3
    program("scontrol", says("slurm_requeue error: Socket timed out on send/recv operation", 1))
    with pytest.raises(SlurmUnavailable, match="it may have been done"):
        client(tmp_path).requeue("1")
    assert calls(tmp_path, "scontrol") == 4


def test_a_command_that_hangs_is_given_up(tmp_path: Path, program: Program) -> None:
    program("squeue", "exec sleep 600")

    def asked(timeout_s: float) -> int:
        (tmp_path / "squeue.calls").write_text("")
        with pytest.raises(SlurmUnavailable, match="did not answer within"):
            client(tmp_path, timeout_s=timeout_s).queue()
        return calls(tmp_path, "squeue")

    assert with_limit_that_suffices(asked, lambda tries: tries == 3) == 3


def test_slurms_own_words_are_passed_on(tmp_path: Path, program: Program) -> None:
    program("scontrol", says("slurm_update error: Access/permission denied\n", 1))
    with pytest.raises(SlurmRefused) as caught:
        client(tmp_path).update("7", Comment="x")
    assert str(caught.value) == "scontrol update: slurm_update error: Access/permission denied"


def test_an_unknown_job_is_not_found(tmp_path: Path, program: Program) -> None:
    program("squeue", says(recorded.UNKNOWN_JOB, 1))
    program("scancel", says(recorded.SCANCEL_UNKNOWN, 0))
    program("scontrol", says(recorded.REQUEUE_UNKNOWN, 1))
    slurm = client(tmp_path)
    assert slurm.queue(["999"]) == {}
    with pytest.raises(NotFound, match="scancel: error: Kill job error on job id 999"):
        slurm.cancel("999")
    with pytest.raises(NotFound, match="job 999"):
        slurm.requeue("999")


def test_the_queue_of_no_jobs_costs_no_call(tmp_path: Path, program: Program) -> None:
    program("squeue", "exit 1")
    assert client(tmp_path).queue([]) == {}
    assert not (tmp_path / "squeue.calls").exists()


def test_commands_see_the_cluster_but_no_formats_of_the_users_own(tmp_path: Path, program: Program) -> None:
    program("squeue", f"env > {tmp_path}/seen")
    client(tmp_path).queue()
    seen = (tmp_path / "seen").read_text().splitlines()
    assert {"SLURM_CONF=/etc/slurm.conf", "TZ=UTC"} <= set(seen)
    assert not any(line.startswith("SQUEUE_") for line in seen)


def test_without_slurm_there_is_one_clear_line() -> None:
    slurm = SlurmClient({"PATH": "/nonexistent"})
    assert not slurm.available()
    assert slurm.history(["1"]) == {}
    with pytest.raises(SlurmUnavailable, match="squeue: not found on PATH"):
        slurm.queue()


def test_a_rate_limit_is_waited_out(tmp_path: Path, program: Program) -> None:
    """Slurm's words since 23.02: src/common/slurm_errno.c, SLURMCTLD_COMMUNICATIONS_BACKOFF."""
    limited = says("slurm_load_jobs error: Rate limit exceeded, please retry momentarily\n", 1)
    program("squeue", f"[ $(wc -l < {tmp_path}/squeue.calls) -lt 3 ] && {{ {limited}; }}; exit 0")
    assert client(tmp_path).queue() == {}
    assert calls(tmp_path, "squeue") == 3


def test_a_field_that_this_squeue_does_not_know_is_done_without(tmp_path: Path, program: Program) -> None:
    """Any version may drop a field: squeue complains, leaves it out and ends with 0. Then it is asked again."""
    without = "\x1e\n".join(
        "\x1f".join(value for index, value in enumerate(record.split("\x1f")) if index != 6)
        for record in recorded.SQUEUE.split("\x1e\n")
    )
    complaint = "squeue: error: Invalid job format specification: RestartCnt\n"
    program(
        "squeue",
        f'case "$*" in *RestartCnt*) printf %s {shlex.quote(complaint)} >&2;; esac\n'
        f"printf %s {shlex.quote(without)}",
    )
    slurm = client(tmp_path)
    jobs = slurm.queue()
    assert (jobs["7"].state, jobs["7"].restarts, jobs["2"].exit_code.code) == (JobState.PENDING, 0, 3)
    assert calls(tmp_path, "squeue") == 2
    slurm.queue()
    assert calls(tmp_path, "squeue") == 3, "what it does not know is not asked for again"


def test_the_version_costs_no_question_to_the_controller(tmp_path: Path, program: Program) -> None:
    program("squeue", "echo slurm-wlm 22.05.8")
    slurm = client(tmp_path)
    assert slurm.version() == slurm.version() == (22, 5, 8)
    assert (tmp_path / "squeue.calls").read_text() == "--version\n"
    program("squeue", "echo no such thing")
    with pytest.raises(SlurmRefused, match="no version in `no such thing`"):
        client(tmp_path).version()


def test_what_the_site_hides_is_named(tmp_path: Path, program: Program) -> None:
    """PrivateData=nodes: a refusal that names the policy; of a job it stays as it is."""
    program("sinfo", "echo 'slurm_load_node: Access/permission denied' >&2; exit 1")
    with pytest.raises(SlurmRefused, match=r"denied; the site hides this from its users \(PrivateData\)$"):
        client(tmp_path).nodes()
    program("scontrol", "echo 'Access/permission denied for job 7' >&2; exit 1")
    with pytest.raises(SlurmRefused, match=r"denied for job 7$"):
        client(tmp_path).update("7", Comment="x")


@pytest.mark.parametrize(
    ("text", "away"),
    [
        ("sbatch: error: Batch job submission failed: Unable to contact slurm controller (connect failure)", True),
        (
            "the job ended: srun: error: Unable to allocate resources: Socket timed out on send/recv operation",
            True,
        ),
        ("srun: fatal: Could not establish a configuration source", True),
        ("sbatch: error: Batch job submission failed: Requested node configuration is not available", False),
        (
            "error: node1: [Errno 111] Connection refused\nsrun: error: node1: task 0: Exited with exit code 1",
            False,
        ),
    ],
)
def test_only_words_of_srun_and_sbatch_show_that_the_controller_was_away(text: str, away: bool) -> None:
    assert controller_was_away(text) is away
