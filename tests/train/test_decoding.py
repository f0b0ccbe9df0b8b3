"""What the process that starts ranks for decoding receives from them."""

from __future__ import annotations

from multiprocessing import Pipe, connection
from multiprocessing.connection import Connection
from typing import Any

import pytest

from zslurm.train import decoding


def test_tokens_follow_the_news_that_all_ranks_are_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first rank's first token may be read before the news of another rank, which was sent earlier."""
    pipes = [Pipe(duplex=False) for _ in range(2)]
    for (_, writer), messages in zip(pipes, ([-1, 7, 8, None], [-1, None]), strict=True):
        for message in messages:
            writer.send(message)
        writer.close()
    readers, waits, wait = [reader for reader, _ in pipes], [], connection.wait

    def first_rank_first(ready: list[Connection]) -> list[Any]:
        waits.append(1)
        return readers[:1] if len(waits) <= 2 else wait(ready)

    monkeypatch.setattr(connection, "wait", first_rank_first)
    assert list(decoding.received(readers)) == [-1, 7, 8]
