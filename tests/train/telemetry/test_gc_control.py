"""Python's garbage collector under control: when it runs, and that it is given back."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from zslurm.train.telemetry.gc_control import GarbageControl


class Knot:
    """An object that only the collector can free."""

    def __init__(self) -> None:
        self.myself = self


@pytest.fixture(autouse=True)
def collector_as_it_was() -> Iterator[None]:
    gc.collect()
    yield
    gc.unfreeze()
    gc.enable()


def freed_at(every: int, steps: int) -> list[int]:
    """After which steps the garbage of the steps before is gone."""
    freed = []
    with GarbageControl(every) as garbage:
        knot = weakref.ref(Knot())
        for step in range(1, steps + 1):
            garbage.after_step(step)
            if knot() is None:
                freed.append(step)
                knot = weakref.ref(Knot())
    return freed


def test_it_collects_at_its_steps_and_at_no_other() -> None:
    """Thousands of objects in between would have made Python collect by itself."""
    assert freed_at(3, 10) == [3, 6, 9]
    with GarbageControl(1000):
        knot = weakref.ref(Knot())
        kept = [[] for _ in range(200_000)]
        assert knot() is not None
        assert len(kept) == 200_000


def test_what_was_there_before_is_frozen_and_given_back() -> None:
    old = weakref.ref(Knot())
    gc.disable()
    held = Knot()
    with GarbageControl(1) as garbage:
        assert gc.get_freeze_count() > 1000
        alive = weakref.ref(held)
        del held
        garbage.after_step(1)
        assert alive() is not None, "frozen: no collection looks at it"
    assert gc.get_freeze_count() == 0
    assert not gc.isenabled(), "as it was found"
    gc.collect()
    assert alive() is None
    assert old() is None


def test_it_is_enabled_again_also_after_an_error() -> None:
    with pytest.raises(OSError), GarbageControl(5):
        assert not gc.isenabled()
        raise OSError
    assert gc.isenabled()


def test_0_leaves_it_to_python() -> None:
    with GarbageControl(0) as garbage:
        assert gc.isenabled()
        assert gc.get_freeze_count() == 0
        knot = weakref.ref(Knot())
        garbage.after_step(1)
        assert knot() is not None
