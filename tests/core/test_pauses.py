"""The pauses of a process, by a clock that a test makes up."""

from __future__ import annotations

from zslurm.core.pauses import PauseReader, Pauses


def test_each_reader_reads_each_pause_once_whoever_has_noticed_it() -> None:
    clock = [0.0]
    pauses = Pauses(3.0, clock=lambda: clock[0])
    early = PauseReader(pauses)
    clock[0] = 2.0
    assert early.new_s() == 0.0
    clock[0] = 12.0
    assert pauses.tick() == 10.0
    late = PauseReader(pauses)
    assert (early.new_s(), early.new_s(), late.new_s()) == (10.0, 0.0, 0.0)
    clock[0] = 112.0
    assert (late.new_s(), early.new_s()) == (100.0, 100.0), "a reader notices it as well"
    assert (pauses.total_s, pauses.since(11.0)) == (110.0, 101.0)
