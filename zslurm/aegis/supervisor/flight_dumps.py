"""Reads the dumps of torch's flight recorders before an attempt is ended, and names the ranks that held it up.

A rank on GPUs writes its dump into the attempt's directory when a collective operation times out
(TORCH_NCCL_DUMP_ON_TIMEOUT). Dumps are read as plain data, never unpickled (core/plain_pickle.py).
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from zslurm.aegis.core.detection.flight_records import Culprits, RecordedOperation, find_culprits, operations_of
from zslurm.aegis.fault_kinds import RANK_HANG
from zslurm.aegis.types import Fault
from zslurm.checkpoint_tools.quantities import counted
from zslurm.core.plain_pickle import NotPlain, load_plain
from zslurm.run.run_dir import AttemptDir

_MOST_S = 10.0
"""Seconds that reading may take, in which the nodes are idle."""

_MOST_NAMED = 8

_HOW = {
    "mismatched": "called something else than {0}",
    "stuck": "did not finish {0}, which another rank has finished",
    "missing": "did not call {0}, in which other ranks wait",
    "behind": "has not come to {0}, the oldest operation in which ranks wait",
}


def examine(attempt: AttemptDir, rank_nodes: Sequence[str]) -> tuple[list[Culprits], int]:
    """Return the ranks for which others wait by the dumps of an attempt, and how many dumps there were.

    Without any dump there is no answer. A rank whose dump is damaged, or was not read in time, is not named as
    missing.
    """
    deadline = time.monotonic() + _MOST_S
    operations: dict[int, list[RecordedOperation]] = {}
    unread: list[int] = []
    for rank in range(len(rank_nodes)):
        path = attempt.flight_dump(rank)
        if time.monotonic() > deadline:
            unread.append(rank)
            continue
        try:
            operations[rank] = operations_of(load_plain(path))
        except FileNotFoundError:
            continue
        except (OSError, NotPlain, ValueError):
            unread.append(rank)
    if not operations:
        return [], 0
    return find_culprits(operations, unread), len(operations)


def hangs(culprits: Sequence[Culprits], rank_nodes: Sequence[str]) -> list[Fault]:
    """Return a fault for each of the first ranks that are named, from when the operation was called."""
    named = [(rank, culprit) for culprit in culprits for rank in culprit.ranks]
    return [
        Fault.of_kind(
            RANK_HANG, culprit.operation.created or time.time(), "flight_recorder",
            f"rank {rank} {_HOW[culprit.how].format(culprit.where)}", rank=rank, node=rank_nodes[rank],
        )
        for rank, culprit in named[:_MOST_NAMED]
        if rank < len(rank_nodes)
    ]  # fmt: skip


def described(culprits: Sequence[Culprits]) -> list[str]:
    """Return the findings, a line each."""
    return [
        f"{counted(len(culprit.ranks), 'rank')} ({', '.join(map(str, culprit.ranks[:_MOST_NAMED]))}) "
        + _HOW[culprit.how].format(culprit.where)
        for culprit in culprits
    ]
