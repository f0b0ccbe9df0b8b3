"""Events of recovery in memory: lost ranks are replaced, and the others stay alive."""

from __future__ import annotations

from zslurm.checkpoint_tools.quantities import counted, show_duration
from zslurm.core.units import show_time
from zslurm.run.events.event import Event
from zslurm.run.events.event_text import rank_list


class RecoveryUnavailable(Event, name="recovery_unavailable"):
    """Faults of this attempt are not recovered from in memory, though that is set."""

    TEXT = "no recovery in memory: {event.reason}; faults restart the ranks"
    attempt: int
    reason: str


class RecoveryReady(Event, name="recovery_ready"):
    """Every node has a warm process: from now on a lost rank can be replaced in memory."""

    TEXT = "lost ranks can be replaced in memory: processes wait{event.on_nodes}"
    attempt: int


class HangingRanksEnded(Event, name="hanging_ranks_ended"):
    """Ranks that hang were killed, and no others: these continue with other processes in their place."""

    attempt: int
    ranks: list[int]

    def _sentence(self) -> str:
        return f"{rank_list(self.ranks)}{self.on_nodes} killed alone, for the others can continue{self.because}"


class RanksExpelled(Event, name="ranks_expelled"):
    """Ranks leave a node that has a fault, though they may be alive: others continue in their place."""

    attempt: int
    ranks: list[int]

    def _sentence(self) -> str:
        return f"{rank_list(self.ranks)} leave{self.on_nodes}, and the others continue{self.because}"


class RecoveryStarted(Event, name="recovery_started"):
    """Ranks were lost, and the others regroup, with warm processes in their place or on fewer nodes.

    Fewer nodes were weighed: a step takes `step_time_ratio` times as long, which costs `lost_s` seconds of work
    until the end, or `helper_lost_s` until a helper job has joined, which is expected to wait `helper_wait_s`;
    against `expected_wait_s` in the queue. `heal` costs least.
    """

    attempt: int
    generation: int
    ranks: list[int]
    members: list[str] | None = None
    step_time_ratio: float | None = None
    lost_s: float | None = None
    expected_wait_s: float | None = None
    helper_wait_s: float | None = None
    helper_lost_s: float | None = None
    heal: str | None = None

    def _sentence(self) -> str:
        by = f": {', '.join(self.members)} in place" if self.members else ""
        return f"{rank_list(self.ranks)} lost, the others regroup in memory{by}"


class RecoveredInMemory(Event, name="recovered_in_memory", changes_state=True):
    """The ranks train on; `nodes` are those that they are on now, `world_size` how many if there are fewer."""

    attempt: int
    generation: int
    ranks: list[int]
    step: int
    rolled_back: int = 0
    seconds: float | None = None
    world_size: int | None = None

    def _sentence(self) -> str:
        lost = f", {counted(self.rolled_back, 'step')} lost" if self.rolled_back else ", no step lost"
        took = "" if self.seconds is None else f" after {self.seconds:.2f} s"
        done = "replaced" if self.world_size is None else f"left out, {counted(self.world_size, 'rank')} continue"
        return f"recovered in memory{took}: trains on from step {self.step}{lost}; {rank_list(self.ranks)} {done}"


class RecoveryFailed(Event, name="recovery_failed"):
    """Lost ranks could not be replaced in memory: every rank is started again."""

    TEXT = "no recovery in memory: {event.reason}; the ranks are started again"
    attempt: int
    reason: str
    generation: int = 0
    ranks: list[int] | None = None


class MovePlanned(Event, name="move_planned"):
    """Ranks are to leave the node `off` for the node `to` at the next step's boundary; nothing was lost."""

    attempt: int
    off: str
    to: str
    ranks: list[int]
    reason: str
    request: str | None = None

    def _sentence(self) -> str:
        return f"{rank_list(self.ranks)} move from {self.off} to {self.to} after this step: {self.reason}"


