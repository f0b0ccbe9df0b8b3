"""Plots: which are drawn of what, as SVG and PNG; without matplotlib a line."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.bench.synthetic import collective, result
from zslurm.bench.results.plots import NoPlots, draw
from zslurm.core.errors import ZslurmError

SWEEP = [
    {"product": "", "pass": "forward", "m": m, "n": n, "k": k, "dtype": "bf16", "tflops": m * n * k / 1e9}
    for m in (256, 512)
    for n in (256, 512, 1024)
    for k in (512, 1024)
]
HBM = [{"pattern": each, "bytes": 2**power, "gb_s": 4e3} for each in ("copy", "triad") for power in (20, 30)]
PEERS = [{"where": f"n{n} GPU {g}", "tflops": 700.0 - 200 * (n == g == 1)} for n in range(2) for g in range(8)]
PAIRS = [
    {
        "operation": "send_recv",
        "scope": "gpu_pair",
        "where": f"n0: {a} and {b}",
        "pair": [a, b],
        "busbw_gb_s": 50.0,
    }
    for a in range(4)
    for b in range(a)
]
REDUCED = [
    row | {"where": f"n{node}"} for node in range(4) for row in collective(1, 2e-5, 3e11, operation="all_reduce")
]


@pytest.mark.parametrize(
    ("benchmark", "rows", "names"),
    [
        ("collectives", REDUCED, {"collectives-all_reduce", "collectives-peers"}),
        ("collectives", PAIRS, {"collectives-gpu_pair"}),
        ("hbm", HBM, {"hbm"}),
        ("gemm", SWEEP, {"gemm"}),
        ("gemm", [*SWEEP, SWEEP[0] | {"product": "router.down"}], {"gemm", "gemm-products"}),
        ("mlp", PEERS, {"mlp-peers"}),
        ("storage", [], set()),
    ],
)
def test_what_is_drawn(tmp_path: Path, benchmark: str, rows: list[dict[str, Any]], names: set[str]) -> None:
    pytest.importorskip("matplotlib")
    written = draw(result(benchmark, rows), tmp_path / "new" / "plots")
    assert {path.name for path in written} == {f"{name}.{kind}" for name in names for kind in ("svg", "png")}
    for path in written:
        start = path.read_bytes()[:200]
        assert start.startswith(b"\x89PNG") if path.suffix == ".png" else b"<?xml" in start
    if "collectives-all_reduce" in names:
        text = (tmp_path / "new" / "plots" / "collectives-all_reduce.svg").read_text()
        assert "8 ranks of a node" in text and "bus bandwidth in GB/s" in text and "AMD Instinct MI300X" in text


def test_without_matplotlib_there_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(NoPlots, match=r"no plots: matplotlib is .*; pip install 'zslurm-train\[plots\]'"):
        draw(result("hbm", HBM), tmp_path)


def test_a_folder_that_cannot_be_made_gets_one_line(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "file").write_text("")
    with pytest.raises(ZslurmError, match="plots cannot be written: Not a directory"):
        draw(result("hbm", HBM), tmp_path / "file" / "plots")
