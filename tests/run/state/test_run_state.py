"""What a run's own files say of its state."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.submit.specs import run_spec
from zslurm.config.spec import RunSpec
from zslurm.run.state.run_state import total_steps

RAMP = {"batch_ramp": [{"until_tokens": 100, "global_batch": 2}, {"until_tokens": 500, "global_batch": 4}]}


@pytest.mark.parametrize("change", [{}, {"tokens": 961}, RAMP], ids=["plain", "a step more", "a batch ramp"])
def test_the_steps_of_a_run_are_counted_as_the_trainer_does(tmp_path: Path, change: dict[str, object]) -> None:
    config = run_spec(tmp_path).model_dump(mode="json")
    config["phases"] = [config["phases"][0] | change, config["phases"][0]]
    assert total_steps(config) == RunSpec.model_validate(config).total_steps


def test_a_configuration_that_cannot_be_counted_has_no_steps() -> None:
    """It is of another version, or damaged; the rest of the run's state is shown all the same."""
    assert total_steps({}) is None
    assert total_steps({"phases": [{"tokens": "many"}]}) is None
