"""The supervisor's lease of its run: which supervisor is the present one, and that it is alive.

RUN/supervisor.json names the supervisor's process and, before its agents start, their generation. The supervisor
renews the file's modification time every few seconds. So an agent that hears nothing over its pipe can
distinguish three cases without asking Slurm: its generation was replaced; its supervisor is alive, and only the
pipe between them is broken; or the lease has lapsed, because the supervisor or its node is gone.

Clocks of nodes differ, so no time is compared with a clock: an agent watches whether the modification time
changes. The file is opened for each look, because NFS asks its server then, and answers from its cache otherwise.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from zslurm.core.files import write_atomically
from zslurm.core.processes import ProcessRecord
from zslurm.run.run_dir import RunDir

RENEW_S = 3.0
"""Seconds between two renewals."""

LAPSED_S = 12.0
"""Seconds without a renewal, watched by an agent, after which the lease has lapsed."""


@dataclass(frozen=True)
class Lease:
    """The lease as it is in the file.

    Attributes:
        fields: the supervisor's process, and the generation of its agents once they are about to start.
        renewed: modification time, in nanoseconds.
    """

    fields: Mapping[str, Any]
    renewed: int

    @property
    def generation(self) -> str | None:
        """The generation; None if the supervisor has not started its agents yet."""
        value = self.fields.get("generation")
        return value if isinstance(value, str) and value else None

    @property
    def is_own(self) -> bool:
        """Whether no other process holds it; false if another supervisor has started since."""
        holder, me = ProcessRecord.of_fields(self.fields), ProcessRecord.of(os.getpid())
        return holder is None or (holder.pid, holder.host, holder.started) == (me.pid, me.host, me.started)


def take(run: RunDir, generation: str) -> None:
    """Make this process the supervisor of the run whose agents are of this generation.

    Raises:
        OSError: the run directory cannot be written.
    """
    body = {**asdict(ProcessRecord.of(os.getpid())), "generation": generation}
    write_atomically(run.supervisor, json.dumps(body) + "\n")


def read(run: RunDir) -> Lease | None:
    """Return the lease; None if there is none, or the file is damaged.

    Raises:
        OSError: the run directory cannot be read.
    """
    try:
        with run.supervisor.open("rb") as file:
            renewed = os.fstat(file.fileno()).st_mtime_ns
            fields = json.loads(file.read())
    except (FileNotFoundError, ValueError):
        return None
    return Lease(fields, renewed) if isinstance(fields, dict) else None


def renew(run: RunDir, generation: str) -> bool:
    """Renew the lease of a generation; returns false if it is another's by now.

    Raises:
        OSError: the run directory cannot be written.
    """
    lease = read(run)
    if lease is None or lease.generation != generation:
        return False
    os.utime(run.supervisor)
    return True


@dataclass
class LeaseWatch:
    """What one agent has seen of the lease. Look at it regularly, and only then ask.

    Attributes:
        generation: of the agent; empty if unknown.
        clock: monotonic seconds.
    """

    generation: str
    clock: Callable[[], float] = time.monotonic
    _renewed: int | None = None
    _since: float | None = None
    _changed: float | None = None
    _holder: str | None = None
    _ours: set[int] = field(default_factory=set)

    def look(self, run: RunDir) -> None:
        """Look at the file.

        Raises:
            OSError: the run directory cannot be read; nothing new is known.
        """
        self.feed(read(run))

    def feed(self, lease: Lease | None) -> None:
        """Take what a look found."""
        now = self.clock()
        self._since = now if self._since is None else self._since
        if lease is None:
            return
        self._holder = lease.generation
        is_news = self._renewed is not None and lease.renewed != self._renewed and lease.renewed not in self._ours
        # A supervisor that has no agents yet is another one: what it writes is no renewal of this agent's own.
        if is_news and (not self.generation or self._holder == self.generation):
            self._changed = now
        self._renewed = lease.renewed

    def vouch(self, run: RunDir) -> None:
        """Renew the lease for a supervisor that was seen alive, so that the agents of other nodes know of it.

        Raises:
            OSError: the run directory cannot be written.
        """
        if renew(run, self.generation) and (lease := read(run)) is not None:
            self._ours = {lease.renewed}

    def rest(self) -> None:
        """Forget what was seen: the supervisor was heard again."""
        self._renewed = self._since = self._changed = None

    @property
    def replaced(self) -> bool:
        """Whether the lease is another generation's."""
        return bool(self.generation) and self._holder is not None and self._holder != self.generation

    @property
    def is_renewed(self) -> bool:
        """Whether the supervisor has renewed it lately: it is alive."""
        return self._changed is not None and self.clock() - self._changed < LAPSED_S

    @property
    def has_lapsed(self) -> bool:
        """Whether it was watched for long enough, and was not renewed."""
        since = self._since if self._changed is None else self._changed
        return since is not None and self.clock() - since >= LAPSED_S
