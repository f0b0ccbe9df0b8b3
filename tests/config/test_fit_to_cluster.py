"""What is `auto` and depends on the network is settled when a run is resolved: the trainer does not know it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.config.run_files import PHASES, resolve_text
from zslurm.config.layers import show_path

RAILS_ONLY = "cluster:\n  gpus_per_node: 8\n  rails_only: true\n"
JOINED = "cluster:\n  gpus_per_node: 8\n"
KEY = "parallel.collectives"


def settled(tmp_path: Path, profile: str, text: str) -> tuple[str, str]:
    """The value of parallel.collectives, and its origin."""
    resolved = resolve_text(tmp_path, text + PHASES, profile=profile)
    origin = next(str(origin) for path, _, origin in resolved.rows() if show_path(path) == KEY)
    return resolved.spec.parallel.collectives, origin.replace(f"{tmp_path}/", "")


@pytest.mark.parametrize(
    ("profile", "text", "expected"),
    [
        (RAILS_ONLY, "slurm: {nodes: 2}\n", ("two_level", "cluster profile lab.yaml:3")),
        (
            RAILS_ONLY,
            "slurm: {nodes: 2}\nparallel: {collectives: auto}\n",
            ("two_level", "cluster profile lab.yaml:3"),
        ),
        (RAILS_ONLY, "slurm: {nodes: 2}\nparallel: {collectives: flat}\n", ("flat", "run file run.yaml:2")),
        (RAILS_ONLY, "slurm: {nodes: 1}\n", ("auto", "default")),
        (RAILS_ONLY, "slurm: {nodes: 2, ranks_per_node: 1}\n", ("auto", "default")),
        (JOINED, "slurm: {nodes: 2}\n", ("flat", "default")),
        (f"{JOINED}  rails_only: false\n", "slurm: {nodes: 2}\n", ("flat", "cluster profile lab.yaml:3")),
        (JOINED, "", ("auto", "default")),
        (
            JOINED,
            "slurm: {nodes: 2}\nparallel: {collectives: two_level}\n",
            ("two_level", "run file run.yaml:2"),
        ),
    ],
)
def test_several_nodes_without_paths_between_rails_reduce_in_two_levels(
    tmp_path: Path, profile: str, text: str, expected: tuple[str, str]
) -> None:
    assert settled(tmp_path, profile, text) == expected
