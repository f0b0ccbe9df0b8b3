"""Comparing results: what changed, what is noise, and what cannot be compared."""

from __future__ import annotations

from typing import Any

import pytest

from tests.bench.synthetic import collective, result
from zslurm.bench.result import BenchResult
from zslurm.bench.results.compare import compare
from zslurm.bench.results.published import lines_for, published
from zslurm.core.errors import ConfigError


def collectives(scale: float = 1.0, spread: float = 0.01, samples: int = 20, **changes: Any) -> BenchResult:
    rows = collective(2, 1e-4, 3e11)
    rows = [row | {"busbw_gb_s": row["busbw_gb_s"] * scale, "spread": spread, "samples": samples} for row in rows]
    return result("collectives", rows, **changes)


@pytest.mark.parametrize(
    ("scale", "spread", "samples", "outcome"),
    [
        (1.02, 0.01, 20, "same"),
        (1.10, 0.01, 20, "better"),
        (0.90, 0.01, 20, "worse"),
        (0.90, 0.30, 20, "same"),
        (0.90, 0.30, 2000, "worse"),
        (0.90, 0.00, 1, "unclear"),
        (0.30, 0.00, 1, "worse"),
    ],
)
def test_a_change_counts_where_it_is_larger_than_the_rows_scatter(
    scale: float, spread: float, samples: int, outcome: str
) -> None:
    found = compare(collectives(spread=spread, samples=samples), collectives(scale, spread, samples))
    assert {change.outcome for change in found.changes} == {outcome}
    assert found.warnings == []
    assert f"25 rows: 25 {outcome}" in found.summary


def test_unlike_machines_versions_and_partial_results_are_warned_of() -> None:
    other = collectives(
        machine={"gpu": "NVIDIA H200", "cluster": "theirs", "nodes": ["a"], "ranks_per_node": 4},
        versions={"torch": "2.11.0", "rocm": "7.2"},
        environment={"NCCL_ALGO": "Ring"},
        complete=False,
    )
    assert compare(collectives(), other).warnings == [
        "different machines: AMD Instinct MI300X and NVIDIA H200; a change may be theirs",
        "different clusters: ours and theirs; a change may be theirs",
        "different numbers of nodes: 4 and 1; a change may be theirs",
        "different numbers of ranks on each node: 8 and 4; a change may be theirs",
        "versions: rocm none -> 7.2, torch 2.10.0 -> 2.11.0",
        "environment: NCCL_ALGO none -> Ring",
        "the second result is partial: 25 rows",
    ]


def test_rows_of_one_result_alone_are_counted() -> None:
    first, second = collectives(), collectives()
    second.rows = second.rows[3:20]
    found = compare(first, second)
    assert (len(found.changes), found.only_first, found.only_second) == (17, 8, 0)


def test_results_of_different_benchmarks_or_without_a_common_row_are_refused() -> None:
    with pytest.raises(ConfigError, match="collectives and one of hbm cannot be compared"):
        compare(collectives(), result("hbm", []))
    with pytest.raises(ConfigError, match="no row in common"):
        compare(collectives(), result("collectives", []))
    with pytest.raises(ConfigError, match="knows no such benchmark"):
        compare(result("dance", []), result("dance", []))


def test_figures_of_others_have_their_source_and_stand_beside_rows_of_their_kind() -> None:
    assert all(figure.source and figure.what for figure in published())
    reduced = result("collectives", collective(1, 2e-5, 3e11, operation="all_reduce"))
    (line,) = lines_for(reduced)
    assert line == (
        "others' figure: all_reduce of 4 GiB among the 8 MI300X of a node: 312.9 GB/s of bus bandwidth "
        "(stas00/ml-engineering)"
    )
    assert lines_for(collectives()) == [], "a reduce_scatter is no all_reduce"
    assert lines_for(result("hbm", [{}], machine={"device": "cpu", "gpu": None})) == []
