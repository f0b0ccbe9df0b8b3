"""What a rail is, what a node's map of rails is, and what can be wrong with it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from zslurm.hardware.pairing import Near

Kind = Literal[
    "missing-nic",
    "nic-down",
    "no-roce-v2",
    "missing-gpu",
    "no-near-nic",
    "shared-nic",
    "permuted",
    "slow",
    "unreadable",
    "different",
]
INCOMPLETE: frozenset[Kind] = frozenset(
    {"missing-nic", "nic-down", "no-roce-v2", "missing-gpu", "no-near-nic", "shared-nic"}
)
"""Problems for which `cluster.rail_policy` acts: traffic of a rail would fail. The others are warnings."""


@dataclass(frozen=True)
class Problem:
    """Something wrong with the rails of a node, in one line."""

    kind: Kind
    message: str
    rail: int | None = None
    nic: str | None = None

    @property
    def incomplete(self) -> bool:
        """Whether a rail cannot work, rather than work badly or differently."""
        return self.kind in INCOMPLETE


@dataclass(frozen=True)
class Rail:
    """One rail of a node.

    Attributes:
        index: its number; ranks, GPUs and NICs are counted in rail order.
        gpus: GPUs that use it, by index: the local ranks.
        nic: name of the RDMA device; None if there is none.
        near: what the first GPU and the NIC share; None without one of them.
        bridge: the bridge or root complex closest to both.
        gid_index: GID index of RoCE v2: the configured one if it is of RoCE v2, else the first.
    """

    index: int
    gpus: tuple[int, ...]
    gpu_pci: tuple[str | None, ...]
    nic: str | None
    nic_pci: str | None = None
    netdev: str | None = None
    numa: int | None = None
    near: Near | None = None
    bridge: str | None = None
    state: str | None = None
    rate_gbps: float | None = None
    gid_index: int | None = None


@dataclass(frozen=True)
class RailMap:
    """The rails of one node.

    Attributes:
        source: of the pairing.
        others: RDMA devices that are no rail: storage, management.
        problems: what is wrong, the worst first.
    """

    node: str
    source: Literal["profile", "pcie"]
    rails: tuple[Rail, ...]
    others: tuple[str, ...] = ()
    problems: tuple[Problem, ...] = ()

    @property
    def incomplete(self) -> tuple[Problem, ...]:
        """The problems for which a policy acts."""
        return tuple(problem for problem in self.problems if problem.incomplete)

    def problems_of(self, *kinds: Kind) -> list[Problem]:
        """Return the problems of some kinds."""
        return [problem for problem in self.problems if problem.kind in kinds]

    def as_json(self) -> dict[str, Any]:
        """Plain values; each problem also has whether it makes the rails incomplete."""
        listed = [asdict(problem) | {"incomplete": problem.incomplete} for problem in self.problems]
        return asdict(self) | {"problems": listed}
