"""How the end of an attempt is derived from what it left behind."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from zslurm.aegis.core.policy.outcome import AttemptOutcome, Cause, attempt_outcome
from zslurm.aegis.core.root_cause import root_failure
from zslurm.slurm.on_nodes.srun_output import failed_nodes, task_failures

# What torch 2.13 raised on a rank whose peer was killed, once idle and once in an all-reduce (gloo, Debian 12).
_GLOO = "[/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:"
_HINT = "Check the logs of the remote worker before reporting an error. GLHF! \U0001f3d6\ufe0f"
CLOSED_BY_PEER = (
    f"{_GLOO}553] Connection closed by peer [127.0.0.1]:11155. "
    f"This is typically caused by a remote worker crashing. {_HINT}"
)
RESET_BY_PEER = (
    f"{_GLOO}537] Read error [127.0.0.1]:31454: Connection reset by peer. "
    f"This is typically caused by a remote worker hanging or bugs in the application. {_HINT}"
)


def end(rank: int, code: int, error: str = "", message: str = "", *, time: float = 100.0) -> dict[str, Any]:
    """What a rank recorded when it ended."""
    body: dict[str, Any] = {"rank": rank, "node": f"node{rank // 2}", "exit_code": code, "time": time, "step": 7}
    return body | ({"error": error, "message": message} if error else {})


def cascade(rank: int, *, time: float = 100.0, message: str = CLOSED_BY_PEER) -> dict[str, Any]:
    return end(rank, 1, "RuntimeError", message, time=time)


def lines(*texts: str) -> str:
    """A step's log, as srun writes it."""
    return "".join(f"srun: error: {text}\n" for text in texts)


def outcome_of(
    exit_code: int, log: str = "", *ends: dict[str, Any], killed: str | None = None, early: Cause | None = None,
    asked: bool = False,
) -> AttemptOutcome:  # fmt: skip
    found = [early] if early else []
    return attempt_outcome(
        exit_code, ends, task_failures(log), failed_nodes(log), log[-2000:], killed, early=found, asked=asked
    )


def test_every_rank_ended_well() -> None:
    assert outcome_of(0, "", end(0, 0), end(1, 0)) == AttemptOutcome("completed", 0)


def test_saved_and_stopped_as_asked() -> None:
    log = lines("node1: tasks 2-3: Exited with exit code 75", "node0: tasks 0-1: Exited with exit code 75")
    assert outcome_of(75, log, *(end(rank, 75) for rank in range(4))) == AttemptOutcome("interrupted", 75)


def test_a_rank_that_failed_is_not_hidden_by_the_higher_code_of_those_that_stopped() -> None:
    log = lines("node0: task 0: Exited with exit code 1", "node1: task 2: Exited with exit code 75")
    outcome = outcome_of(75, log, end(0, 1, "OSError", "No space left on device"), end(2, 75))
    assert (outcome.outcome, outcome.exit_code) == ("failed", 1)
    assert outcome.cause == Cause("OSError: No space left on device", 0, "node0", 1, 7)


def test_a_users_mistake_has_its_own_code_and_words() -> None:
    log = lines("node0: tasks 0-1: Exited with exit code 2", "node1: tasks 2-3: Exited with exit code 2")
    ends = [end(rank, 2, "ConfigError", "parallel.device: cuda, but ...", time=100 - rank) for rank in range(4)]
    outcome = outcome_of(2, log, *ends)
    assert (outcome.outcome, outcome.exit_code) == ("failed", 2)
    assert outcome.cause == Cause("ConfigError: parallel.device: cuda, but ...", 1, "node0", 2, 7), (
        "of the ranks that were reported first, the one that failed first"
    )


KILLED = "node1: task 3: Killed"
PEERS = [
    "node1: task 2: Exited with exit code 1",
    "node0: tasks 0-1: Exited with exit code 1",
]


@pytest.mark.parametrize("reported", [*itertools.permutations([KILLED, *PEERS])])
@pytest.mark.parametrize("message", [CLOSED_BY_PEER, RESET_BY_PEER])
def test_a_killed_rank_is_the_root_wherever_its_line_stands(reported: tuple[str, ...], message: str) -> None:
    ends = [cascade(rank, time=100 + rank, message=message) for rank in (0, 1, 2)]
    outcome = outcome_of(137, lines(*reported), *ends)
    assert outcome == AttemptOutcome("failed", 137, Cause("Killed", 3, "node1", 137))


