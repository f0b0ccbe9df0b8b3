"""One start of a run's job, as every part of the supervisor knows it."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from zslurm.aegis.core.messages import StopState
from zslurm.aegis.core.policy.history import history_of
from zslurm.aegis.core.starting import returned_nodes
from zslurm.aegis.types import History
from zslurm.config.load import load_spec
from zslurm.config.spec import RunSpec
from zslurm.core.errors import ConfigError, SlurmUnavailable, ZslurmError
from zslurm.core.pauses import Pauses
from zslurm.run.events import NodesExcluded, Preempted, Requeued, SharedExclusionsFailed
from zslurm.run.events.event import Event, only_known, select
from zslurm.run.exclusion_store import ExclusionStore
from zslurm.run.exclusions import active_exclusions
from zslurm.run.presence import Presence
from zslurm.run.run_dir import RunDir
from zslurm.run.shared_exclusions import EXCLUSION_EVENTS, take_over
from zslurm.slurm.client import PreemptMode, SlurmClient
from zslurm.slurm.environment import JOB_VARIABLE, cluster_name, restart_count
from zslurm.slurm.hostlist import compress
from zslurm.slurm.preemption import Preemption, find_preemption
from zslurm.slurm.run_command import Retries
from zslurm.train.jsonl import read_jsonl

_ANSWER_S = 5.0

TIME_IS_UP = (signal.SIGUSR1, signal.SIGUSR2)
"""Signals that ask to save and to come back later: Slurm's warning before the time limit, or a person's."""


@dataclass
class JobStop:
    """That the run was asked to save and stop.

    Attributes:
        signum: by whichever signal came last; None if none did.
        deadline: until when (monotonic).
        preemption: that Slurm preempts the job, which asks as well.
    """

    signum: int | None = None
    deadline: float | None = None
    preemption: Preemption | None = None

    @property
    def asked(self) -> bool:
        """Whether anything asked for it."""
        return self.signum is not None or self.preemption is not None

    @property
    def preempted(self) -> PreemptMode | None:
        """What Slurm does with the job if it preempts it."""
        return self.preemption.mode if self.preemption is not None else None

    @property
    def requeued(self) -> bool:
        """Whether Slurm itself has put the job back into the queue, to preempt it."""
        return self.preemption is not None and self.preemption.requeued

    @property
    def comes_back(self) -> bool:
        """Whether we put the job back into the queue: it is not cancelled, and Slurm has not done it yet."""
        if self.signum is None:
            return self.preemption is not None and not self.preemption.done
        return self.signum in TIME_IS_UP

    @property
    def name(self) -> str | None:
        """`SIGUSR2` and the like; None if no signal asked."""
        return signal.Signals(self.signum).name if self.signum is not None else None

    @property
    def asked_by(self) -> str:
        """What asked, for messages: a signal, a preemption, or a request of Slurm's that left no trace."""
        return self.name or ("preempted" if self.preemption is not None else "by Slurm")

    def state(self) -> StopState:
        """Return the request as the core knows it."""
        return StopState(
            self.asked, self.name, self.asked_by, self.requeued, self.preempted, self.deadline, self.comes_back
        )


