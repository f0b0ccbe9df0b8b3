"""`zslurm bench collectives`: its plan and formulas, and whole runs with two ranks of this machine."""

from __future__ import annotations

import json
import math
import random
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import forked
from tests.bench.test_result import MACHINE
from zslurm.bench import collectives
from zslurm.bench.collectives import bus_factor, points
from zslurm.bench.measurement import BENCHMARKS, CannotMeasure
from zslurm.bench.results.findings import compare_members, member_rates, of_collectives
from zslurm.bench.run.timing import is_stable, summarize, time_together
from zslurm.cli.bench.measurements import OPERATIONS
from zslurm.cli.bench.run import sizes_between
from zslurm.cli.bench.tables import cell_of, environments, fit_columns, side_by_side
from zslurm.core.errors import ConfigError, Exit

ALL = {
    "operations": list(OPERATIONS), "scopes": ["node", "all", "rail", "gpu_pair", "node_pair"],
    "levels": ["flat", "two_level"], "sizes": [1024, 1 << 20],
}  # fmt: skip


def test_bus_bandwidth_is_that_of_rccl_tests() -> None:
    """Its doc/PERFORMANCE.md, for eight ranks."""
    factors = {name: bus_factor(name, 8) for name in OPERATIONS}
    assert factors == {
        "all_reduce": 14 / 8, "reduce_scatter": 7 / 8, "all_gather": 7 / 8, "all_to_all": 7 / 8,
        "broadcast": 1.0, "send_recv": 1.0,
    }  # fmt: skip
    assert collectives.OPERATIONS == OPERATIONS


def planned(**machine: Any) -> set[tuple[Any, ...]]:
    plan = points(ALL, MACHINE.model_copy(update=machine))
    names = ("operation", "scope", "nodes", "ranks", "levels")
    return {tuple(point.values[name] for name in names) for point in plan.points}


def test_the_plan_has_parts_of_a_node_more_and_more_nodes_rails_and_both_levels() -> None:
    found = planned(nodes=[f"n{index}" for index in range(6)], ranks_per_node=8)
    reduced = {point[1:] for point in found if point[0] == "all_reduce"}
    assert {("node", 1, ranks, "flat") for ranks in range(2, 9)} <= reduced
    counts = {2, 4, 6}
    assert {("all", nodes, 8 * nodes, levels) for nodes in counts for levels in ("flat", "two_level")} <= reduced
    assert ("rail", 6, 6, "flat") in reduced
    assert len(reduced) == 7 + 2 * len(counts) + 1
    assert not any(
        point[4] == "two_level" for point in found if point[0] in ("broadcast", "send_recv", "all_to_all")
    )
    assert {point[1] for point in found} == set(ALL["scopes"])


def test_one_node_has_no_rails_and_one_rank_on_each_node_no_levels() -> None:
    assert {point[1] for point in planned(nodes=["n0"], ranks_per_node=2)} == {"node"}
    assert {point[4] for point in planned(ranks_per_node=1)} == {"flat"}
    with pytest.raises(CannotMeasure, match="needs two ranks at least, and this is one rank"):
        points(ALL, MACHINE.model_copy(update={"nodes": ["n0"], "ranks_per_node": 1}))


def test_sizes_that_do_not_fit_into_memory_are_skipped_with_the_reason() -> None:
    plan = points(ALL | {"sizes": [1024, 1 << 30]}, MACHINE)
    assert {point.values["bytes"] for point in plan.points if point.values["scope"] == "node"} == {1024}
    assert {skipped.point["bytes"] for skipped in plan.skipped} == {1 << 30}
    assert any(skipped.reason.startswith("its buffers are 2.00 GiB for each rank") for skipped in plan.skipped)


def test_the_spread_is_robust_and_decides_when_the_median_is_known() -> None:
    timing = summarize([1.0] * 9 + [50.0])
    assert (timing.seconds, timing.spread, timing.samples) == (1.0, 0.0, 10)
    assert not is_stable([1.0] * 4)
    assert is_stable([1.0] * 5)
    assert not is_stable([1.0, 1.3, 0.8, 1.2, 0.9, 1.1])


def pairs_of(members: int, slow: dict[int, float], noise: float, seed: int) -> dict[tuple[str, str], list[float]]:
    """Rates of all pairs at 41 moments: each is that of its slower member, and noise."""
    draw = random.Random(seed)
    return {
        (f"n0 GPU {a}", f"n0 GPU {b}"): [
            10 * min(slow.get(a, 1.0), slow.get(b, 1.0)) * math.exp(draw.gauss(0, noise)) for _ in range(41)
        ]
        for a in range(members)
        for b in range(a + 1, members)
    }


