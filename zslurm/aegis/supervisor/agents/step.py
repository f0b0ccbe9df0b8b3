"""How agents are started and ended: on Slurm a step next to the training, elsewhere a child process.

Each method may wait for Slurm, which may be slow or away; call those that do so in a separate thread.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event

from zslurm.aegis.protocol import BATCH_NODE
from zslurm.aegis.supervisor.agents.link import AgentLink
from zslurm.config.spec import RunSpec
from zslurm.core.errors import SlurmUnavailable, ZslurmError
from zslurm.core.processes import ProcessRecord
from zslurm.run.run_dir import RunDir
from zslurm.slurm.client import SlurmClient
from zslurm.slurm.environment import in_job, scrubbed, step_environment, task_node
from zslurm.slurm.on_nodes.run_on_nodes import beside_ranks
from zslurm.slurm.run_command import Retries
from zslurm.slurm.version import why_not_shared

STEP_PREFIX = "agents-"
"""What the names of the agents' steps begin with; the generation follows."""

AGENT = (sys.executable, "-u", "-m", "zslurm.aegis.agent.main")

_ENDS_S = 1.0
"""Seconds that a command gets to end after its input was closed."""

_AGAIN_S = 5.0


@dataclass(frozen=True)
class AgentLauncher:
    """Starts and ends the agents of one generation.

    Attributes:
        spec: the run.
        run: its directory.
        job_id: the job that this process runs in.
        environ: the environment of the job.
        generation: of the supervisor.
        program: the command of one agent; the run's directory and options follow.
        over: set when the supervisor ends its agents: nothing is started or waited for any more.
        helper_of: the helper job of each node that belongs to one.
    """

    spec: RunSpec
    run: RunDir
    job_id: str
    environ: Mapping[str, str]
    generation: str
    program: tuple[str, ...]
    over: Event
    helper_of: Mapping[str, str] = field(default_factory=dict)

    @property
    def on_slurm(self) -> bool:
        """Whether agents run in steps of Slurm."""
        return self.spec.cluster.launcher == "slurm"

    def client(self) -> SlurmClient:
        """Return a client that gives up after a few seconds."""
        return SlurmClient(self.environ, timeout_s=10.0, retries=Retries(attempts=2))

    def blocking_reason(self) -> str | None:
        """Return why no agent can run here; None if they can."""
        if not self.on_slurm:
            return None
        try:
            why = why_not_shared(SlurmClient(self.environ, timeout_s=10.0).version())
        except ZslurmError as error:
            return str(error)
        return f"agents {why}" if why else None

    # --- start --------------------------------------------------------------------------------------------------

    def start(
        self, nodes: Sequence[str], number: int, attempt: int, on_line: Callable[[AgentLink, bytes], None]
    ) -> AgentLink:
        """Start an agent on each of these nodes, by one command.

        Args:
            nodes: where; all of them in the same job.
            number: of the command, counted from 1.
            attempt: that earlier agents have watched from its beginning; 0: none.
            on_line: called with each line of output, in a thread of the link.

        Raises:
            OSError: the command cannot be started.
        """
        name = f"{STEP_PREFIX}{self.generation}" + (f"-{number}" if number > 1 else "")
        command = [*self.program, str(self.run.path), f"--generation={self.generation}", f"--attempt={attempt}"]
        env = dict(self.environ)
        helper = self.helper_of.get(nodes[0])
        if self.on_slurm:
            command = in_job(agent_step(self.spec, nodes, name), helper) + command
            env = step_environment(self.environ) if helper is None else scrubbed(self.environ)
        env[BATCH_NODE] = task_node(self.environ) or ""
        link = AgentLink(command, env, nodes, name, on_line)
        if not self.on_slurm:
            with contextlib.suppress(OSError, ZslurmError):
                self._record_local(link)
        return link

    def _record_local(self, link: AgentLink) -> None:
        """End the local agent of an earlier supervisor, and write down which one is ours."""
        old = ProcessRecord.read(self.local_record)
        if old is not None and old.alive and old.pid != link.pid:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(old.pid, 9)
        ProcessRecord.of(link.pid).write(self.local_record)

    @property
    def local_record(self) -> Path:
        """The file that names the process of the local agent."""
        return self.run.path / "agent.json"

    # --- end ----------------------------------------------------------------------------------------------------

    def end(self, link: AgentLink) -> None:
        """End the agents of a link; on Slurm as soon as it answers."""
        link.close_input()
        ended = link.wait(_ENDS_S)
        if self.on_slurm and (link.has_reported or not ended):
            # An srun that has given up leaves its agents behind, and the controller may be away.
            gone = self.kill_steps([link.name])
            if not ended:
                link.kill()
            while not gone and not self.over.wait(_AGAIN_S):
                gone = self.kill_steps([link.name])
        elif not ended:
            link.kill()

    def kill_steps(self, names: Sequence[str]) -> bool:
        """Have Slurm end these steps; returns false if it did not answer."""
        try:
            for name in names:
                for job_id in dict.fromkeys((self.job_id, *self.helper_of.values())):
                    self.client().kill_step(job_id, name)
        except SlurmUnavailable:
            return False
        except ZslurmError:
            return True
        return True

    def end_older(self, job_id: str) -> None:
        """End the agents of earlier supervisors in this job, or in a helper job, as soon as Slurm answers."""
        while not self.over.is_set():
            try:
                client = self.client()
                own_prefix = f"{STEP_PREFIX}{self.generation}"
                for name in set(client.steps(job_id).values()):
                    if name.startswith(STEP_PREFIX) and not name.startswith(own_prefix):
                        client.kill_step(job_id, name)
                return
            except ZslurmError:
                self.over.wait(_AGAIN_S)


def agent_step(spec: RunSpec, nodes: Sequence[str], name: str) -> list[str]:
    """Return the srun command for one agent on each of these nodes, next to whatever runs there.

    The agents get the job's GPUs to look at them: with ConstrainDevices=yes a step sees only its own.
    """
    options = [*beside_ranks(nodes, name), "--no-kill", "--cpus-per-task=1", *spec.cluster.srun_gpu_options()]
    return ["srun", *options]
