"""What a measurement sees of the ranks: who they are, their device, groups of them, and how they agree.

Ranks agree through the store next to rank 0, never through the device: a control message must not be part of what
is measured, and must work if the links that are measured do not.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


class BenchRanks:
    """One rank's view of the benchmark.

    Attributes:
        rank, size: this rank's number, and how many there are.
        local_rank, local_size: the same on its node.
        node: number of its node; `nodes` has their names.
        device: what it measures on.
        store: the one that all of them share.
        timeout: after which a collective is given up.
    """

    def __init__(
        self,
        *,
        rank: int,
        local_rank: int,
        local_size: int,
        nodes: Sequence[str],
        device: torch.device,
        store: dist.Store,
        timeout: timedelta,
    ) -> None:
        self.rank, self.size = rank, len(nodes) * local_size
        self.local_rank, self.local_size = local_rank, local_size
        self.node, self.nodes = rank // local_size, list(nodes)
        self.device, self.store, self.timeout = device, store, timeout
        self._calls = 0
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}

    @property
    def is_first(self) -> bool:
        """Return True on rank 0, whose rows count."""
        return self.rank == 0

    @property
    def on_gpu(self) -> bool:
        """Return whether the ranks are GPUs."""
        return self.device.type == "cuda"

    def gather(self, value: Any) -> list[Any] | None:
        """Return every rank's value (as JSON has it), in order, on rank 0; None on the others. All call it."""
        self._calls += 1
        key = f"gather/{self._calls}"
        if not self.is_first:
            self.store.set(f"{key}/{self.rank}", json.dumps(value))
            return None
        values = [value]
        for rank in range(1, self.size):
            values.append(json.loads(self.store.get(f"{key}/{rank}")))
            self.store.delete_key(f"{key}/{rank}")
        return values

    def share(self, value: Any = None) -> Any:
        """Return rank 0's value (as JSON has it) on all ranks. All must call it."""
        self._calls += 1
        if self.size == 1:
            return value
        key, last = f"share/{self._calls}", f"share/{self._calls}/read"
        if self.is_first:
            self.store.set(key, json.dumps(value))
            return value
        value_of_first = json.loads(self.store.get(key))
        if self.store.add(last, 1) == self.size - 1:  # no rank needs it any more
            self.store.delete_key(key)
            self.store.delete_key(last)
        return value_of_first

    def barrier(self) -> None:
        """Wait until all ranks are here."""
        self.gather(None)
        self.share()

    def group(self, members: Sequence[int]) -> dist.ProcessGroup:
        """Return the group of these ranks, this one among them; made at the first call, by its members only."""
        key = tuple(members)
        if key not in self._groups:
            group = dist.new_group(list(key), timeout=self.timeout, use_local_synchronization=True)
            assert group is not None, f"rank {self.rank} is not one of {key}"
            self._groups[key] = group
        return self._groups[key]

    def synchronize(self) -> None:
        """Wait for what was queued on the device."""
        if self.on_gpu:
            torch.cuda.synchronize(self.device)
