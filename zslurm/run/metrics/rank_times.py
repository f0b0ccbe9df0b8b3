"""How long each rank takes for its own work: a file that the supervisor keeps up to date, and `watch` reads.

In synchronous training every rank takes as long for a step as the slowest. What differs is the step work time:
data, forward and backward per microbatch, without waiting for peers.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from zslurm.core.files import read_json, write_atomically
from zslurm.run.run_dir import AttemptDir


@dataclass(frozen=True)
class RankTimes:
    """Step work times of an attempt's ranks.

    Attributes:
        time: when they were measured (UNIX seconds).
        nodes: the node of each rank.
        seconds: of each rank per microbatch, over the last steps; None if a rank has not reported.
    """

    time: float
    nodes: tuple[str, ...]
    seconds: tuple[float | None, ...]

    @property
    def median(self) -> float | None:
        """Seconds of the median rank; None if none is known."""
        measured = [value for value in self.seconds if value is not None]
        return statistics.median(measured) if measured else None

    @property
    def slowest(self) -> int | None:
        """The rank that takes longest; None if none is known."""
        measured = [(value, rank) for rank, value in enumerate(self.seconds) if value is not None]
        return max(measured)[1] if measured else None

    def by_rail(self) -> list[list[float | None]]:
        """Return, for each local rank, the ratio to the median on each node, in the nodes' order."""
        median = self.median
        names = list(dict.fromkeys(self.nodes))
        ranks: Mapping[str, list[int]] = {name: [] for name in names}
        for rank, name in enumerate(self.nodes):
            ranks[name].append(rank)
        rails = max(map(len, ranks.values()), default=0)
        return [
            [self._ratio(ranks[name][rail], median) if rail < len(ranks[name]) else None for name in names]
            for rail in range(rails)
        ]

    def _ratio(self, rank: int, median: float | None) -> float | None:
        seconds = self.seconds[rank]
        return seconds / median if seconds is not None and median else None


def write_rank_times(attempt: AttemptDir, times: RankTimes) -> None:
    """Replace the file.

    Raises:
        OSError: the run directory cannot be written.
    """
    body = {"time": times.time, "nodes": times.nodes, "seconds": times.seconds}
    write_atomically(attempt.rank_times, json.dumps(body))


def read_rank_times(attempt: AttemptDir) -> RankTimes | None:
    """Return the newest times of an attempt; None if there are none, or the file is damaged."""
    body = read_json(attempt.rank_times) or {}
    nodes, seconds, when = body.get("nodes"), body.get("seconds"), body.get("time")
    if not isinstance(nodes, list) or not isinstance(seconds, list) or len(nodes) != len(seconds):
        return None
    if not isinstance(when, int | float) or not _are_times(seconds):
        return None
    return RankTimes(float(when), tuple(map(str, nodes)), tuple(seconds))


def _are_times(values: Sequence[object]) -> bool:
    return all(value is None or (isinstance(value, int | float) and value > 0) for value in values)
