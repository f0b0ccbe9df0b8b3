"""What `zslurm bench` measured of a cluster's collectives, as runs take it (cluster/measurements.py keeps it)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal, TypeVar

from pydantic import Field

from zslurm.train.sections.section import Count, NonNegative, Positive, Section

Text = Annotated[str, Field(max_length=300, pattern=r"^[^\x00-\x1f\x7f-\x9f\u2028\u2029]*$")]
Variable = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", max_length=200)]


Nodes = Annotated[int, Field(gt=0, le=1_000_000)]  # as a key of YAML or JSON it comes as a word
Value = TypeVar("Value")


_LEAST_GAIN = 0.03


class MeasuredVariable(Section):
    """The values of a variable that `zslurm bench collectives --env` compared."""

    best: Text = Field(description="the value with the higher bandwidth")
    others: dict[Text, Positive] = Field(
        default_factory=dict, description="other values, and how many times their bandwidth the best has"
    )
    date: Text = Field("", description="when")
    spread: NonNegative = Field(0, description="median relative difference of repeated measurements")

    def gain_over(self, value: str) -> float | None:
        """Return how many times the bandwidth of `value` the best one has; None if that is within the noise."""
        ratio = self.others.get(value)
        return ratio if ratio is not None and ratio > 1 + max(_LEAST_GAIN, self.spread) else None


class MeasuredSection(Section):
    """Collectives between this cluster's ranks."""

    date: Text = Field("", description="when, in UTC")
    device: Text = Field("", description="of the ranks: the GPUs' name, or cpu")
    ranks_per_node: Count | None = Field(None, description="ranks on each node")
    profile: Text = Field("", description="name of the profile that they were measured with")
    bucket_mb: dict[Nodes, Positive] = Field(
        default_factory=dict,
        description="number of nodes -> MiB of gradients from which a reduction has 95 % of its full bandwidth; "
        "runs on about as many nodes use it as parallel.bucket_mb if that is null",
    )
    collectives: dict[Nodes, Literal["flat", "two_level"]] = Field(
        default_factory=dict,
        description="number of nodes -> the faster way at that size; what parallel.collectives: auto takes",
    )
    variables: dict[Variable, MeasuredVariable] = Field(
        default_factory=dict, description="variables of RCCL or NCCL whose values were compared here"
    )

    def bucket_for(self, nodes: int, ranks_per_node: int) -> float | None:
        """Return the measured bucket of a run in MiB; None if none was measured for about as many nodes."""
        return self._nearest(self.bucket_mb, nodes, ranks_per_node)

    def collectives_for(self, nodes: int, ranks_per_node: int) -> Literal["flat", "two_level"] | None:
        """Return the faster way to make collectives; None if none was measured for about as many nodes."""
        return self._nearest(self.collectives, nodes, ranks_per_node)

    def nearest(self, table: Mapping[int, object], nodes: int, ranks_per_node: int) -> int | None:
        """Return the number of nodes in a table whose entry a run takes; None if it takes none."""
        return self._nearest({count: count for count in table}, nodes, ranks_per_node)

    def _nearest(self, table: dict[int, Value], nodes: int, ranks_per_node: int) -> Value | None:
        """Return the entry of the nearest number of nodes, at most a factor of two away; of two, the larger."""
        if self.ranks_per_node not in (None, ranks_per_node):
            return None
        near = [count for count in table if nodes <= 2 * count and count <= 2 * nodes]
        if nodes == 1 or 1 in near:
            near = [count for count in near if (count == 1) == (nodes == 1)]  # one node has no network between
        best = min(near, key=lambda count: (max(count / nodes, nodes / count), -count), default=None)
        return None if best is None else table[best]
