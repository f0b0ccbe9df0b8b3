"""Recovery in memory with real ranks on this machine: supervisor, store server and warm processes together."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.submit.local_runs import LocalUser
from tests.waiting import wait_for


@pytest.fixture
def user(tmp_path: Path) -> Iterator[LocalUser]:
    person = LocalUser(tmp_path)
    yield person
    person.close()


def test_killed_ranks_are_replaced_while_the_other_continues_with_or_without_the_supervisor(
    user: LocalUser,
) -> None:
    """First rank 1 together with the supervisor, then rank 0 under the next one; no rank hosts anything.

    The run is asked to stop afterwards, and does.
    """
    memory = {"recovery": "memory", "recovery_s": 60}
    run = user.write_run("lives", ranks=2, trainer="real", pace_s=0.05, aegis=memory)
    user.zslurm("submit", run)
    for count, rank in enumerate((1, 0), 1):
        since = max((event["time"] for event in user.events("lives", "recovered_in_memory")), default=0.0)
        wait_for(
            lambda since=since: [e for e in user.events("lives", "recovery_ready") if e["time"] > since],
            f"warm process {count}; so far {user.events('lives', 'recovery_unavailable')}",
            deadline_s=300,
        )
        survivor = user.rank(0).pid
        if count == 1:
            user.supervisor().kill()
        user.rank(rank).kill()
        wait_for(
            lambda count=count: len(user.events("lives", "recovered_in_memory")) == count,
            f"recovery {count}; so far {user.events('lives', 'recovery_failed')}",
            deadline_s=300,
        )
        recovered = user.events("lives", "recovered_in_memory")[-1]
        assert (recovered["ranks"], recovered["rolled_back"] <= 1) == ([rank], True)
        user.wait_for_step("lives", recovered["step"] + 3)
        if rank != 0:
            assert user.rank(0).pid == survivor
    assert [event.get("adopted") for event in user.events("lives", "supervisor_started")] == [None, 1]
    for kind in ("recovery_unavailable", "recovery_failed"):
        assert user.events("lives", kind) == []
    assert user.events("lives", "decision") == []
    assert len(user.events("lives", "attempt_started")) == 1
    user.zslurm("cancel", "lives")
    state = user.wait_for_end("lives")
    assert state["attempt"] == 1
    assert state["recovered_in_memory"] == 2


@pytest.mark.soak
def test_a_rank_that_hangs_is_killed_alone_and_replaced(user: LocalUser) -> None:
    hang = {"setup_s": 600, "step_s": 20}
    memory = {"recovery": "memory", "recovery_s": 60, "hang": hang}
    run = user.write_run("hangs", ranks=2, trainer="real", forks=False, aegis=memory)
    user.zslurm("submit", run)
    wait_for(lambda: user.events("hangs", "recovery_ready"), "warm processes", deadline_s=300)
    survivor = user.rank(0).pid
    user.rank(1).send_signal(signal.SIGSTOP)
    wait_for(
        lambda: user.events("hangs", "recovered_in_memory"),
        f"a recovery; so far {user.events('hangs', 'recovery_failed')}",
        deadline_s=300,
    )
    (ended,) = user.events("hangs", "hanging_ranks_ended")
    assert ended["ranks"] == [1]
    assert "its process stopped" in ended["reason"]
    (recovered,) = user.events("hangs", "recovered_in_memory")
    assert (recovered["ranks"], recovered["rolled_back"] <= 1) == ([1], True)
    user.wait_for_step("hangs", recovered["step"] + 3)
    assert user.rank(0).pid == survivor
    for kind in ("step_killed", "decision", "ras_answered"):
        assert user.events("hangs", kind) == []
    user.zslurm("cancel", "hangs")
    assert user.wait_for_end("hangs")["attempt"] == 1
