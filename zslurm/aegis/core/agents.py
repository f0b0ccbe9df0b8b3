"""The agents of a supervisor: when one is given up, and when and in which steps the next ones are started."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from zslurm.aegis.core.detection.attempt_progress import STARTUP_TIMEOUT_S

PARTS_BEFORE_FIRST_REPORT = 8
"""Parts into which a refused step is divided at most while no agent has reported. Then a node is hardly why Slurm
refuses steps: the controller may be away."""

_LONGEST_PAUSE_S = 300.0
# How long srun may leave what it is sent before it counts as stuck; well below aegis.standby_s.
_STUCK_S = 6.0
# An agent that lived so long was well: its next loss begins with the shortest pause.
_LIVED_S = 60.0


class StartCommand(Protocol):
    """A command that started agents, at `started` (monotonic seconds)."""

    started: float


C = TypeVar("C", bound=StartCommand)


@dataclass
class NodeAgent(Generic[C]):
    """What is known of the agent on one node.

    Attributes:
        link: the command that started the present agent; None if a new one is due.
        heard: when the agent of the present link reported last.
        last_heard: when any agent of the node reported last.
        lost: its loss was recorded, and it has not reported since.
        max_step_nodes: most nodes of a step with this one, since Slurm refused a larger step; None: any number.
        failures: agents that were lost in a row.
        retry_at: when the next one may be started (monotonic seconds).
        unreachable: why Slurm could start nothing on the node.
        slurm_state: what Slurm calls a node whose agent is not heard: none is started there until it is heard.
    """

    link: C | None = None
    heard: float | None = None
    last_heard: float | None = None
    lost: bool = False
    max_step_nodes: int | None = None
    failures: int = 0
    retry_at: float = 0.0
    unreachable: str = ""
    slurm_state: str = ""

    def is_starting(self, now: float) -> bool:
        """Return whether a new agent was started, and may still report for the first time."""
        return self.link is not None and self.heard is None and now - self.link.started < STARTUP_TIMEOUT_S

    def take_report(self, now: float) -> None:
        """Note that the agent reported."""
        self.heard = self.last_heard = now
        self.lost, self.unreachable, self.slurm_state, self.max_step_nodes = False, "", "", None

    def replace_later(self, now: float) -> None:
        """Give the present agent up; the next one may start at once after a long life, else after a pause."""
        if self.link is not None and self.heard is not None and now - self.link.started > _LIVED_S:
            self.failures = 0
        self.link = self.heard = None
        self.retry_at = now + (_pause_s(self.failures) if self.failures else 0.0)
        self.failures += 1

    def could_not_start(self, now: float) -> None:
        """Note that the command could not be started at all."""
        self.failures += 1
        self.retry_at = now + _pause_s(self.failures)


def why_given_up(node: NodeAgent[C], now: float, timeout_s: float) -> str:
    """Return why the agent of a node is to be given up; empty if it is well, or may still report.

    Args:
        node: of the agent.
        now: monotonic seconds.
        timeout_s: aegis.heartbeat_timeout_s.
    """
    if node.link is None:
        return ""
    if node.heard is not None:
        unheard_s = now - node.heard
        return f"no heartbeat of the agent for {unheard_s:.0f} s" if unheard_s > timeout_s else ""
    return "" if node.is_starting(now) else f"the agent did not report within {STARTUP_TIMEOUT_S:.0f} s"


def why_step_given_up(stuck_s: float) -> str:
    """Return why all agents of a step are to be given up that takes no command for some time; empty if not yet."""
    return "the step of its agents takes no more commands" if stuck_s > _STUCK_S else ""


def any_heard(nodes: Mapping[str, NodeAgent[C]]) -> bool:
    """Return whether the present agent of any node has reported."""
    return any(node.heard is not None for node in nodes.values())


def bisect(every: Mapping[str, NodeAgent[C]], nodes: Mapping[str, NodeAgent[C]]) -> bool:
    """Have these nodes start in smaller steps: Slurm refuses a step as a whole for one node that is gone.

    Returns:
        False if the step cannot be made smaller: an agent has reported, or it was small enough.
    """
    least = 1 if any_heard(every) else max(1, len(every) // PARTS_BEFORE_FIRST_REPORT)
    most = max(least, len(nodes) // 2)
    if most >= len(nodes) or any(node.heard is not None for node in nodes.values()):
        return False
    for node in nodes.values():
        node.link, node.max_step_nodes = None, most
    return True


def due_steps(nodes: Mapping[str, NodeAgent[C]], now: float, at_once: int) -> list[list[str]]:
    """Return the nodes of each step that is to be started now.

    Args:
        nodes: of the supervisor.
        now: monotonic seconds.
        at_once: most steps that may be starting at the same time, those that start already included.
    """
    due = [
        name for name, node in nodes.items() if node.link is None and now >= node.retry_at and not node.slurm_state
    ]
    refused = [name for name in due if nodes[name].max_step_nodes is not None]
    single = [name for name in due if nodes[name].max_step_nodes is None]
    whole_steps: list[list[str]] = []
    if single and (len(single) == len(nodes) or len(single) > 4 * at_once):
        whole_steps, single = [single], []  # the whole step was lost
    starting = {node.link for node in nodes.values() if node.is_starting(now)}
    parts = [[name] for name in single] + _parts(nodes, refused)
    return whole_steps + parts[: max(0, at_once - len(starting) - len(whole_steps))]


def _parts(nodes: Mapping[str, NodeAgent[C]], names: Iterable[str]) -> list[list[str]]:
    """Divide nodes of refused steps into smaller steps, the largest first."""
    of_size: dict[int, list[str]] = {}
    for name in names:
        of_size.setdefault(nodes[name].max_step_nodes or 1, []).append(name)
    return [
        together[at : at + size]
        for size, together in sorted(of_size.items(), reverse=True)
        for at in range(0, len(together), size)
    ]


def _pause_s(failures: int) -> float:
    return min(_LONGEST_PAUSE_S, 2.0**failures)
