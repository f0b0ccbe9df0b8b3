"""Steps that are computed again: over changes of the number of ranks, and if one of the ranks dies."""

from __future__ import annotations

import shutil
import signal
from functools import partial
from pathlib import Path

import pytest

from tests.train.ranks import asked_to_stop, train_on
from tests.train.runs import make_corpus, make_run
from zslurm.train.checkpointing.chain import chain_of
from zslurm.train.errors import TrainError
from zslurm.train.recompute import recompute


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two ranks until step 4, then of one; of its checkpoints, those of steps 4 and 6 are deleted."""
    folder = tmp_path_factory.mktemp("recompute")
    corpus = make_corpus(folder / "tokens.h5")
    run = make_run(folder / "run", corpus, steps=8, checkpoint={"every_steps": 2, "keep_last": 9})
    train_on(run, 2, partial(asked_to_stop, signal.SIGTERM, 4))
    assert train_on(run, 1).returncode == 0
    for step in (4, 6):
        shutil.rmtree(run / "checkpoints" / f"step-{step:08}")
    return run


def test_steps_are_computed_by_as_many_ranks_as_each_had(run: Path, tmp_path: Path) -> None:
    entries = chain_of(run / "checkpoints")
    assert [(entry.step, entry.link["ranks"]) for entry in entries] == [(2, 2), (4, 2), (6, 1), (8, 1)]
    links = [entry.link for entry in entries[1:]]
    weights, steps, differences = recompute(run, entries[0].path, links, 8, tmp_path)
    assert (weights, steps, differences) == (links[-1]["weights"], 6, [])


def test_a_rank_that_dies_ends_the_others(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    modules = tmp_path / "modules"
    modules.mkdir()
    (modules / "sitecustomize.py").write_text("import os\nif os.environ.get('RANK') == '1':\n    os._exit(3)\n")
    monkeypatch.setenv("PYTHONPATH", str(modules))
    entries = chain_of(run / "checkpoints")
    folder = tmp_path / "folder"
    folder.mkdir()
    with pytest.raises(TrainError, match="rank 1 could not compute the steps: exit code 3"):
        recompute(run, entries[0].path, [entries[1].link], 4, folder)