@dataclass(frozen=True)
class Job:
    """One start of a run's job.

    Attributes:
        run: the run's directory.
        spec: the run.
        environ: environment of the job; the ranks inherit it.
        job_id: Slurm's, or `local-N`.
        restart: how often Slurm has requeued the job.
        record: records an event; any thread may call it.
        stop: set when the run is asked to stop.
        pauses: times in which this process was stopped; the agents' heartbeat ticks.
    """

    run: RunDir
    spec: RunSpec
    environ: dict[str, str]
    job_id: str
    restart: int
    record: Callable[[Event], None]
    stop: JobStop = field(default_factory=JobStop)
    pauses: Pauses = field(default_factory=Pauses)

    @classmethod
    def of(cls, run: RunDir, environ: dict[str, str], record: Callable[[Event], None]) -> Job:
        """Return the job that this process runs in.

        Raises:
            ConfigError: config.json is missing or damaged, or this is not a job.
        """
        spec = load_spec(run.config)
        name = JOB_VARIABLE if spec.cluster.launcher == "slurm" else "ZSLURM_JOB_ID"
        if name not in environ:
            raise ConfigError(
                f"not inside a job: {name} is not set; `zslurm submit` starts a run and its supervisor"
            )
        # The batch script was asked to stop before this supervisor could be.
        asked = environ.get("ZSLURM_STOP")
        stop = JobStop(signal.Signals[f"SIG{asked}"] if asked else None)
        return cls(run, spec, environ, environ[name], restart_count(environ), record, stop)

    @cached_property
    def presence(self) -> Presence:
        """Shows whether the run directory is there, from the first look on."""
        return Presence(self.run.path, self.spec.aegis.run_dir_lost_s)

    @cached_property
    def exclusion_store(self) -> ExclusionStore | None:
        """The exclusions of the group, if the run shares them."""
        directory, cluster = self.spec.cluster.exclusions, cluster_name(self.environ)
        return ExclusionStore(Path(directory), cluster) if directory and cluster and self.on_slurm else None

    @property
    def on_slurm(self) -> bool:
        """Whether the job is one of Slurm."""
        return self.spec.cluster.launcher == "slurm"

    @property
    def slurm_id(self) -> str | None:
        """Slurm's job; None on the local launcher."""
        return self.job_id if self.on_slurm else None

    def pause(self, seconds: float) -> None:
        """Wait, unless the run is asked to stop."""
        until = time.monotonic() + seconds
        while not self.stop.asked and time.monotonic() < until:
            time.sleep(min(self.spec.aegis.poll_s, seconds))

    def look_for_preemption(self) -> bool:
        """Ask Slurm whether it preempts the job; record it when that is new.

        Returns:
            False if Slurm did not answer: then nothing is known, and asking again may help.
        """
        if self.slurm_id is None:
            return True
        client = SlurmClient(self.environ, timeout_s=_ANSWER_S, retries=Retries(attempts=2, first_pause_s=0.5))
        try:
            preemption = find_preemption(client, self.job_id, self.restart) if client.can_control() else None
        except SlurmUnavailable:
            return False
        except ZslurmError:  # this Slurm does not know the field, or not the job any more
            return True
        if preemption is None or preemption == self.stop.preemption:
            return True
        if self.stop.preemption is None:
            self.record(Preempted(mode=preemption.mode, preempt_time=preemption.time, ends_at=preemption.ends_at))
        self.stop.preemption = preemption
        return True

    def history(self) -> History:
        """Return what the run went through until now."""
        return history_of([*read_jsonl(self.run.events), *read_jsonl(self.run.submissions)])

    def excluded(self) -> set[str]:
        """Return the nodes that the run must not use now."""
        return set(active_exclusions(self.history().exclusions, time.time()))

    def returned(self) -> frozenset[str]:
        """Return the nodes that the run has excluded, and may use again."""
        return returned_nodes(self.history().exclusions, time.time())

    def is_left_by(self, event: Requeued) -> bool:
        """Return whether it is this start of the job that a requeue has ended."""
        return (event.job_id, event.restart) == (self.job_id, self.restart)

    def record_requeue(self, excluded: str, reason: str) -> None:
        """Record that the job was requeued without some nodes, unless this start of it has recorded it already.

        An earlier supervisor may have done so, and died before Slurm knew the nodes.
        """
        if not any(self.is_left_by(event) for event in select(read_jsonl(self.run.events), Requeued)):
            self.record(Requeued(excluded=excluded, reason=reason, restart=self.restart))

    def exclude(
        self,
        nodes: Collection[str],
        reason: str,
        attempt: int | None = None,
        *,
        for_s: float | None = None,
        is_private: bool = False,
    ) -> None:
        """Record that the run does not use some nodes for some time, by default for `aegis.exclude_for_s`.

        What an earlier supervisor has recorded of the same attempt is not recorded again, only shared with the
        group: it may have died before that. With `is_private` the group does not hear of it.
        """
        recorded = select(read_jsonl(self.run.events), NodesExcluded) if attempt is not None else ()
        alike = (e for e in recorded if (e.attempt, e.reason, e.nodes) == (attempt, reason, compress(nodes)))
        expires = time.time() + (self.spec.aegis.exclude_for_s if for_s is None else for_s)
        if (before := next(alike, None)) is not None:
            expires = before.expires or expires
        else:
            event = NodesExcluded(nodes=compress(nodes), reason=reason, expires=expires, attempt=attempt)
            self.record(only_known(event))
        if self.exclusion_store is not None and not is_private:
            try:
                self.exclusion_store.write(self.run.path, nodes, reason, time.time(), expires)
            except OSError as error:
                self._report_store(f"{self.spec.cluster.exclusions}: {error.strerror or error}")

    def follow_group(self) -> None:
        """Take over what the group's other runs exclude, and give up what they have given up (`take_over`)."""
        if self.exclusion_store is None:
            return
        try:
            contents = self.exclusion_store.read()
        except OSError as error:  # nothing is given up: the directory may only be away
            self._report_store(f"{self.spec.cluster.exclusions}: {error.strerror or error}")
            return
        for problem in contents.problems:
            self._report_store(problem)
        rows = [*read_jsonl(self.run.events), *read_jsonl(self.run.submissions)]
        events = select(rows, *EXCLUSION_EVENTS)
        for event in take_over(events, contents.exclusions, self.run.path, time.time()):
            if isinstance(event, NodesExcluded) or not contents.problems:  # a damaged file gives nothing up
                self.record(event)

    def _report_store(self, problem: str) -> None:
        """Record a problem with the group's exclusions, once in the life of the run."""
        failed = select(read_jsonl(self.run.events), SharedExclusionsFailed)
        if not any(event.reason == problem for event in failed):
            self.record(SharedExclusionsFailed(reason=problem))
