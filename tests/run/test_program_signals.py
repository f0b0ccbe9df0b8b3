"""What a program does not show is stated; of what it shows nothing is."""

from __future__ import annotations

import pytest

from zslurm.run.program_signals import not_shown

COMMAND = {"command": ["true"]}


@pytest.mark.parametrize(
    ("trainer", "step", "saved", "missing"),
    [
        (None, None, None, []),
        (COMMAND, None, None, ["a hang is not noticed", "trainer.checkpoints is not set"]),
        (COMMAND | {"progress": {"pattern": "x"}}, None, 3, ["no line matches", "trainer.checkpoints is not set"]),
        (COMMAND | {"progress": {"grows": "log"}}, None, 3, ["only the growth of log", "trainer.checkpoints"]),
        (COMMAND | {"checkpoints": "a*"}, 3, None, ["trainer.steps is not set", "nothing new matches"]),
        (COMMAND | {"checkpoints": "a*", "steps": 9}, 3, 2, []),
    ],
)
def test_each_signal_that_is_missing_has_a_clause(
    trainer: object, step: int | None, saved: int | None, missing: list[str]
) -> None:
    found = not_shown({"trainer": trainer}, step=step, checkpoint_step=saved)
    assert len(found) == len(missing)
    assert all(words in clause for words, clause in zip(missing, found, strict=True))
