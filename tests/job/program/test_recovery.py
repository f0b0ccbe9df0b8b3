"""What a rank does about a lost program: ask for a generation, start it again in that, and know when to stop."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.waiting import wait_for
from zslurm.job.program import recovery as module
from zslurm.job.program.recovery import ProgramRecovery
from zslurm.job.program.stop_channel import StopServer, join, report_lost
from zslurm.progress import GENERATION_VARIABLE, RECOVERY_VARIABLE


class Rank:
    """A rank whose program can be lost; rank 0 answers with the next number and a port of its own."""

    def __init__(self, directory: Path, *, answers: bool = True, size: int = 2) -> None:
        self.answers, self.asked = answers, 0
        self.files = directory / "shown-00001"
        self.recovery = ProgramRecovery({"host": "node0", "port": 25_000}, self.files, size, self.report)
        self.recovery.start()

    def report(self, _address: Mapping[str, Any]) -> bool:
        self.asked += 1
        if self.answers:
            threading.Thread(target=self.recovery.take, args=(self.asked, 25_000 + self.asked)).start()
        return self.answers

    def joins(self, number: int) -> None:
        self.files.with_name("shown-00001.joined").write_text(str(number))


def test_a_program_that_recovers_is_started_again_in_the_next_generation(tmp_path: Path) -> None:
    rank = Rank(tmp_path)
    rank.joins(0)
    assert rank.recovery.again(7)
    assert rank.recovery.start() == {
        "MASTER_PORT": "25001",
        GENERATION_VARIABLE: "1",
        RECOVERY_VARIABLE: str(rank.files),
    }
    shared = json.loads((tmp_path / "shown-00001.generation").read_text())
    assert shared == {"generation": 1, "host": "node0", "port": 25_001}
    rank.recovery.close()
    assert list(tmp_path.iterdir()) == []


def test_what_was_lost_before_it_joined_a_generation_is_started_in_that_one(
    tmp_path: Path,
) -> None:
    rank = Rank(tmp_path)
    rank.joins(0)
    rank.recovery.take(1, 25_001)
    assert rank.recovery.again(7)
    assert rank.asked == 0
    assert rank.recovery.start()[GENERATION_VARIABLE] == "1"


def test_other_programs_and_a_single_rank_are_left_to_the_supervisor(tmp_path: Path) -> None:
    assert not Rank(tmp_path).recovery.again(7)
    single = Rank(tmp_path, size=1)
    single.joins(0)
    assert not single.recovery.again(7)


def test_without_an_answer_of_rank_0_the_rank_ends(tmp_path: Path) -> None:
    rank = Rank(tmp_path, answers=False)
    rank.joins(0)
    assert not rank.recovery.again(7)


def test_a_program_that_is_lost_again_and_again_without_a_step_is_left_to_the_supervisor(tmp_path: Path) -> None:
    rank = Rank(tmp_path)
    again = []
    for number, step in enumerate((7, 8, 8, 8, 8)):
        rank.joins(number)
        again.append(rank.recovery.again(step))
        rank.recovery.start()
    assert again == [True, True, True, True, False]


def test_a_program_that_does_not_join_in_time_is_overdue_but_not_one_that_was_started_since(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = Rank(tmp_path)
    rank.joins(0)
    assert not rank.recovery.is_overdue()
    assert not rank.recovery.is_new()
    rank.recovery.take(1, 25_001)
    assert [rank.recovery.is_new(), rank.recovery.is_new()] == [True, False]
    assert not rank.recovery.is_overdue()
    monkeypatch.setattr(module, "_JOINS_S", 0.0)
    assert rank.recovery.is_overdue()
    rank.recovery.start()
    assert not rank.recovery.is_overdue()


def test_every_rank_learns_of_a_generation_and_only_who_knows_the_secret_can_ask_for_one() -> None:
    ports = itertools.count(4242)
    address = {"host": "127.0.0.1", "stop_port": StopServer(2, "5ec2e7", lambda: next(ports)).port}
    known: list[list[tuple[int, int]]] = [[], []]
    for generations in known:
        join(address, lambda: None, lambda *one, kept=generations: kept.append(one))  # type: ignore[misc]
    assert not report_lost({**address, "secret": "wrong"})
    wait_for(lambda: report_lost({**address, "secret": "5ec2e7"}) and all(known), "both to learn of it")
    assert all(port - number == 4241 for generations in known for number, port in generations)
