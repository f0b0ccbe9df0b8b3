"""A run whose supervisor is silent, for tests of the standby supervisor: its job, and a scripted Slurm."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from tests.slurm.recordings import recorded
from tests.submit.specs import run_spec
from zslurm.aegis.agent.standby import StandbySupervisor
from zslurm.core.errors import SlurmUnavailable
from zslurm.core.processes import ProcessRecord
from zslurm.run.events import Submitted
from zslurm.run.run_dir import RunDir
from zslurm.slurm.client import SlurmClient
from zslurm.slurm.inventory import Node
from zslurm.slurm.jobs import JobRecord, parse_queue
from zslurm.slurm.states import JobState
from zslurm.submit.submit import record_action
from zslurm.train.jsonl import read_jsonl

RECORD = replace(
    parse_queue(recorded.SQUEUE)["4"],
    job_id="12", state=JobState.RUNNING, restarts=0, n_nodes=3, partition="main",
)  # fmt: skip
AWAY = SlurmUnavailable("the Slurm controller does not answer (4 tries): squeue: error: Unable to contact")


def no_command(program: str) -> SlurmUnavailable:
    return SlurmUnavailable(f"{program}: not found on PATH; run this on a machine of the Slurm cluster")


NEVER = 10**6


class ScriptedClient(SlurmClient):
    """A Slurm with one job, three nodes of it and some others; errors in `fails` are raised once each, by name."""

    def __init__(self, others: int = 2) -> None:
        super().__init__({"PATH": "/nowhere"})
        self.record: JobRecord | None = RECORD
        self.others = others
        self.done: list[tuple[str, ...]] = []
        self.fails: dict[str, list[Exception]] = {}
        self.handlers: list[object] = []
        self.excluded = "node8"
        self.notices_after = 0
        """So often Slurm is asked before it calls the dead batch node down."""

    def _do(self, name: str, *words: str) -> None:
        if self.fails.get(name):
            raise self.fails[name].pop(0)
        self.done.append((name, *words))
        self.handlers.append(signal.getsignal(signal.SIGTERM))

    def _becomes(self, state: JobState) -> None:
        assert self.record is not None
        self.record = replace(self.record, state=state)

    def queue(self, job_ids: object = None, user: str | None = None) -> dict[str, JobRecord]:
        if self.fails.get("queue"):
            raise self.fails["queue"].pop(0)
        return {} if self.record is None else {self.record.job_id: self.record}

    def excluded_nodes(self, job_id: str) -> str:
        return self.excluded

    def nodes(self) -> list[Node]:
        names = [*(f"node{number}" for number in range(3 + self.others)), "node8"]
        states = {"node0": "allocated" if self.notices_after else "down"}
        self.notices_after = max(0, self.notices_after - 1)
        return [Node(name, states.get(name, "idle"), frozenset(), 8, None, 96, 1, ("main",), "") for name in names]

    def scontrol_config(self) -> dict[str, str]:
        return {"SlurmdTimeout": "300 sec"}

    def requeue(self, job_id: str) -> None:
        self._do("requeue", job_id)
        self._becomes(JobState.PENDING)

    def update(self, job_id: str, **settings: str) -> None:
        self._do("update", job_id, *(f"{name}={value}" for name, value in settings.items()))
        self.excluded = settings["ExcNodeList"]

    def cancel(self, job_id: str) -> None:
        self._do("cancel", job_id)


class Job:
    """A run whose job 12 runs on node0 to node2, its supervisor on node0."""

    def __init__(self, directory: Path) -> None:
        spec = run_spec(directory, cluster={"name": "lab", "launcher": "slurm"})
        self.run = RunDir(directory / "runs" / "tiny")
        self.run.create(group_readable=False)
        self.run.config.write_text(spec.model_dump_json())
        self.spec = spec
        record_action(self.run, Submitted(job_id="12"), spec)
        ProcessRecord.of(os.getpid()).write(self.run.supervisor)
        self.client = ScriptedClient()
        self.now, self.unheard_s, self._renewals = 100.0, 0.0, 0
        self.slept: list[float] = []
        self.while_asleep: Callable[[], None] = lambda: None

    def _sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.while_asleep()

    def standby(self, node: str = "node1", *, generation: str = "", **environ: str) -> StandbySupervisor:
        own = {
            "SLURM_JOB_ID": "12", "SLURM_JOB_NODELIST": "node[0-2]", "SLURMD_NODENAME": node,
            "ZSLURM_BATCH_NODE": "node0",
        }  # fmt: skip
        return StandbySupervisor(
            self.run, own | environ, 20.0,
            generation=generation, client=self.client, sleep=self._sleep, clock=lambda: self.now,
        )  # fmt: skip

    def unheard_for(
        self, standby: StandbySupervisor, seconds: int, *, hung_up: bool = False, renewed: bool = False
    ) -> bool:
        """An agent's questions in seconds without a word of the supervisor; returns whether the agent ends."""
        for _ in range(seconds):
            self.now += 1.0
            self.unheard_s += 1.0
            if renewed:
                self.renew()
            if standby.on_missed_heartbeats(self.unheard_s, hung_up):
                return True
        return False

    def renew(self) -> None:
        """As the supervisor does."""
        self._renewals += 1
        os.utime(self.run.supervisor, ns=(self._renewals, self._renewals))

    def events(self) -> list[dict[str, object]]:
        return list(read_jsonl(self.run.events))

    def leases(self) -> list[str]:
        return sorted(path.name for path in self.run.path.glob("deputy-*"))


def check(holds: bool, what: str) -> None:
    assert holds, what
