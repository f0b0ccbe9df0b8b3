"""The room of a node's page cache, and what it is compared with."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.doctor.nodes import Node
from zslurm.doctor.check import Status
from zslurm.doctor.stored import stored_sizes
from zslurm.hardware.node_sources import NodeTask, Stored

GIB = 1 << 30


@pytest.mark.parametrize(
    ("stored", "reason"),
    [
        (Stored(), "room for 1.00 TiB; no bundles (--path) and no checkpoints (--directory) to compare it with"),
        (Stored(800 * GIB), "room for 1.00 TiB; the bundles (800 GiB) fit: a second epoch reads memory"),
        (
            Stored(4096 * GIB, 96 * GIB, "big/step-00000400"),
            "room for 1.00 TiB; of the bundles (4.00 TiB) 75 % do not fit: they are read from storage; "
            "big/step-00000400 (96.0 GiB) fits",
        ),
    ],
)
def test_it_states_what_fits_and_what_that_means(node: Node, stored: Stored, reason: str) -> None:
    outcome = node.check("page-cache", task={"stored": stored})
    assert (outcome.status, outcome.reason) == (Status.PASS, reason)
    assert outcome.data == {"room": 1024 * GIB}


def test_sizes_are_those_of_bundles_and_of_the_newest_checkpoint(tmp_path: Path) -> None:
    data, runs = tmp_path / "data", tmp_path / "runs"
    for place in (
        data / "tokens-00000-of-00002.h5",
        data / "web" / "tokens-00000-of-00001.h5",
        data / "notes.txt",
    ):
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(bytes(100))
    for age, (run, step) in enumerate([("new", 1), ("old", 9)]):
        directory = runs / run / "checkpoints" / f"step-{step:08d}"
        directory.mkdir(parents=True)
        (directory / "manifest.json").write_bytes(bytes(7))
        (directory / "shard-00000-of-00001.safetensors").write_bytes(bytes(50))
        os.utime(directory / "manifest.json", (1000 - age, 1000 - age))
    (runs / "fresh" / "checkpoints").mkdir(parents=True)
    found = stored_sizes(runs, [data, data, tmp_path / "missing"])
    assert found == Stored(200, 57, "new/step-00000001")
    assert stored_sizes(tmp_path / "missing", []) == Stored()


def test_they_travel_to_the_nodes(node: Node) -> None:
    task = NodeTask(stored=Stored(1, 2, "run/step-00000003"))
    assert NodeTask.from_json(json.loads(json.dumps(task.to_json()))).stored == task.stored
    assert asdict(task.stored)["checkpoint_bytes"] == 2
