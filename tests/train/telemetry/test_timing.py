"""The clock of a step: every moment in one part, none lost, none counted twice."""

from __future__ import annotations

import pytest
import torch

from zslurm.train.telemetry.timing import StepClock, StepPart

CPU = torch.device("cpu")


class Hand:
    """A clock that moves when a test moves it."""

    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds

    def wait(self, seconds: float) -> None:
        self.seconds += seconds


def test_parts_are_what_happened_between_the_calls_and_sum_to_the_step() -> None:
    hand = Hand()
    clock = StepClock(CPU, now=hand)
    hand.wait(1)
    for _ in range(2):
        clock.enter(StepPart.DATA)
        hand.wait(2)
        clock.enter(StepPart.FORWARD)
        hand.wait(4)
        clock.enter(StepPart.BACKWARD)
        hand.wait(8)
    clock.enter(StepPart.REDUCE)
    hand.wait(16)
    split = clock.end_step()
    assert split == {
        StepPart.DATA: 4, StepPart.FORWARD: 8, StepPart.BACKWARD: 16, StepPart.REDUCE: 16,
        StepPart.OPTIMIZER: 0, StepPart.GATHER: 0, StepPart.CHECKPOINT: 0, StepPart.OTHER: 1,
    }  # fmt: skip
    assert sum(split.values()) == hand.seconds - 100


def test_a_step_begins_where_the_last_one_ended() -> None:
    """A checkpoint between two steps is the next step's time, and so is all that is done there."""
    hand = Hand()
    clock = StepClock(CPU, now=hand)
    hand.wait(5)
    assert sum(clock.end_step().values()) == 5
    hand.wait(1)
    with clock.within(StepPart.CHECKPOINT):
        hand.wait(30)
    hand.wait(2)
    clock.enter(StepPart.DATA)
    hand.wait(3)
    split = clock.end_step()
    assert (split[StepPart.CHECKPOINT], split[StepPart.OTHER], split[StepPart.DATA]) == (30, 3, 3)


def test_what_belongs_to_no_step_is_put_aside() -> None:
    hand = Hand()
    clock = StepClock(CPU, now=hand)
    hand.wait(1)
    with clock.within(None):
        hand.wait(1000)
    hand.wait(2)
    assert sum(clock.end_step().values()) == 3


def test_a_part_ends_also_when_its_block_fails() -> None:
    hand = Hand()
    clock = StepClock(CPU, now=hand)
    with pytest.raises(OSError), clock.within(StepPart.CHECKPOINT):
        hand.wait(1)
        raise OSError
    hand.wait(2)
    split = clock.end_step()
    assert (split[StepPart.CHECKPOINT], split[StepPart.OTHER]) == (1, 2)


def test_on_a_queue_a_step_ends_where_the_host_last_waited(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was entered before the wait is this step's, and the rest the next one's; on a CPU nothing changes."""
    hand = Hand()
    clock, host = StepClock(CPU, now=hand), StepClock(CPU, now=hand)
    monkeypatch.setattr(clock._stamps, "queued", True)
    for step in range(2):
        for part, seconds in ((StepPart.FORWARD, 4), (StepPart.BACKWARD, 8), (StepPart.REDUCE, 16)):
            for each in (clock, host):
                each.enter(part)
            hand.wait(seconds)
        for each in (clock, host):
            each.enter(StepPart.REDUCE)
            each.settle()
        hand.wait(1)  # reads the loss
        for each in (clock, host):
            each.enter(StepPart.OPTIMIZER)
        hand.wait(32)
        split, at_once = clock.end_step(), host.end_step()
        assert (split[StepPart.FORWARD], split[StepPart.BACKWARD]) == (4, 8)
        assert split[StepPart.REDUCE] == (16 if step == 0 else 17)
        assert split[StepPart.OPTIMIZER] == (0 if step == 0 else 32)
        assert (at_once[StepPart.REDUCE], at_once[StepPart.OPTIMIZER]) == (17, 32)
    assert sum(clock.end_step().values()) == 33, "without a wait a step ends where it ends"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_work_is_counted_where_it_runs() -> None:
    """The host queues the products at once and continues; they are forward's all the same."""
    clock = StepClock(torch.device("cuda"))
    large = torch.ones(4096, 4096, device="cuda")
    for _ in range(3):
        clock.enter(StepPart.FORWARD)
        for _ in range(20):
            large = large @ large
        clock.enter(StepPart.OTHER)
        split = clock.end_step()
    assert split[StepPart.FORWARD] > 10 * split[StepPart.OTHER]
    assert split[StepPart.DATA] == 0
