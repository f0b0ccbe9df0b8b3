"""Training follows a recorded loss curve: an unintended change of the numbers is noticed.

What may differ between machines, and versions of torch, is the order of sums. In fp64 it does not show: every
loss is the recorded one to 1e-7. In fp32 it sets a run apart about as much as moving every weight by one unit in
its last place before the first step does; how far that is, is recorded with the curve.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.train.loop.recorded_curve import OPTIMIZERS, RECORDED, STEPS, distance, train
from tests.train.runs import MODEL

CURVES = json.loads(RECORDED.read_text())["curves"]
EXACT = 1e-7
"""Largest relative difference of any loss in fp64."""
SPREAD = 4.0
"""How much further than the furthest perturbed run an fp32 run may be: other machines multiply differently."""
FIRST = 1e-6
"""Largest relative difference of the first loss in fp32: before it are no updates, only sums of some 256 terms."""


def test_the_recording_is_of_this_model() -> None:
    assert json.loads(RECORDED.read_text())["model"] == MODEL
    assert set(CURVES) == set(OPTIMIZERS)
    for curves in CURVES.values():
        assert len(curves["fp64"]) == len(curves["fp32"]) == STEPS
        assert curves["fp64"][-1] < curves["fp64"][0] - 0.4, "it learns"


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_in_fp64_every_loss_is_the_recorded_one(tmp_path: Path, optimizer: str) -> None:
    assert train(tmp_path / "run", optimizer, "fp64") == pytest.approx(CURVES[optimizer]["fp64"], rel=EXACT)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_in_fp32_the_curve_stays_inside_the_spread_of_perturbed_runs(tmp_path: Path, optimizer: str) -> None:
    recorded = CURVES[optimizer]
    curve = train(tmp_path / "run", optimizer, "fp32")
    assert curve[0] == pytest.approx(recorded["fp32"][0], rel=FIRST)
    assert distance(curve, recorded["fp32"]) <= SPREAD * recorded["spread"]


def test_a_small_change_would_show(tmp_path: Path) -> None:
    """In fp64 a weight decay of 0.11 instead of 0.1, hardly felt in twenty steps; in fp32 a clip at 0.9."""
    exact = train(tmp_path / "fp64", "muon", "fp64", weight_decay=0.11)
    assert exact != pytest.approx(CURVES["muon"]["fp64"], rel=100 * EXACT)
    rough = train(tmp_path / "fp32", "adamw", "fp32", clip_norm=0.9)
    assert distance(rough, CURVES["adamw"]["fp32"]) > 2 * SPREAD * CURVES["adamw"]["spread"]