@pytest.mark.parametrize("members", [3, 4, 8])
def test_a_slow_member_is_named_alone_and_equal_ones_are_not(members: int) -> None:
    for seed in range(10):
        found = compare_members(pairs_of(members, {1: 0.8}, 0.05, seed))
        assert [each.name for each in found.slow] == ["n0 GPU 1"], seed
        assert found.slow[0].share == pytest.approx(0.8, abs=0.05)
        assert compare_members(pairs_of(members, {}, 0.05, seed)).slow == (), seed


def test_members_whose_pairs_are_not_all_known_are_not_compared() -> None:
    samples = pairs_of(4, {}, 0.01, 1)
    del samples["n0 GPU 0", "n0 GPU 1"]
    assert member_rates(samples) == {}


def test_findings_name_rank_and_node_to_exclude() -> None:
    machine = MACHINE.model_copy(update={"ranks_per_node": 4})
    rows = [
        {"scope": "gpu_pair", "pair": [4 * node + a, 4 * node + b], "wrong": 0, "figures": figures}
        for node, slow in ((0, {}), (1, {2: 0.7}))
        for (a, b), figures in (
            ((int(first[-1]), int(second[-1])), figures)
            for (first, second), figures in pairs_of(4, slow, 0.02, node).items()
        )
    ]
    found = of_collectives(rows, machine)
    assert (found.slow, found.nodes) == (("n1 rank 2",), ("n1",))
    assert found.lines == (
        "pairs of ranks: 1 of 8 ranks is slower than the others: n1 rank 2 (30 % slower)",
        "to leave the slow out: --exclude=n1",
    )


def test_a_rank_on_a_cpu_that_needs_more_processor_time_is_named_whatever_the_clock_shows() -> None:
    machine = MACHINE.model_copy(update={"ranks_per_node": 4, "nodes": ["n0"]})
    draw = random.Random(1)

    def own(rank: int, slow: int | None) -> list[float]:
        return [(1.25 if rank == slow else 1.0) * math.exp(draw.gauss(0, 0.05)) for _ in range(41)]

    def rows(slow: int | None) -> list[dict[str, Any]]:
        pairs = pairs_of(4, {}, 0.3, 1)  # by the clock only noise
        return [
            {
                "scope": "gpu_pair",
                "pair": [a, b],
                "wrong": 0,
                "figures": figures,
                "own_s": [own(a, slow), own(b, slow)],
            }
            for (a, b), figures in ((tuple(int(name[-1]) for name in pair), each) for pair, each in pairs.items())
        ]

    found = of_collectives(rows(2), machine)
    assert found.slow == ("n0 rank 2",)
    assert found.lines[-1].startswith(
        "processor time of ranks: 1 of 4 ranks is slower than the others: n0 rank 2 ("
    )
    assert of_collectives(rows(None), machine).slow == ()
    wrong = rows(None)
    wrong[0]["wrong"] = 1  # two ranks have one pair less
    assert of_collectives(wrong, machine).slow == ()


def rails_of(
    nodes: int, rails: int, slow: dict[tuple[int, int], float], noise: float = 0.02
) -> list[dict[str, Any]]:
    """Rows of all pairs of nodes along each rail; `slow` has shares of the rate by node and rail."""
    return [
        {"scope": "node_pair", "pair": [a * rails + rail, b * rails + rail], "wrong": 0, "figures": figures}
        for rail in range(rails)
        for (a, b), figures in (
            ((int(first[-1]), int(second[-1])), figures)
            for (first, second), figures in pairs_of(
                nodes, {node: share for (node, on), share in slow.items() if on == rail}, 0.02, rail
            ).items()
        )
    ]


def test_a_slow_rail_is_named_and_none_of_its_nodes_is_left_out() -> None:
    machine = MACHINE.model_copy(update={"nodes": ["n0", "n1", "n2", "n3"], "ranks_per_node": 3})
    found = of_collectives(rails_of(4, 3, {(node, 2): 0.7 for node in range(4)}), machine)
    assert (found.slow, found.nodes) == (("rail 2",), ())
    (line,) = found.lines
    assert line == "slow rail: rail 2 is 30 % slower between all nodes; look at its switches and cables"


