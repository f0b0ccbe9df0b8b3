"""What ranks print: rank 0 everything as it is, another its warnings with its rank in front."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from zslurm.train.telemetry import log


@pytest.fixture(autouse=True)
def loggers() -> Iterator[None]:
    roots = [logging.getLogger(name) for name in ("zslurm.train", "zslurm.kernels")]
    before = [(root.handlers, root.propagate, root.level) for root in roots]
    yield
    for root, (handlers, propagate, level) in zip(roots, before, strict=True):
        root.handlers, root.propagate = handlers, propagate
        root.setLevel(level)


@pytest.mark.parametrize(
    ("rank", "printed"),
    [(0, "step 5 of 50 %\nnote: a copy failed\n"), (3, "rank 3: note: a copy failed\n")],
)
def test_messages_are_printed_once_and_warnings_with_their_rank(
    rank: int, printed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    log.set_up(rank)
    log.set_up(rank)  # again, as in a second run of one process: still one handler
    logging.getLogger("zslurm.train.anything").info("step 5 of 50 %")
    logging.getLogger("zslurm.kernels.anything").warning("note: %s", "a copy failed")
    assert capsys.readouterr() == (printed, "")
