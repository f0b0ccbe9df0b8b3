"""A run whose directory is moved or removed while it trains ends, and nothing comes back at the old place."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.submit.local_runs import LOOK_EVERY_S, LocalUser
from tests.waiting import wait_for
from zslurm.checkpoint_tools import list_checkpoints
from zslurm.run.presence import Presence
from zslurm.run.run_dir import RunDir
from zslurm.train.jsonl import read_jsonl

QUICK = {"run_dir_lost_s": 0.5, "save_s": 60}


@pytest.fixture
def user(tmp_path: Path) -> Iterator[LocalUser]:
    person = LocalUser(tmp_path)
    yield person
    person.close()


def started(user: LocalUser, **checkpoint: object) -> RunDir:
    """A run that saves every few steps, so that saves meet the missing directory too."""
    settings = {"every_steps": 5, **checkpoint}
    run = user.write_run("lost", ranks=2, trainer="real", pace_s=0.05, checkpoint=settings, aegis=QUICK)
    user.zslurm("submit", run)
    user.wait_for_step("lost", 7)
    return user.run_dir("lost")


def test_a_run_whose_directory_is_moved_ends_without_a_save_and_says_so(user: LocalUser) -> None:
    run = started(user)
    moved = RunDir(run.path.rename(user.directory / "moved"))
    wait_for(lambda: not user.processes(), "every process to end", every_s=LOOK_EVERY_S)
    assert list(run.path.parent.iterdir()) == [], "nothing came back at the old place"
    (lost,) = [row for row in read_jsonl(moved.events) if row["event"] == "run_dir_lost"]
    assert lost["reason"] == f"the run directory {run.path} was moved to {moved.path}"
    (ended,) = [row for row in read_jsonl(moved.events) if row["event"] == "run_ended"]
    assert (ended["outcome"], ended["exit_code"]) == ("failed", 93)
    assert ended["cause"]["message"].endswith("; nothing was saved")
    assert not [row for row in read_jsonl(moved.events) if row["event"] in ("decision", "requeued")]
    wait_for(lambda: not user.state(str(moved.path))["active"], "the job to be over")
    assert user.state(str(moved.path))["state"] == "failed"


def test_a_run_whose_directory_is_removed_ends(user: LocalUser) -> None:
    run = started(user)
    aside = run.path.rename(user.directory / "aside")  # at one stroke, as ranks make files meanwhile
    shutil.rmtree(aside, ignore_errors=True)
    wait_for(lambda: not user.processes(), "every process to end", every_s=LOOK_EVERY_S)
    assert list(run.path.parent.iterdir()) == []


def test_where_a_place_is_set_the_ranks_save_there(user: LocalUser) -> None:
    rescue = user.directory / "rescued"
    run = started(user, rescue_dir=str(rescue))
    run.path.rename(user.directory / "moved")
    wait_for(lambda: not user.processes(), "every process to end", every_s=LOOK_EVERY_S)
    assert list(run.path.parent.iterdir()) == []
    found = list_checkpoints(rescue / "lost" / "checkpoints")
    assert found and found[0].complete
    assert found[0].step > 7


def test_a_directory_counts_as_lost_only_when_it_stays_away(tmp_path: Path) -> None:
    now = [0.0]
    place = tmp_path / "runs" / "a"
    place.mkdir(parents=True)
    presence = Presence(place, 10.0, lambda: now[0])
    assert presence.lost() is None
    aside = place.rename(tmp_path / "runs" / "b")
    for seconds in (5.0, 14.0):
        now[0] = seconds
        assert presence.lost() is None
    aside.rename(place)
    for seconds in (16.0, 30.0):
        now[0] = seconds
        assert presence.lost() is None
    place.rename(aside)
    place.mkdir()  # somebody else's
    now[0] = 40.0
    assert presence.lost() is None
    now[0] = 51.0
    assert presence.lost() == f"another directory is at {place} now"


def test_what_ends_while_the_directory_is_missing_waits_for_the_word_on_it(tmp_path: Path) -> None:
    now = [0.0]

    def pause(seconds: float) -> None:
        now[0] += seconds

    place = tmp_path / "runs" / "a"
    place.mkdir(parents=True)
    presence = Presence(place, 10.0, lambda: now[0])
    assert presence.settled(pause) is None
    assert now[0] == 0.0, "a directory that is there costs no time"
    moved = place.rename(tmp_path / "runs" / "b")
    assert presence.settled(pause) == f"the run directory {place} was moved to {moved}"
    assert now[0] >= 10.0


def test_a_file_system_that_is_away_is_not_a_lost_directory(tmp_path: Path) -> None:
    now = [0.0]
    place = tmp_path / "mount" / "runs" / "a"
    place.mkdir(parents=True)
    presence = Presence(place, 10.0, lambda: now[0])
    assert presence.lost() is None
    (kept_open,) = [fd for fd in Path("/proc/self/fd").iterdir() if os.path.realpath(fd) == str(place)]
    (tmp_path / "mount").rename(tmp_path / "away")
    os.close(int(kept_open.name))  # as a stale handle, it answers with an error
    for seconds in (5.0, 50.0, 500.0):
        now[0] = seconds
        assert presence.lost() is None
