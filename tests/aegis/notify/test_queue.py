"""Errands next to the supervisor: handed over at once, done in order, and their failures told once."""

from __future__ import annotations

import threading
from collections.abc import Callable

from tests.waiting import DEADLINE_S, wait_for
from zslurm.aegis.notify.queue import DeliveryQueue


class Desk:
    """Takes what a queue delivers, when the door is open."""

    def __init__(self) -> None:
        self.got: list[int] = []
        self.said: list[str] = []
        self.door = threading.Event()
        self.entered = threading.Event()
        self.given_up = False

    def deliver(self, item: int) -> None:
        self.entered.set()
        assert self.door.wait(DEADLINE_S)
        if item < 0:
            raise ValueError(f"no place for {item}")
        self.got.append(item)

    def give_up(self) -> None:
        self.given_up = True
        self.door.set()

    def queue(self, limit: int = 10, failed: Callable[[str], None] | None = None) -> DeliveryQueue[int]:
        return DeliveryQueue("desk", self.deliver, failed or self.said.append, limit=limit, give_up=self.give_up)


def test_everything_is_delivered_in_order_and_closing_waits_for_it() -> None:
    desk = Desk()
    queue = desk.queue()
    for item in range(5):
        queue.take(item)
    assert desk.got == [], "handing over does not wait"
    desk.door.set()
    assert queue.close(DEADLINE_S) == 0
    assert (desk.got, desk.said) == ([0, 1, 2, 3, 4], [])


def test_where_too_much_waits_the_oldest_is_lost() -> None:
    desk = Desk()
    queue = desk.queue(limit=2)
    queue.take(0)
    assert desk.entered.wait(DEADLINE_S)
    for item in (1, 2, 3, 4):
        queue.take(item)
    desk.door.set()
    assert queue.close(DEADLINE_S) == 2
    assert (desk.got, desk.said) == ([0, 3, 4], ["desk: 2 not delivered"])


def test_closing_does_not_wait_for_ever() -> None:
    desk = Desk()
    queue = desk.queue()
    queue.take(0)
    assert desk.entered.wait(DEADLINE_S)
    queue.take(1)
    assert queue.close(0.0) == 2, "the one under way, and the one that waits"
    assert desk.given_up
    queue.take(2)
    assert 1 not in desk.got
    assert 2 not in desk.got


def test_a_failure_is_told_once_until_it_works_again() -> None:
    desk = Desk()
    desk.door.set()
    queue = desk.queue()
    for item in (-1, -2, 3, -4, -5):
        queue.take(item)
    assert queue.close(DEADLINE_S) == 0
    assert desk.said == ["desk: no place for -1", "desk: no place for -4"]


def test_a_complaint_that_cannot_be_written_ends_nothing() -> None:
    def full(_: str) -> None:
        raise OSError("no space left on device")

    desk = Desk()
    desk.door.set()
    queue = desk.queue(failed=full)
    for item in (-1, 2):
        queue.take(item)
    wait_for(lambda: desk.got == [2], "the next one")
    assert queue.close(DEADLINE_S) == 0


def test_nothing_is_started_before_there_is_something_to_do() -> None:
    before = threading.active_count()
    assert Desk().queue().close(DEADLINE_S) == 0
    assert threading.active_count() == before
