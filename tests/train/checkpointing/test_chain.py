"""The chain of a run's checkpoints: it goes through all starts, and every gap is named."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.train.ranks import train_on
from tests.train.runs import make_corpus, make_run
from zslurm.checkpoint_tools import CheckpointError, Manifest, ShardReport
from zslurm.train.checkpointing import chain
from zslurm.train.checkpointing.chain import CHAIN, ChainEntry, chain_of
from zslurm.train.checkpointing.checkpointer import Checkpointer
from zslurm.train.checkpointing.writer import SaveRequest
from zslurm.train.loop import Trainer

CHECKPOINT = {"every_steps": 2, "keep_last": 2}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two ranks until step 4, then of one with another learning rate."""
    folder = tmp_path_factory.mktemp("chain")
    corpus = make_corpus(folder / "tokens.h5")
    run = make_run(folder / "run", corpus, steps=4, checkpoint=CHECKPOINT)
    assert train_on(run, 2).returncode == 0
    make_run(run, corpus, steps=8, checkpoint=CHECKPOINT, phase={"lr": 1e-3})
    assert train_on(run, 1).returncode == 0
    return run


@pytest.fixture
def root(trained: Path, tmp_path: Path) -> Path:
    shutil.copytree(trained, tmp_path / "run")
    return tmp_path / "run" / "checkpoints"


def rewrite(root: Path, lines: list[str]) -> None:
    (root.parent / "chain.jsonl").write_text("".join(line + "\n" for line in lines))


def lines_of(root: Path) -> list[str]:
    return (root.parent / "chain.jsonl").read_text().splitlines()


def gaps(entries: list[ChainEntry]) -> list[tuple[int, str]]:
    return [(entry.step, gap) for entry in entries for gap in entry.gaps]


def test_deleted_checkpoints_stay_in_the_chain_and_what_changed_is_named(root: Path) -> None:
    entries = chain_of(root)
    assert [(entry.step, entry.path is not None) for entry in entries] == [
        (2, False), (4, False), (6, True), (8, True),
    ]  # fmt: skip
    assert gaps(entries) == []
    assert [entry.changes for entry in entries] == [
        (), (), ("other settings", "other ranks (2, then 1)", "other ranks of a node (2, then 1)"), (),
    ]  # fmt: skip
    assert entries[0].link["weights"] != entries[1].link["weights"]


def test_a_link_that_is_missing_is_a_gap(root: Path) -> None:
    lines = lines_of(root)
    rewrite(root, [lines[0], *lines[2:]])
    entries = chain_of(root)
    assert entries[0].step == 6
    ((step, gap),) = gaps(entries)
    assert (step, gap.endswith("is not recorded")) == (6, True)


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_link_that_was_changed_is_a_gap(root: Path, number: int) -> None:
    lines = lines_of(root)
    lines[number] = json.dumps({**json.loads(lines[number]), "data": "0" * 32})
    rewrite(root, lines)
    assert gaps(chain_of(root))


def test_a_run_without_checkpoints_has_no_chain(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="there is no complete checkpoint"):
        chain_of(tmp_path / "empty")


def _save_without_links() -> None:
    """Save as versions did that knew no chain; a `prepare` of ranks."""
    make_manifest = Checkpointer._manifest

    def without(self: Checkpointer, request: SaveRequest, reports: list[ShardReport]) -> Manifest:
        manifest = make_manifest(self, request, reports)
        cursor = {name: value for name, value in manifest.cursor.items() if name != CHAIN}
        return dataclasses.replace(manifest, cursor=cursor)

    Checkpointer._manifest = without  # type: ignore[method-assign]
    Checkpointer.retain = lambda self, request: None  # type: ignore[method-assign]


def test_a_checkpoint_of_an_earlier_version_is_named(tmp_path: Path) -> None:
    corpus = make_corpus(tmp_path / "tokens.h5")
    run = make_run(tmp_path / "run", corpus, steps=2, checkpoint=CHECKPOINT)
    assert train_on(run, 1, _save_without_links).returncode == 0
    with pytest.raises(CheckpointError, match="step-00000002: it has no link; an earlier version saved it"):
        chain_of(run / "checkpoints")
    make_run(run, corpus, steps=4, checkpoint=CHECKPOINT)
    assert train_on(run, 1).returncode == 0
    assert gaps(chain_of(run / "checkpoints")) == [(4, "the checkpoint before it has no link")]


def _write_no_first_line() -> None:
    """Have the disk refuse the first line of the chain; a `prepare` of ranks."""
    append, calls = chain.append, list[int]()

    def refused(root: Path, link: Mapping[str, Any]) -> None:
        calls.append(len(calls))
        if not calls[-1]:
            raise OSError("Input/output error")
        append(root, link)

    chain.append = refused


def test_a_line_that_could_not_be_written_follows_with_the_next_save(tmp_path: Path) -> None:
    corpus = make_corpus(tmp_path / "tokens.h5")
    run = make_run(tmp_path / "run", corpus, steps=6, checkpoint=CHECKPOINT)
    done = train_on(run, 1, _write_no_first_line)
    assert "note: the chain of checkpoints lacks a line until the next save: Input/output error" in done.stdout
    entries = chain_of(run / "checkpoints")
    assert [entry.step for entry in entries] == [2, 4, 6]
    assert gaps(entries) == []


def test_the_line_of_a_checkpoint_is_added_later_if_a_crash_came_between(trained: Path, tmp_path: Path) -> None:
    run = tmp_path / "copy"
    shutil.copytree(trained, run)
    rewrite(run / "checkpoints", lines_of(run / "checkpoints")[:-1])
    assert gaps(chain_of(run / "checkpoints")) != []
    config = json.loads((run / "config.json").read_text())
    config["phases"][0]["tokens"] += 96
    (run / "config.json").write_text(json.dumps(config))
    assert train_on(run, 1).returncode == 0
    entries = chain_of(run / "checkpoints")
    assert [entry.step for entry in entries] == [2, 4, 6, 8, 9]
    assert gaps(entries) == []


def _save_twice() -> None:
    """Save each step a second time, as ranks do that go back in memory behind a save; a `prepare` of ranks."""
    save = Trainer._save

    def twice(self: Trainer, *, wait: bool) -> None:
        save(self, wait=True)
        save(self, wait=wait)

    Trainer._save = twice  # type: ignore[method-assign]


def test_a_step_that_is_saved_again_is_no_gap(tmp_path: Path) -> None:
    corpus = make_corpus(tmp_path / "tokens.h5")
    run = make_run(tmp_path / "run", corpus, steps=6, checkpoint=CHECKPOINT)
    assert train_on(run, 1, _save_twice).returncode == 0
    entries = chain_of(run / "checkpoints")
    assert [entry.step for entry in entries] == [2, 4, 6]
    assert gaps(entries) == []
