"""What `make gpu` measured, as it is printed and as `make docs` writes it: on a synthetic result."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu.page import page_of
from benchmarks.gpu.profile import PARTS
from benchmarks.gpu.summary import AIMS
from docs.tables import measured

STEP = {"seconds": {"ours": 0.1, "transformers": 0.25}}
BODY: dict[str, Any] = {
    "card": "Simulated H100",
    "compute_units": 132,
    "driver": "580.1",
    "date": "2026-11-23",
    "parts": {
        "build": {"status": "failed", "rows": [{"problem": None}, {"problem": "no LDS"}]},
        "check": {"status": "done", "rows": [{"status": "ok"}, {"status": "ok"}, {"status": "not supported"}]},
        "tests": {"status": "done", "rows": [{"test": "x"}, {"passed": 7, "failed": 0, "skipped": 1}]},
        "train_step": {
            "status": "out of time",
            "rows": [
                {"seconds": {"ours": 0.2}},
                STEP,
                {"seconds": {**STEP["seconds"], "ours compiled": 0.08, "transformers compiled": 0.12}},
            ],
        },
        "profile": {
            "status": "done",
            "rows": [
                {"tokens_per_s": 54321.9},
                {
                    "parts": {
                        "experts": {"seconds": 0.03, "share": 0.6},
                        "host gaps": {"seconds": 0.02, "share": 0.4},
                    }
                },
            ],
        },
        "figures": {
            "status": "done",
            "rows": [
                {"what": "triad", "bytes_per_s": 3e12},
                {"what": "head forward, 4096 tokens", "ratio": 9.1234, "share_of_triad": None},
                {"what": "Muon's update, 67.11 M elements", "ratio": 1.31, "share_of_triad": 0.93},
                {"what": "norms", "problem": "RuntimeError: no compiler"},
            ],
        },
        "muon_step": {"status": "done", "rows": [{"peer": "torch.optim.Muon", "ratio": 5.5}]},
        "memory": {
            "status": "done",
            "rows": [
                {
                    "recipe": "zaya1-1b",
                    "micro_batch": 4,
                    "context": 4096,
                    "recompute": True,
                    "planned_bytes": 2**31,
                    "allocated_bytes": 2**31,
                    "ratio": 1.0,
                },
                {"recipe": "zaya1-8b", "recompute": False, "problem": "does not fit"},
            ],
        },
        "products": {
            "status": "done",
            "rows": [
                {
                    "operation": "grouped_gemm.multiply",
                    "case": "16 groups",
                    "sizes": {"dtype": "bfloat16"},
                    "seconds": {"reference": 0.002, "triton": 0.001},
                    "flops": 3.958e11,
                    "bytes": 1e8,
                },
                {"tables": {"grouped_gemm": {}}, "architecture": "sm_90"},
            ],
        },
        "crossovers": {
            "status": "no time",
            "rows": [
                {
                    "operation": "muon.update",
                    "case": f"8 x {size}",
                    "sizes": {"dtype": "bfloat16"},
                    "seconds": {"reference": 1e-3, "hip": 4e-4},
                    "flops": 0.0,
                    "bytes": moved,
                }
                for size, moved in ((4096, 9e8), (1024, 1e7))
            ],
        },
    },
}
FOUND = {
    ("head forward", "operands widened to fp32"): "9.12",
    ("Muon's update", "a triad"): "0.93",
    ("Muon's update", "`torch.compile`"): "1.31",
    ("Muon step of zaya1-8b's share at 64 ranks", "`torch.optim.Muon`"): "5.5",
    ("forward and backward of zaya1-1b", "transformers, eager"): "2.5",
    ("the same, both compiled", "transformers, compiled"): "1.5",
    ("the same, ours eager", "transformers, compiled"): "1.2",
    ("a whole training step of zaya1-1b on one card", "-"): "54,322 tokens/s",
    ("peak memory of a step", "`zslurm plan memory`"): "1.00 to 1.00",
}


@pytest.fixture
def results(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where the documents' tables read results in this test."""
    monkeypatch.setattr(measured, "RESULTS", tmp_path)
    return tmp_path


