"""Events of what people did: rows of submissions.jsonl."""

from __future__ import annotations

from typing import Any

from zslurm.run.events.event import Event, Nodes
from zslurm.run.events.event_text import node_list


class ByUser(Event):
    """A user, or a command of one, did something; versions before recorded no `user`."""

    user: str | None = None
    launcher: str | None = None
    cluster: str | None = None


class Action(ByUser):
    """A user did something to the run."""

    excluded: str | None = None

    def _sentence(self) -> str:
        without = f", without {self.excluded} from now on" if self.excluded else ""
        who = f" by {self.user}" if self.user else ""
        return f"{self.TEXT}{who} as job {self.job_id}{without}"


class Submitted(Action, name="submit"):
    """The run was submitted.

    `run_dir` and `inode` are of the directory that its job works in; `pid`, `created`, `host`, `started`, `boot`
    of the process that holds a local run; `expected_start` is Slurm's estimate (UNIX seconds).
    """

    TEXT = "submitted"
    changed: list[str] | None = None
    run_dir: str | None = None
    inode: int | None = None
    pid: int | None = None
    created: float | None = None
    host: str | None = None
    started: int | None = None
    boot: str | None = None
    expected_start: float | None = None


class QueueOverdue(ByUser, name="queue_overdue"):
    """The job waits, or has waited, in the queue for much longer than expected; recorded once for each wait."""

    TEXT = "the job waits in the queue{event.because}"


class RequeuedByUser(Action, name="requeue"):
    """The job was requeued by hand."""

    TEXT = "requeued"


class ExcludedByUser(Action, name="exclude"):
    """Nodes were excluded by hand."""

    TEXT = "changed"


class Readmitted(Action, name="readmit"):
    """Excluded nodes may be used again."""

    def _sentence(self) -> str:
        who = f", by {self.user}" if self.user else ""
        return f"{self.node_list} may be used again{who}"


class Cancelled(Action, name="cancel"):
    """The job was cancelled."""

    TEXT = "cancelled"


class MoveAsked(Action, name="move"):
    """A user asked that the ranks leave the nodes `off`; `request` is in the events that answer it."""

    off: Nodes
    request: str

    def _sentence(self) -> str:
        return f"asked{f' by {self.user}' if self.user else ''} to move off {node_list(self.off)}"


class Scored(Action, name="score"):
    """A checkpoint was scored on tasks by hand; `scores` and `stderr` are by TASK/METRIC."""

    checkpoint: str
    scores: dict[str, Any]
    stderr: dict[str, Any]
    step: int | None = None

    def _sentence(self) -> str:
        who = f" by {self.user}" if self.user else ""
        scores = (f"{name} {value:.4f}" for name, value in self.scores.items() if isinstance(value, float | int))
        return f"{self.checkpoint} was scored{who}: {', '.join(scores)}"


class Released(Action, name="release"):
    """The job was released: by a person, or, with a `reason`, by a command that showed the run."""

    def _sentence(self) -> str:
        return f"released{f' by {self.user}' if self.user else ''} as job {self.job_id}{self.because}"


class NotReleased(Action, name="not_released"):
    """Slurm holds the job, which a node could not start, and it was not released; `restarts` names the hold."""

    TEXT = "job {event.job_id} stays held{event.because}"
    restarts: int

    def _sentence(self) -> str:
        return self.TEXT.format(event=self)


class SuccessorSubmitted(ByUser, name="successor"):
    """A job was submitted that waits for the end of this one, to continue the run."""

    TEXT = "job {event.successor} waits to continue the run if job {event.job_id} ends early"
    successor: str
