from __future__ import annotations

from pathlib import Path

import pytest

from tests.train.runs import make_corpus, make_run
from zslurm.checkpoint_tools import CheckpointError
from zslurm.train import main as program
from zslurm.train.errors import TrainError
from zslurm.train.progress import ProgressWriter, record_path


class Replaced(BaseException):
    """In place of the end of a process whose place another one has taken."""


class Fenced:
    """The recovery of a process that may have been replaced."""

    def __init__(self, replaced: bool, error: Exception | None = None) -> None:
        self.replaced, self.error = replaced, error or AssertionError()

    def train(self, *_: object) -> None:
        raise self.error

    def fence(self) -> None:
        if self.replaced:
            raise Replaced


@pytest.mark.parametrize(
    ("replaced", "error", "ends_by"),
    [(False, CheckpointError("full"), TrainError), (True, CheckpointError("full"), Replaced),
     (False, ValueError("no rank"), ValueError), (True, ValueError("no rank"), Replaced)],
)  # fmt: skip
def test_a_rank_that_wakes_up_to_an_error_leaves_before_it_records_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replaced: bool, error: Exception, ends_by: type[BaseException]
) -> None:
    """Its record would be that of the process in its place, which trains."""

    run = make_run(tmp_path / "run", make_corpus(tmp_path / "corpus.h5"), steps=2)
    monkeypatch.setattr(program, "open_recovery", lambda *_: Fenced(replaced, error))
    monkeypatch.setattr(program, "dump_stacks_on_signal", lambda: None)  # it would stay so in this process
    with pytest.raises(ends_by):
        program.train(run)


def test_a_replaced_rank_leaves_the_record_of_its_progress_alone(tmp_path: Path) -> None:
    """The process in its place may be on the same node, where the record is the same file."""
    fenced = Fenced(replaced=False)
    progress = ProgressWriter(3, 1, directory=str(tmp_path), fence=fenced.fence)
    progress.update(step=7)
    before, fenced.replaced = record_path(tmp_path, 3).read_bytes(), True
    with pytest.raises(Replaced):
        progress.update(step=8)
    assert record_path(tmp_path, 3).read_bytes() == before
