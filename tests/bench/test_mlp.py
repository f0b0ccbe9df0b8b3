"""Stacked MLPs: their FLOPs, and their memory."""

from __future__ import annotations

import pytest

from tests.bench.alone import MACHINE, alone
from zslurm.bench import mlp

SMALL = {"layers": 2, "hidden": 16, "inner": 32, "tokens": 8, "dtype": "fp32"}
ALL = {**dict.fromkeys(SMALL), "moments": None}


def test_defaults_are_the_devices_and_options_win() -> None:
    (point,) = mlp.points({**ALL, "tokens": 7}, MACHINE).points
    assert point.values["tokens"] == 7
    assert point.values["dtype"] == "fp32"
    assert point.values["moments"] == 40


def test_a_stack_that_does_not_fit_is_skipped_with_the_reason() -> None:
    plan = mlp.points({**ALL, "hidden": 1 << 16}, MACHINE)
    assert not plan.points
    assert plan.skipped[0].reason.endswith("for each rank, of 1.00 GiB that are free")


def test_a_row_has_the_flops_of_forward_and_backward_over_the_time() -> None:
    (point,) = mlp.points({**ALL, **SMALL, "moments": 3, "moment_s": 0.001}, MACHINE).points
    (row,) = mlp.run(point, alone())
    products = 2 * 2  # layers, and matrices of each
    assert row["tflops"] == pytest.approx(3 * 2 * 8 * 16 * 32 * products / row["seconds"] / 1e12)
    assert (row["where"], row["wrong"], len(row["moments_s"])) == ("n0 rank 0", 0, 3)
