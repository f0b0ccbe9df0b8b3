"""Who keeps whose copy, and which step all ranks can have again: no collectives, numbers only."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

from zslurm.checkpoint_tools.checksum import crc32
from zslurm.train.recovery.copies.staging import Slot
from zslurm.train.recovery.generation import Generation, arrived_key, here_key, met_key

PAUSE_S = (0.001, 0.005)
"""Seconds between two looks at a key: first, and at most."""

_LATE_S = 5.0
"""Seconds after the deadline of a generation in which the store server should have ended the wait for it."""


def whole_step(own: Sequence[Sequence[int]], held: Sequence[Sequence[int]], buddies: Sequence[int | None]) -> int:
    """Return the newest step that every rank can have again; -1 if there is none.

    Args:
        own: the steps of which each rank has its own copy; none for a rank that was replaced.
        held: the steps of which each rank holds its ward's copy.
        buddies: which rank holds each one's copies.
    """
    common: set[int] | None = None
    for rank, steps in enumerate(own):
        buddy = buddies[rank]
        held_steps = set(steps) | (set(held[buddy]) if buddy is not None else set())
        common = held_steps if common is None else common & held_steps
    return max(common or {-1})


def why_none(own: list[list[int]], held: list[list[int]], buddies: list[int | None]) -> str:
    """Return why there is no step to go back to."""
    for rank, steps in enumerate(own):
        buddy = buddies[rank]
        if steps or (buddy is not None and held[buddy]):
            continue
        if buddy is None:
            return f"rank {rank} was lost, and has no buddy"
        if not own[buddy]:
            return (
                f"rank {rank} and its buddy, rank {buddy}, were both lost: no copy of rank {rank}'s state is left"
            )
        return f"rank {rank} was lost before its buddy, rank {buddy}, had a whole copy of its state"
    return "the ranks have no step in common"


def is_intact(slot: Slot) -> bool:
    """Return whether a slot still has the bytes whose CRC32 was computed when it was sent, if it was."""
    if slot.crc is None:
        return True
    crc = 0
    for part in slot.parts():
        crc = crc32(part, crc)
    return crc == slot.crc


def shared_extras(extras: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return those small arrays of a copy that are the same on every rank."""
    return {name: extras[name] for name in sorted(extras) if not name.startswith("rng")}


def shared_crc(step: int, cursor: Mapping[str, Any], extras: Mapping[str, Tensor]) -> int:
    """Return a CRC32 of all of a copy that must be the same on every rank."""
    crc = crc32(json.dumps([step, cursor], sort_keys=True).encode())
    for value in shared_extras(extras).values():
        crc = crc32(value.contiguous().numpy().tobytes(), crc)
    return crc


def check_in(store: dist.Store, generation: Generation, rank: int, over: Callable[[], bool]) -> None:
    """Report that this rank is ready for a generation, and wait until all of its members are.

    A store's wait cannot be interrupted, so the server ends it if a further generation follows, or time is up.

    Raises:
        RuntimeError: `over` returned true, or the members did not come in time.
    """
    number, limit = generation.number, timedelta(seconds=generation.deadline_s + _LATE_S)
    store.set(here_key(number, rank), "")
    if store.add(arrived_key(number), 1) == len(generation.members):
        store.set(met_key(number), "")
    try:
        store.wait([met_key(number)], limit)
    except dist.DistStoreError as error:
        late = f"not all members left the old generation within {generation.deadline_s:g} s"
        raise RuntimeError(late) from error
    if over():
        raise RuntimeError("a further rank was lost")
    if why := store.get(met_key(number)).decode():
        raise RuntimeError(why)