@pytest.mark.parametrize("reported", [*itertools.permutations(PEERS)])
def test_an_error_of_its_own_is_the_root_among_complaints_about_peers(reported: tuple[str, ...]) -> None:
    """Ranks 0 and 1 are reported on one line; rank 1 had the error, rank 0 recorded its complaint earlier."""
    own = end(1, 1, "ZeroDivisionError", "division by zero", time=105)
    outcome = outcome_of(1, lines(*reported), cascade(2, time=101), cascade(0, time=102), own)
    assert outcome == AttemptOutcome("failed", 1, Cause("ZeroDivisionError: division by zero", 1, "node0", 1, 7))


def test_a_rank_that_recorded_nothing_is_suspected_before_those_that_blame_their_peers() -> None:
    """`tasks 0-1,3` ended with code 1; of rank 3, which exited without Python's leave, there is no word."""
    log = "step: error: node0: tasks 0-1,3: Exited with exit code 1\n"
    outcome = outcome_of(1, log, cascade(0), cascade(1))
    assert outcome == AttemptOutcome("failed", 1, Cause("Exited with exit code 1", 3, "node0", 1))


def test_where_there_are_only_cascades_the_first_takes_the_blame() -> None:
    log = lines(*PEERS)
    outcome = outcome_of(1, log, cascade(0, time=3), cascade(1, time=2), cascade(2, time=1))
    assert outcome.cause == Cause(f"RuntimeError: {CLOSED_BY_PEER}", 2, "node1", 1, 7)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("Segmentation fault (core dumped)", "Segmentation fault (core dumped)"),
        ("Out Of Memory", "Out Of Memory"),
        ("Exited with exit code 139", "Exited with exit code 139"),
    ],
)
def test_an_end_without_a_record_is_told_in_slurms_words(what: str, message: str) -> None:
    outcome = outcome_of(139, lines(f"node3: tasks 25,27: {what}"))
    assert outcome == AttemptOutcome("failed", 139, Cause(message, 25, "node3", 139))


@pytest.mark.parametrize("exit_code", [0, 1, 75, 137])
def test_a_node_that_slurm_calls_failed_is_the_cause_whatever_ranks_say(exit_code: int) -> None:
    log = lines("node0: tasks 0-1: Exited with exit code 1", "Node failure on node1")
    outcome = outcome_of(exit_code, log, cascade(0), cascade(1))
    assert outcome.outcome == "failed"
    assert outcome.exit_code == (exit_code or 1)
    assert outcome.cause == Cause("Slurm reports node node1 as failed", node="node1")


def test_a_step_that_ended_without_a_word() -> None:
    assert outcome_of(137) == AttemptOutcome("failed", 137, Cause("the step ended without a word", exit_code=137))


def test_a_step_that_only_srun_speaks_of() -> None:
    log = lines("Unable to create step for job 31: Invalid generic resource (gres) specification")
    outcome = outcome_of(1, log)
    assert (outcome.outcome, outcome.exit_code) == ("failed", 1)
    assert outcome.cause is not None
    assert outcome.cause.message == log.strip()


def test_ranks_that_recorded_an_error_count_where_the_step_reported_none() -> None:
    """srun itself was killed before it could tell."""
    outcome = outcome_of(
        137, "", cascade(0, time=1), end(1, 2, "DataError", "tokens.h5: damaged", time=2), end(2, 75)
    )
    assert outcome == AttemptOutcome("failed", 2, Cause("DataError: tokens.h5: damaged", 1, "node0", 2, 7))


def test_killed_by_the_supervisor_because_nobody_stopped() -> None:
    reason = "the ranks did not save and stop within 600 s"
    log = lines("node0: tasks 0-1: Exited with exit code 75")
    assert outcome_of(137, log, killed=reason, asked=True) == AttemptOutcome("failed", 137, Cause(reason))


def test_killed_by_the_supervisor_after_a_rank_failed_the_rank_is_the_cause() -> None:
    reason = "peers of the failed rank did not end within 30 s"
    log = lines("node0: task 1: Exited with exit code 1")
    outcome = outcome_of(137, log, end(1, 1, "ValueError", "bad"), killed=reason)
    assert outcome == AttemptOutcome("failed", 1, Cause("ValueError: bad", 1, "node0", 1, 7))