def cells(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in text.splitlines()]


def test_figures_are_found_in_a_result() -> None:
    assert {(each.what, each.peer): text for each in AIMS if (text := each.found(BODY))} == FOUND
    assert [each.what for each in AIMS if each.found({"parts": {}}) is not None] == []


def test_a_result_becomes_a_page() -> None:
    """It has the checks, each kernel with its limit and estimate, the step, the memory, and what is missing."""
    parts = {name: part for name, part in BODY["parts"].items() if name != "muon_step"}
    page = "\n".join(page_of(BODY | {"parts": parts})).splitlines()
    assert page[:3] == ["# Simulated H100", "", "2026-11-23, driver 580.1"]
    for line in (
        "| build | failed: 1 of 2 kernels |",
        "| tests | done: 7 passed, 0 failed, 1 skipped |",
        "| grouped_gemm.multiply | 16 groups | triton | 396 TFLOPS | 40% of the peak | 40 to 48 % forward |",
        "| muon.update | 8 x 4096 | hip | 2.25 TB/s | 75% of the triad | 75 to 88 % |",
        "| Muon's update | a triad | 0.9 | 0.93 |",
        "| experts | 30.00 | 60.0% | 27 % |",
        "| zaya1-1b | 4 x 4,096, recomputed | 2.00 GiB planned | 2.00 GiB allocated | 1.000 |",
        "| crossovers | no time |",
        "| muon_step | not run |",
    ):
        assert line in page, line
    assert "A rehearsal" in "\n".join(page_of(BODY | {"card": "rehearsal-on-cpu-x86_64"}))


def test_a_card_without_a_published_peak_has_no_share_of_it() -> None:
    page = "\n".join(page_of(BODY | {"card": "Some GPU"}))
    assert "| grouped_gemm.multiply | 16 groups | triton | 396 TFLOPS | - | 40 to 48 % forward |" in page


def test_without_results_the_tables_have_the_rows_and_no_figures(results: Path) -> None:
    assert measured.PARTS_OF_A_STEP == PARTS
    figures, parts = cells(measured.gpu_figures()), cells(measured.gpu_parts())
    assert len(figures) == 2 + len(AIMS)
    assert {row[-1] for row in (*figures[2:], *parts[2:])} == {"not yet measured"}
    for each in (measured.gpu_memory, measured.gpu_checks):
        assert cells(each())[2][0] == "not yet measured"


def test_results_fill_a_column_for_each_card(results: Path) -> None:
    (results / "gpu-simulated-h100.json").write_text(json.dumps(BODY))
    (results / "gpu-another.json").write_text(
        json.dumps({"card": "Another", "driver": None, "date": "d", "parts": {}})
    )
    (results / "gpu-rehearsal-on-cpu-x86-64.json").write_text("{}")
    head, _, *rows = cells(measured.gpu_figures())
    assert head[3:] == ["Another", "Simulated H100"]
    assert {(row[0], row[1]): row[4] for row in rows if row[4] != "-"} == FOUND
    assert {row[3] for row in rows} == {"-"}
    assert cells(measured.gpu_parts())[2:] == [["experts", "-", "60.0%"], ["host gaps", "-", "40.0%"]]
    assert cells(measured.gpu_memory())[2:] == [
        ["Simulated H100", "zaya1-1b", "4 x 4,096, recomputed", "2.00 GiB planned", "2.00 GiB allocated", "1.000"]
    ]
    assert cells(measured.gpu_checks())[3] == [
        *("Simulated H100", "2026-11-23", "580.1"),
        *("failed: 1 of 2 kernels", "done: 2 of 2 right", "done: 7 passed, 0 failed, 1 skipped"),
    ]
