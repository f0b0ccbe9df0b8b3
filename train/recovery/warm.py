"""Wait, with everything made that does not depend on the rank, for a generation to take a lost rank's place in."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, MutableMapping

import torch.distributed as dist

from zslurm.train.parallel.facts import AgreedFacts
from zslurm.train.recovery.generation import (
    FACTS,
    NEWEST,
    SECRET_VARIABLE,
    WARM,
    Generation,
    generation_key,
    warm_key,
)

_POLL_S = 0.01


def with_secret(store: dist.Store) -> dist.Store:
    """Return the part of a store that only processes of the attempt know; all of it if there is no secret."""
    secret = os.environ.get(SECRET_VARIABLE)
    return dist.PrefixStore(secret, store) if secret else store


def wait_to_join(store: dist.Store, member: str, over: Callable[[], bool]) -> Generation | None:
    """Register as a warm process, and return the generation that names `member`.

    None once `over` returns true, or if the ranks leave this node as planned.

    Raises:
        RuntimeError: the store is gone.
    """
    number = int(store.get(NEWEST)) if store.check([NEWEST]) else 0
    store.set(warm_key(store.add(WARM, 1)), member)
    while not over():
        if store.check([generation_key(number + 1)]):
            number += 1
            generation = Generation.of_json(store.get(generation_key(number)))
            # A newer one may not name it any more: only the newest counts.
            if generation.rank_of(member) is not None and not store.check([generation_key(number + 1)]):
                return generation
            if generation.leaves(member):
                return None
        else:
            time.sleep(_POLL_S)
    return None


def take_place(
    store: dist.Store, member: str, generation: Generation, environ: MutableMapping[str, str] = os.environ
) -> int:
    """Set torchrun's variables for the rank whose place this process takes; returns the rank."""
    rank = generation.rank_of(member)
    assert rank is not None
    local_size = AgreedFacts.of_json(store.get(FACTS)).local
    environ["RANK"], environ["WORLD_SIZE"] = str(rank), str(len(generation.members))
    environ["LOCAL_RANK"], environ["LOCAL_WORLD_SIZE"] = str(rank % local_size), str(local_size)
    environ["GROUP_RANK"] = str(rank // local_size)
    return rank