class RanksMoved(Event, name="ranks_moved", changes_state=True):
    """A planned move was made; `nodes` are those that the ranks are on now, `seconds` how long training paused."""

    attempt: int
    generation: int
    off: str
    ranks: list[int]
    step: int
    rolled_back: int = 0
    seconds: float | None = None
    request: str | None = None

    def _sentence(self) -> str:
        lost = f"{counted(self.rolled_back, 'step')} lost" if self.rolled_back else "no step lost"
        took = "" if self.seconds is None else f", a pause of {self.seconds:.2f} s"
        return f"{rank_list(self.ranks)} moved off {self.off} after step {self.step}, {lost}{took}{self.because}"


class MoveRefused(Event, name="move_refused"):
    """A planned move was not made; the ranks train on, on the same nodes."""

    TEXT = "the ranks do not move off {event.off}: {event.reason}"
    off: str
    reason: str
    request: str | None = None


class HelperRequested(Event, name="helper_requested", changes_state=True):
    """Ranks train on fewer nodes than they should: a helper job for the missing ones is submitted by a script.

    If it was weighed: it is expected to wait `helper_wait_s`, so fewer nodes cost `helper_lost_s` seconds of
    work until it has joined, and would cost `lost_s` without it.
    """

    TEXT = "{event.count} missing: a helper job is submitted for them, and the run trains on meanwhile"
    number: int
    script: str
    restart: int = 0
    lost_s: float | None = None
    helper_wait_s: float | None = None
    helper_lost_s: float | None = None

    @property
    def count(self) -> str:
        """The missing nodes, as words."""
        return counted(self.number, "node is", "nodes are")


class HelperQueued(Event, name="helper_queued", changes_state=True):
    """A helper job is in the queue, and the run trains on; `expected_start` is Slurm's own estimate.

    It is recorded again with the `reason` if Slurm reports one for which the job may not start soon.
    """

    helper: str
    number: int
    script: str = ""
    restart: int = 0
    expected_start: float | None = None

    def _sentence(self) -> str:
        when = (
            ""
            if self.expected_start is None
            else f"; Slurm expects it to start at {show_time(self.expected_start)}"
        )
        return f"helper job {self.helper} waits for {counted(self.number, 'node')}{when}{self.because}"


class HelperRefused(Event, name="helper_refused", changes_state=True):
    """No helper job could be submitted: the run trains on with the nodes that it has.

    With `script` it is certain that Slurm has no job of this script.
    """

    TEXT = "no helper job: {event.reason}; the run trains on with the nodes that it has"
    reason: str
    script: str | None = None


class HelperJoined(Event, name="helper_joined", changes_state=True):
    """A helper job has started, after `waited_s` seconds: its nodes get ready to join the run."""

    helper: str
    waited_s: float | None = None

    def _sentence(self) -> str:
        after = "" if self.waited_s is None else f" after {show_duration(self.waited_s)}"
        return f"helper job {self.helper} has started{self.on_nodes}{after}: they get ready to join the run"


class HelperOver(Event, name="helper_over", changes_state=True):
    """A helper job is over."""

    TEXT = "helper job {event.helper} is over{event.because}"
    helper: str


class RanksJoined(Event, name="ranks_joined", changes_state=True):
    """Ranks have joined at a step's boundary; `nodes` are those that all ranks are on now."""

    attempt: int
    generation: int
    ranks: list[int]
    step: int
    world_size: int
    rolled_back: int = 0
    seconds: float | None = None

    def _sentence(self) -> str:
        lost = f"{counted(self.rolled_back, 'step')} lost" if self.rolled_back else "no step lost"
        took = "" if self.seconds is None else f", a pause of {self.seconds:.2f} s"
        who = f"{rank_list(self.ranks)} joined after step {self.step}"
        return f"{who}, {lost}{took}: {counted(self.world_size, 'rank')} continue{self.on_nodes}"
