"""Words of Slurm's stay in zslurm/slurm."""

from __future__ import annotations

import pytest

from docs.vocabulary import words_of_slurm


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ('job = environ.get("SLURM_JOB_ID")', ["SLURM_J"]),
        ('mark = b"SLURMD_NODENAME="', ["SLURMD_N"]),
        ('over = f"{text} DUE TO TIME LIMIT"', ["DUE TO TIME LIMIT"]),
        ('if state == "PREEMPTED": pass', ["PREEMPTED"]),
        ('mode = config.get("PreemptMode")', ["PreemptMode"]),
        ('run = environ["ZSLURM_RUN_DIR"]', []),
        ('def own_job():\n    """Read SLURM_JOB_ID."""', []),
        ('line = "Slurm ends it (PreemptMode=CANCEL)"', []),
    ],
)
def test_a_string_with_a_word_of_slurm_is_found_outside_of_docstrings(code: str, words: list[str]) -> None:
    assert [word for _, word in words_of_slurm(code)] == words
