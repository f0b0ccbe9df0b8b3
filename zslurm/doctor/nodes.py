"""Which nodes are checked, and what Slurm reports of those that cannot be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from zslurm.checkpoint_tools.quantities import counted
from zslurm.core.errors import ConfigError, NotFound
from zslurm.doctor.check import CheckOutcome, failed, warned
from zslurm.slurm.hostlist import compress, expand
from zslurm.slurm.inventory import Node

_REMEDY = "ask the site; jobs do not start there meanwhile"


@dataclass(frozen=True)
class Chosen:
    """The nodes to check.

    Attributes:
        names: these, if they are known before the job starts.
        count: how many of Slurm's choice, if they are not.
        states: outcomes of nodes by Slurm's own view of them.
        not_asked: nodes that are not asked, and why.
    """

    names: tuple[str, ...] = ()
    count: int | None = None
    states: Mapping[str, CheckOutcome] = field(default_factory=dict)
    not_asked: Mapping[str, str] = field(default_factory=dict)

    @property
    def any(self) -> bool:
        """Whether there is a node to ask."""
        return bool(self.names or self.count)


def choose(
    nodes: Sequence[Node], *, partition: str | None, count: int | None = None, nodelist: str | None = None
) -> Chosen:
    """Choose nodes: a list, a number of them, or all that are idle now.

    Args:
        nodes: all nodes of the cluster.
        partition: theirs; None is any.
        count: choose this number of nodes, by Slurm's choice.
        nodelist: choose exactly these.

    Raises:
        NotFound: a named node does not exist.
        ConfigError: there are fewer usable nodes.
        HostlistError: not a hostlist.
    """
    if nodelist is not None:
        return _listed(nodes, expand(nodelist))
    members = [node for node in nodes if partition is None or partition in node.partitions]
    if count is not None:
        usable = sum(node.is_usable for node in members)
        if count > usable:
            raise ConfigError(
                f"--nodes {count}: of the {counted(len(members), 'node')} of {partition or 'the cluster'} "
                f"{usable} {'is' if usable == 1 else 'are'} usable"
            )
        return Chosen(count=count)
    idle = tuple(node.name for node in members if node.is_usable and node.state == "idle")
    busy = {node.name: f"busy ({node.state})" for node in members if node.is_usable and node.name not in idle}
    unusable = [node for node in members if not node.is_usable]
    states = {node.name: warned(f"Slurm shows {_state(node)}", _REMEDY) for node in unusable}
    return Chosen(names=idle, states=states, not_asked=busy | {node.name: _state(node) for node in unusable})


def _listed(nodes: Sequence[Node], names: list[str]) -> Chosen:
    by_name = {node.name: node for node in nodes}
    if unknown := [name for name in names if name not in by_name]:
        raise NotFound(f"{compress(unknown)}: Slurm has no such node; its nodes: {compress(by_name)}")
    unusable = [by_name[name] for name in dict.fromkeys(names) if not by_name[name].is_usable]
    return Chosen(
        names=tuple(dict.fromkeys(name for name in names if by_name[name].is_usable)),
        states={node.name: failed(f"Slurm shows {_state(node)}", _REMEDY) for node in unusable},
        not_asked={node.name: _state(node) for node in unusable},
    )


def _state(node: Node) -> str:
    """`idle+drain: bad fan`, as sinfo has it."""
    state = "+".join([node.state, *sorted(node.flags)])
    return f"{state}: {node.reason}" if node.reason else state