def test_a_node_that_is_slow_on_a_slow_rail_or_on_one_rail_alone_is_named() -> None:
    machine = MACHINE.model_copy(update={"nodes": ["n0", "n1", "n2", "n3"], "ranks_per_node": 3})
    rail = {(node, 2): 0.7 for node in range(4)}
    both = of_collectives(rails_of(4, 3, {**rail, (1, 2): 0.5}), machine)
    assert (both.slow, both.nodes) == (("rail 2", "n1 rail 2"), ("n1",))
    assert re.search(r"slower than the others of their rail: n1 rail 2 \(2\d % slower\)", both.lines[1])
    alone = of_collectives(rails_of(4, 3, {(1, 2): 0.7}), machine)
    assert (alone.slow, alone.nodes) == (("n1 rail 2",), ("n1",))
    assert "to leave the slow out: --exclude=n1" in alone.lines


def test_two_values_are_measured_in_the_order_a_b_b_a() -> None:
    assert environments(None) == ({},)
    assert [each["X"] for each in environments("X=1,2")] == ["1", "2", "2", "1"]
    assert environments("X=a,b;c")[1] == {"X": "c"}
    assert environments("X=,1")[0] == {"X": ""}
    for wrong in ("X", "X=1", "X=1,2,3", "X=1,1", "1X=1,2", "=1,2"):
        with pytest.raises(ConfigError, match="expected NAME=A,B"):
            environments(wrong)


