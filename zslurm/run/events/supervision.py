"""Events of the supervisor and its agents."""

from __future__ import annotations

from zslurm.checkpoint_tools.quantities import counted
from zslurm.run.events.event import Event


class SupervisorStarted(Event, name="supervisor_started", changes_state=True):
    """A supervisor started in the job, or took an attempt over."""

    host: str
    pid: int | None = None
    adopted: int | None = None

    def _sentence(self) -> str:
        adopted = "" if self.adopted is None else f" and took over attempt {self.adopted}"
        return f"the supervisor started on {self.host}{adopted}"


class AgentsStarted(Event, name="agents_started"):
    """The agents run on the nodes."""

    generation: str | None = None

    def _sentence(self) -> str:
        return f"agents watch{self.on_nodes or ' the nodes'}"


class AgentLost(Event, name="agent_lost"):
    """The agent of a node sends no heartbeats, while the node's ranks run."""

    TEXT = "the agent on {event.node} sends no heartbeats{event.because}"
    node: str


class AgentRestarted(Event, name="agent_restarted"):
    """A lost agent was started again."""

    TEXT = "the agents were started again{event.on_nodes}"


class AgentsUnavailable(Event, name="agents_unavailable"):
    """The agents cannot be started; the run continues without."""

    TEXT = "no agents watch the nodes{event.because}"


class AgentReportsIgnored(Event, name="agent_reports_ignored"):
    """Reports of an agent cannot be read: damaged lines, or messages that only another version of zslurm knows."""

    count: int
    node: str | None = None
    damaged: bool | None = None

    def _sentence(self) -> str:
        agent = "an agent" if self.node is None else f"the agent on {self.node}"
        reports = counted(self.count, "damaged report" if self.damaged else "unknown report")
        version = "" if self.damaged else ", which runs another version of zslurm"
        return f"ignored {reports} from {agent}{version}{self.because}"


class LeaseLost(Event, name="lease_lost"):
    """Another supervisor holds the run's lease."""

    TEXT = "another supervisor has taken over the run"
    generation: str | None = None


class RunDirLost(Event, name="run_dir_lost"):
    """The run directory was moved or removed."""

    TEXT = "the run directory is gone, and the ranks are ended{event.because}"
    rescue_dir: str | None = None


class StartPostponed(Event, name="start_postponed", changes_state=True):
    """The ranks cannot be started yet; `needs_person`: nor later, until a person removes the reason."""

    TEXT = "the ranks cannot be started yet{event.because}"
    needs_person: bool = False


class WaitGivenUp(Event, name="wait_given_up"):
    """Something was waited for too long."""

    TEXT = "a wait was given up{event.because}"


class DeputyActed(Event, name="deputy_acted"):
    """The standby supervisor, an agent, acted in place of the lost supervisor."""

    node: str
    batch_node: str | None = None

    def _sentence(self) -> str:
        where = f" on {self.batch_node}" if self.batch_node else ""
        return f"the agent on {self.node} acted in place of the lost supervisor{where}{self.because}"


class NotifyFailed(Event, name="notify_failed"):
    """A hook of aegis.notify, or the job's comment, did not work."""

    TEXT = "a notification was not delivered: {event.reason}"
    reason: str


class NotifyTest(Event, name="notify_test"):
    """What `zslurm aegis notify` sends; in no file."""

    TEXT = "a test of aegis.notify: this hook works"
