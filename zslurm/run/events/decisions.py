"""Events of what was decided after a fault, and done."""

from __future__ import annotations

from typing import Any

from zslurm.checkpoint_tools.quantities import counted, show_duration
from zslurm.core.units import show_time
from zslurm.run.events.event import Event, Nodes
from zslurm.run.events.event_text import describe_fault, node_list

_ACTIONS = {
    "finish": "nothing more to do",
    "restart": "start again in place",
    "swap": "start again with a spare node",
    "shrink": "continue with fewer nodes",
    "requeue": "requeue the job",
    "stop": "stop for good",
}
_NOT_DONE = {"observe": "would (mode observe)", "off": "would (mode off)"}


class Decided(Event, name="decision", changes_state=True):
    """What the policy decided after an attempt, and from what; done only if `mode` is `act`."""

    action: str
    mode: str = "act"
    root: dict[str, Any] | None = None
    exclude: list[str] | None = None
    n_nodes: int | None = None
    test_gpu: list[str] | None = None
    wait_s: float | None = None
    step_time_ratio: float | None = None
    expected_wait_s: float | None = None
    committed_step: int | None = None
    attempt_state: dict[str, Any] | None = None
    resources: dict[str, Any] | None = None

    @property
    def acted(self) -> bool:
        """Whether it was done."""
        return self.mode == "act"

    def _sentence(self) -> str:
        action = self.action
        verb = "decided:" if action == "finish" else _NOT_DONE.get(self.mode, "decided to")
        which = f"attempt {self.attempt}: " if self.attempt is not None else ""
        what = _ACTIONS.get(action, action)
        if action == "finish" and str(self.reason).startswith("Slurm puts the job back"):
            what = "nothing to do here"
        text = f"{which}{verb} {what}"
        if action in ("swap", "shrink", "restart"):
            text += self.on_nodes
        if action == "requeue" and self.n_nodes:
            text += f" with {counted(self.n_nodes, 'node')}"
        if self.exclude:
            text += f", without {node_list(self.exclude)} from now on"
        if action not in ("finish", "stop") and (self.committed_step or -1) >= 0:
            text += f", from step {self.committed_step}"
        if self.wait_s:
            text += f", in {show_duration(self.wait_s)}"
        if self.test_gpu:
            node, gpu = self.test_gpu
            text += f", after a test of GPU {gpu} on {node}"
        if self.reason:
            return f"{text}: {self.reason}"
        return f"{text}: {describe_fault(self.root)}" if self.root else text


class NodesExcluded(Event, name="nodes_excluded", changes_state=True):
    """The run does not use some nodes any more, until `expires`; `shared`: for another run of the group."""

    nodes: Nodes
    expires: float | None = None
    shared: bool | None = None

    def _sentence(self) -> str:
        until = f" until {show_time(self.expires)}" if self.expires else ""
        return f"the run does not use {node_list(self.nodes)} any more{until}{self.because}"


class NodesReadmitted(Event, name="nodes_readmitted", changes_state=True):
    """The group uses nodes again that another run had excluded."""

    TEXT = "{event.node_list} may be used again: no run of the group excludes it any more"
    nodes: Nodes


class SharedExclusionsFailed(Event, name="shared_exclusions_failed"):
    """The exclusions of the group could not be read or written in part or at all (`cluster.exclusions`)."""

    TEXT = "the group's excluded nodes: {event.reason}"
    reason: str


class ExcludedNodesUsed(Event, name="excluded_nodes_used"):
    """Excluded nodes are used, because there are no others."""

    TEXT = "{event.node_list} is used although excluded: there are no others"
    nodes: Nodes


class ExclusionFailed(Event, name="exclusion_failed"):
    """Slurm did not take an exclusion."""

    TEXT = "{event.node_list} could not be excluded{event.because}"
    nodes: Nodes


class RequeueFailed(Event, name="requeue_failed"):
    """Slurm did not requeue the job."""

    TEXT = "the job could not be requeued{event.because}"
    excluded: str | None = None


class Requeued(Event, name="requeued", changes_state=True):
    """The job is back in the queue; `restart` is how often that had happened before."""

    excluded: Nodes | None = None
    restart: int | None = None

    def _sentence(self) -> str:
        without = f", without {node_list(self.excluded)}" if self.excluded else ""
        return f"put back into the queue{without}{self.because}"


class SuccessorEnded(Event, name="successor_ended", changes_state=True):
    """A successor job had nothing to continue."""

    TEXT = "job {event.job_id} had nothing to continue: {event.reason}"
    reason: str
