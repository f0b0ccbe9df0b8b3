"""Each benchmark is found by its name, whatever folder it is in."""

from __future__ import annotations

import importlib.util

import pytest

from benchmarks.__main__ import main, modules
from benchmarks.common import RESULTS

OF_TESTS = {"faults", "fault_pairs", "slurm_versions"}
"""Results that `make faults` and `make soak-slurm` write."""


def test_each_result_is_of_a_benchmark() -> None:
    known = modules()
    results = {path.stem for path in RESULTS.glob("*.json") if not path.stem.startswith("gpu-")}  # of `... gpu`
    assert results - OF_TESTS <= known.keys()
    assert [name for name, module in known.items() if importlib.util.find_spec(module) is None] == []


def test_an_unknown_name_is_refused_with_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train_steps"]) == 2
    assert "no benchmark called train_steps; there are: aegis_scale, " in capsys.readouterr().err