def run(directory: Path, *arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """The command; its ranks have torch behind them and measure shortly."""
    server = forked.server(torch=True)
    environ = {"PATH": "/usr/bin:/bin", "HOME": str(directory), **(env or {})}
    environ = forked.environment(server, [*forked.OTHERS, *forked.RANKS], environ)
    words = ["bench", "collectives", "--out", "r.json", *arguments]
    return server.run(words, env=environ, cwd=directory, timeout=600)


SMALL = ("--scope", "node", "--min", "4KiB", "--max", "4KiB")


def test_every_operation_gives_right_data_between_two_ranks(tmp_path: Path) -> None:
    done = run(tmp_path, *SMALL, "--max", "64KiB", "--quick", "--json")
    assert done.returncode == Exit.DONE, done.stderr
    result = json.loads(done.stdout)
    assert result == json.loads((tmp_path / "r.json").read_text())
    assert [(row["operation"], row["bytes"]) for row in result["rows"]] == [
        (name, size) for name in OPERATIONS for size in (4 << 10, 64 << 10)
    ]
    for row in result["rows"]:
        assert (row["data"], row["wrong"], row["ranks"]) == ("right", 0, 2)
        assert row["algbw_gb_s"] == pytest.approx(row["bytes"] / row["seconds"] / 1e9)
        assert row["busbw_gb_s"] == pytest.approx(row["algbw_gb_s"] * bus_factor(row["operation"], 2))
        assert set(BENCHMARKS["collectives"].keys) <= set(row)
    assert result["complete"]
    assert result["machine"]["ranks_per_node"] == 2


FAULTY = """
import os
import torch.distributed as dist
reduce = dist.all_reduce
def wrong(values, *arguments, **options):
    work = reduce(values, *arguments, **options)
    if values.numel() == 1024 and os.environ["RANK"] == "1":
        {fault}
    return work
dist.all_reduce = wrong
"""


def faulty(directory: Path, fault: str) -> dict[str, str]:
    """What makes ranks of another Python, which has a fault in its all-reduce, on rank 1."""
    site, python = directory / "site", directory / "python"
    site.mkdir()
    (site / "sitecustomize.py").write_text(FAULTY.format(fault=fault))
    python.write_text(f'#!/bin/sh\nPYTHONPATH={forked.HOOK}:{site} exec {sys.executable} -P "$@"\n')
    python.chmod(0o755)
    return {"ZSLURM_BENCH_PYTHON": str(python)}


def test_wrong_data_fails_the_row_and_names_the_rank(tmp_path: Path) -> None:
    done = run(tmp_path, *SMALL, "--operation", "all_reduce", env=faulty(tmp_path, "values[7] += 1"))
    assert done.returncode == Exit.CHECK_FAILED, done.stderr
    (row,) = json.loads((tmp_path / "r.json").read_text())["rows"]
    assert (row["wrong"], row["data"]) == (1, "wrong on rank 1")
    assert "wrong on rank 1" in done.stdout


def test_a_rank_that_dies_ends_the_benchmark_with_what_was_measured(tmp_path: Path) -> None:
    words = (
        "--operation",
        "all_reduce",
        "--operation",
        "broadcast",
        "--scope",
        "node",
        "--min",
        "2KiB",
        "--max",
        "4KiB",
    )
    done = run(tmp_path, *words, env=faulty(tmp_path, "os._exit(9)"))
    assert done.returncode == Exit.INTERRUPTED, done.stderr
    assert "not complete: rank " in done.stderr
    result = json.loads((tmp_path / "r.json").read_text())
    assert (result["complete"], [row["bytes"] for row in result["rows"]], result["lost_nodes"]) == (
        False,
        [2048],
        [],
    )
    assert "Traceback" not in done.stderr


def test_one_rank_leaves_nothing_to_measure_and_no_file(tmp_path: Path) -> None:
    done = run(tmp_path, "--ranks", "1")
    assert (done.returncode, done.stderr.splitlines()) == (
        Exit.USAGE,
        ["zslurm: a collective needs two ranks at least, and this is one rank; see --ranks and --nodes"],
    )
    assert list(tmp_path.glob("r.json*")) == []


def test_without_slurm_nodes_are_exit_code_4(tmp_path: Path) -> None:
    config = tmp_path / "config/zslurm/clusters"
    config.mkdir(parents=True)
    (config / "c.yaml").write_text("cluster: {launcher: slurm}\n")
    done = run(tmp_path, "--nodes", "2", env={"XDG_CONFIG_HOME": str(tmp_path / "config"), "PATH": "/nonexistent"})
    assert done.returncode == Exit.SLURM_UNAVAILABLE, done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_values_are_called_different_only_where_both_runs_agree(tmp_path: Path) -> None:
    from tests.bench.test_result import result

    found = result()
    base = {"operation": "all_reduce", "scope": "node", "where": "n0", "nodes": 1, "ranks": 2, "levels": "flat"}
    figures = {"X=1": {1: (10.0, 11.0), 2: (10.0, 20.0)}, "X=2": {1: (15.0, 14.0), 2: (15.0, 15.0)}}
    for name, of_size in figures.items():
        for size, values in of_size.items():
            found.rows += [{**base, "bytes": size, "environment": name, "busbw_gb_s": value} for value in values]
    assert [(row["bytes"], row["faster"]) for row in side_by_side(found)] == [(1, "X=2"), (2, "same")]


def test_quick_ends_at_64_mib_on_cpus_unless_a_largest_size_is_named() -> None:
    options = {"operations": ["all_reduce"], "scopes": ["node"], "levels": ["flat"], "sizes": [1 << 20, 1 << 28]}

    def sizes(quick: bool, device: str) -> list[int]:
        machine = MACHINE.model_copy(update={"device": device, "gpu_memory": 1 << 40, "ranks_per_node": 2})
        return [point.values["bytes"] for point in collectives.points({**options, "quick": quick}, machine).points]

    assert sizes(True, "cpu") == [1 << 20]
    assert sizes(False, "cpu") == sizes(True, "cuda") == [1 << 20, 1 << 28]


def test_an_operation_that_takes_long_on_a_cpu_is_not_repeated() -> None:
    calls = 0

    def slow() -> None:
        nonlocal calls
        calls += 1
        time.sleep(0.02)

    timing = time_together(slow, group=None, device=torch.device("cpu"), seconds=0.001)
    assert (calls, timing.samples) == (1, 1)


def test_the_largest_size_is_measured_whatever_the_steps_to_it() -> None:
    kib = 1 << 10
    assert sizes_between("1KiB", "1MiB", factor=16) == [kib, 16 * kib, 256 * kib, 1024 * kib]
    assert sizes_between("1KiB", "16KiB", factor=16) == [kib, 16 * kib]


def test_a_size_that_is_none_is_refused_by_the_name_of_its_option() -> None:
    with pytest.raises(ConfigError, match="--max: '1X' is not a size"):
        sizes_between("1KiB", "1X", factor=2)


def test_a_narrow_terminal_leaves_out_the_columns_that_are_needed_least() -> None:
    row = {"operation": "reduce_scatter", "bytes": 1 << 20, "algbw_gb_s": 1.5, "busbw_gb_s": 1.25, "spread": 0.02}
    assert fit_columns(list(row), [row], 80) == (list(row), [])
    shown, left_out = fit_columns(list(row), [row], 36)
    assert (shown, left_out) == (["operation", "bytes", "busbw_gb_s"], ["algbw_gb_s", "spread"])


def test_one_measurement_alone_shows_no_spread() -> None:
    assert cell_of({"spread": 0.0, "samples": 1}, "spread") == "-"
    assert cell_of({"spread": 0.02, "samples": 5}, "spread") == "2.0 %"
