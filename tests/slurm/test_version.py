"""Slurm's version is read from what its commands print, in every form that releases and distributions use."""

from __future__ import annotations

import pytest

from zslurm.slurm.version import parse_version, shares_gpus


@pytest.mark.parametrize(
    ("text", "version", "shown"),
    [
        ("slurm 20.11.6\n", (20, 11, 6), "20.11.6"),  # github.com/leahkemp/ont_human_workflow, README
        ("slurm 19.05.7-Bull.1.0", (19, 5, 7), "19.05.7"),  # github.com/NordicHPC/slurm2sql, test.py
        ("slurm-wlm 22.05.8\n", (22, 5, 8), "22.05.8"),  # the test cluster
        ("slurm 25.11.4", (25, 11, 4), "25.11.4"),
        ("slurm 26.05.0-0rc1", (26, 5, 0), "26.05.0"),
        ("slurm 23.02", (23, 2, 0), "23.02.0"),
    ],
)
def test_versions(text: str, version: tuple[int, int, int], shown: str) -> None:
    found = parse_version(text)
    assert found == version
    assert str(found) == shown


@pytest.mark.parametrize("text", ["", "slurm unknown", "127.0.0.1"])
def test_no_version(text: str) -> None:
    assert parse_version(text) is None


def test_versions_are_compared_as_numbers() -> None:
    old, new = parse_version("slurm 21.08.10"), parse_version("slurm 22.05.0")
    assert old is not None
    assert new is not None
    assert not shares_gpus(old) and shares_gpus(new)
