"""What ranks are compared by when all of them compute at the same moments."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests.bench.alone import alone
from zslurm.bench.run import local


def test_ranks_on_cpus_are_compared_by_the_processor_time_of_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the clock a call takes ten seconds, of which this rank has the processor for three."""
    now = {"clock": 0.0, "processor": 0.0}
    clocks = SimpleNamespace(perf_counter=lambda: now["clock"], process_time=lambda: now["processor"])
    monkeypatch.setattr(local, "time", clocks)

    def operation() -> None:
        now["clock"] += 10
        now["processor"] += 3

    found = local.time_at_once(operation, alone(), moments=4, moment_s=25)
    assert found.wall_s == [10] * 4
    assert found.own_s == [3] * 4
    assert now["clock"] == 10 * (2 + 4 * 3), "two calls to warm up, then three for each moment"