def test_killed_by_the_supervisor_where_ranks_only_lost_their_peers() -> None:
    reason = "ranks lost their peers, and Slurm named no failed node within 600 s"
    log = lines("node0: tasks 0-1: Exited with exit code 1")
    assert outcome_of(137, log, cascade(0), cascade(1), killed=reason) == AttemptOutcome(
        "failed", 137, Cause(reason)
    )


def test_stopped_just_before_the_supervisor_would_have_killed_it() -> None:
    log = lines("node0: tasks 0-1: Exited with exit code 75")
    killed = "the ranks did not save and stop within 600 s"
    assert outcome_of(75, log, killed=killed, asked=True) == AttemptOutcome("interrupted", 75)


EARLY = Cause("exited with exit code 0 before the end of the run", 1, "node0", 0, 7)


def test_a_rank_that_exits_with_0_too_early_is_the_cause_and_its_peers_follow_from_it() -> None:
    log = lines("node0: task 0: Exited with exit code 1", "node1: task 2: Exited with exit code 1")
    assert outcome_of(1, log, cascade(0), cascade(2), early=EARLY) == AttemptOutcome("failed", 1, EARLY)
    killed = "ranks lost their peers, and nothing else was found within 30 s"
    assert outcome_of(137, log, cascade(0), cascade(2), killed=killed, early=EARLY) == AttemptOutcome(
        "failed", 137, EARLY
    )


def test_a_step_that_ended_with_0_is_not_complete_where_a_rank_left_too_early() -> None:
    assert outcome_of(0, "", end(0, 0), early=EARLY) == AttemptOutcome("failed", 1, EARLY)
    assert outcome_of(75, lines("node0: task 0: Exited with exit code 75"), end(0, 75), early=EARLY).cause == EARLY


def test_an_error_of_another_rank_comes_before_an_early_exit() -> None:
    log = lines("node1: task 2: Exited with exit code 1")
    outcome = outcome_of(1, log, end(2, 1, "ValueError", "bad"), early=EARLY)
    assert outcome.cause == Cause("ValueError: bad", 2, "node1", 1, 7)


@pytest.mark.parametrize(
    "recorded", [[], [end(1, 75, "SystemExit", "sys.exit(75)")]], ids=["by os._exit", "by sys.exit"]
)
def test_75_is_no_sign_of_a_save_where_nobody_asked_for_one(recorded: list[dict[str, Any]]) -> None:
    """Other programs end with it too: EX_TEMPFAIL of sysexits.h."""
    log = lines("node0: task 1: Exited with exit code 75", "node0: task 0: Exited with exit code 1")
    outcome = outcome_of(75, log, cascade(0), *recorded)
    assert outcome.outcome == "failed"
    assert outcome.cause is not None and (outcome.cause.rank, outcome.cause.exit_code) == (1, 75)


def test_a_hook_that_ends_its_rank_because_a_peer_left_is_no_root() -> None:
    log = lines("node0: task 0: Exited with exit code 3", KILLED)
    gave_up = end(0, 3, "SystemExit", "sys.exit(3) before the end of the run") | {"traceback": CLOSED_BY_PEER}
    outcome = outcome_of(137, log, gave_up)
    assert outcome.cause is not None and outcome.cause.rank == 3


def test_there_is_no_root_while_only_peers_of_a_silent_rank_complain() -> None:
    failures = task_failures(lines(*PEERS))
    ends = {rank: cascade(rank) for rank in (0, 1, 2)}
    assert root_failure(failures, ends) is None
    killed = task_failures(lines(KILLED))
    assert root_failure([*failures, *killed], ends) == killed[0]


def test_an_event_of_an_outcome_leaves_out_what_is_not_known() -> None:
    assert outcome_of(137, lines(KILLED)).fields() == {
        "outcome": "failed",
        "exit_code": 137,
        "cause": {"message": "Killed", "rank": 3, "node": "node1", "exit_code": 137},
    }
    assert outcome_of(0).fields() == {"outcome": "completed", "exit_code": 0, "cause": None}


def test_a_warning_of_srun_is_never_the_cause() -> None:
    warning = "srun: warning: can't run 1 processes on 2 nodes, setting nnodes to 1\n"
    assert outcome_of(1, warning).cause == Cause("the step ended without a word", exit_code=1)
    error = "srun: error: Unable to create step: Job credential expired\n"
    cause = outcome_of(1, warning + error).cause
    assert cause is not None
    assert cause.message == error.strip()
