"""Memory: BabelStream's bytes, right results, and sizes that do not fit."""

from __future__ import annotations

import pytest
import torch

from tests.bench.alone import MACHINE, alone
from zslurm.bench import hbm
from zslurm.bench.measurement import Point

OPTIONS = {"patterns": ["copy", "dot"], "sizes": [1 << 20, 1 << 29], "dtype": "fp64"}


@pytest.mark.parametrize(("pattern", "arrays"), [("copy", 2), ("scale", 2), ("add", 3), ("triad", 3), ("dot", 2)])
@pytest.mark.parametrize("dtype", ["fp64", "fp32"])
def test_a_row_has_babelstreams_bytes_over_the_time(pattern: str, arrays: int, dtype: str) -> None:
    row = hbm.run(Point({"pattern": pattern, "bytes": 1 << 16, "dtype": dtype}, 0.1), alone())
    assert row is not None
    assert row["gb_s"] == pytest.approx(arrays * (1 << 16) / row["seconds"] / 1e9)
    assert (row["wrong"], row["bytes"], row["slowest"]) == (0, 1 << 16, "")
    assert row["ranks_gb_s"] == [row["gb_s"]] == [row["total_gb_s"]]


@pytest.mark.parametrize("pattern", hbm.ARRAYS)
def test_a_wrong_element_is_counted(pattern: str) -> None:
    found = hbm.Pattern(pattern, 1 << 12, torch.float64, torch.device("cpu"))
    found.call()
    assert found.wrong() == 0
    result = {"copy": found.c, "scale": found.b, "add": found.c, "triad": found.a, "dot": found.a}[pattern]
    result[7] = -result[7]
    assert found.wrong() == 1


def test_the_patterns_are_babelstreams() -> None:
    found = {name: hbm.Pattern(name, 64, torch.float64, torch.device("cpu")) for name in hbm.ARRAYS}
    for each in found.values():
        each.call()
    assert found["copy"].c[0] == 0.1
    assert found["scale"].b[0] == pytest.approx(0.4 * 0.3)
    assert found["add"].c[0] == pytest.approx(0.1 + 0.2)
    assert found["triad"].a[0] == pytest.approx(0.2 + 0.4 * 0.3)
    assert found["dot"].dots[0] == pytest.approx(8 * 0.1 * 0.2)


def test_sizes_that_do_not_fit_are_skipped_with_the_reason() -> None:
    plan = hbm.points(OPTIONS, MACHINE)
    assert [point.values["bytes"] for point in plan.points] == [1 << 20, 1 << 20]
    assert [skipped.point["pattern"] for skipped in plan.skipped] == ["copy", "dot"]
    assert plan.skipped[0].reason == "its arrays take 2.00 GiB for each rank, of 1.00 GiB that are free"


def test_a_dot_of_more_elements_than_blas_counts_is_made_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hbm, "_DOT_AT_ONCE", 100)
    found = hbm.Pattern("dot", 8 * 256, torch.float64, torch.device("cpu"))
    found.call()
    assert len(found.dots) == 3
    assert found.wrong() == 0
