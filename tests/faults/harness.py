"""A run on the test cluster, and everything that can be done to it while it trains."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
from torch.distributed import PrefixStore, TCPStore

from tests.faults.nodes import FaultNodes
from tests.on_slurm.cluster import processes
from tests.on_slurm.cluster.slurm_cluster import SlurmCluster
from tests.on_slurm.cluster.user import User
from tests.waiting import wait_for
from zslurm.run.run_dir import RunDir
from zslurm.train.jsonl import read_jsonl
from zslurm.train.recovery.generation import WARM

STEPS = 60
SAVE_EVERY = 10
NODES = 3
AT = 25
"""Faults happen after this step, unless a row says otherwise."""

# Ours is the default wherever that is seconds; what is minutes is shortened.
AEGIS: dict[str, Any] = {
    "grace_s": 15,
    "save_s": 20,
    "lost_peer_s": 60,
    "standby_s": 8,
    "tolerate_s": 30,
    "hang": {"setup_s": 120, "step_s": 6, "step_factor": 20, "save_s": 60, "eval_s": 60},
}
IN_MEMORY: dict[str, Any] = {"recovery": "auto", "recovery_s": 60}
"""Patient: under the load of the tests a recovery may take long, and is to be taken nevertheless."""
HOLD = AT - 5
"""Ranks wait before this step until the processes that may replace them are ready; see `FaultRun.let_go`."""
SENSORS: dict[str, Any] = {"period_s": 1.0, "progress_s": 0.5}

PARTITION = "small"

_OVER = {"completed", "failed"}
_DEADLINE_S = 420.0
_HOOK = Path(__file__).parent / "in_ranks"


class FaultRun:
    """One run; every method that does harm returns when the harm is done."""

    def __init__(
        self,
        user: User,
        nodes: FaultNodes,
        name: str,
        *,
        steps: int = STEPS,
        in_memory: bool = False,
    ) -> None:
        self.user, self.nodes, self.name, self.steps = user, nodes, name, steps
        self.in_memory = in_memory
        """Whether `aegis.recovery` is `memory`."""
        self.cluster: SlurmCluster = user.cluster
        self.path = user.directory / "runs" / name
        self.faults = user.directory / f"{name}-faults"
        self.written = self.path
        """Where its files are now: a fault may take its directory away."""
        self.struck = False
        """Whether a first fault has happened: a second one does not wait for step `AT`."""
        self._tmpfs: Path | None = None
        self._warm = 0

    # --- life ---------------------------------------------------------------------------------------------

    def submit(
        self,
        *,
        in_ranks: Sequence[dict[str, Any]] = (),
        pace_s: float = 0.1,
        nodes: int = NODES,
        slurm: dict[str, Any] | None = None,
        aegis: dict[str, Any] | None = None,
        checkpoint: dict[str, Any] | None = None,
        **sections: Any,
    ) -> None:
        """Submit it: one rank on each of `nodes` nodes, with the plan of what its ranks do to themselves."""
        self.faults.mkdir()
        shutil.chown(self.faults, self.cluster.user.pw_uid)
        plan = {"pace_s": pace_s, "hold": HOLD if self.in_memory else None, "faults": list(in_ranks)}
        (self.faults / "plan.json").write_text(json.dumps(plan))
        settings: dict[str, Any] = {"ranks_per_node": 1, "time": "30:00"} | (slurm or {})
        self._warm = nodes + settings.get("spares", 0) * settings["ranks_per_node"]
        mine = self.nodes.settings()
        hook = self.cluster.installation().sources / "tests" / "faults" / _HOOK.name
        env = mine["cluster"].pop("env") | {"PYTHONPATH": str(hook), "ZSLURM_TEST_FAULTS": str(self.faults)}
        run_file = self.user.write_run(
            self.name,
            steps=self.steps,
            nodes=nodes,
            trainer="real",
            forked_ranks=self.user.forks,
            slurm=settings,
            cluster=mine["cluster"] | {"env": env},
            # The GPUs of the profile are not there: ranks compute on the CPU, so that is what a test tests.
            parallel={"dtype": "fp32", "threads": 1, "device": "cpu"},
            checkpoint={"every_steps": SAVE_EVERY} | (checkpoint or {}),
            aegis=AEGIS
            | {"sensors": SENSORS | mine["sensors"]}
            | (IN_MEMORY if self.in_memory else {})
            | (aegis or {}),
            **sections,
        )
        self.user.zslurm("submit", run_file)

    def let_go(self) -> None:
        """Let held ranks continue, once a process waits on every node that the run has, spares included."""
        self.wait_until_warm()
        (self.faults / "go").touch()

    def wait_until_warm(self, *, more: int = 0) -> None:
        """Wait for the processes that may replace a lost rank: all that an attempt starts, and `more`."""
        wait_for(
            lambda: (
                self.ended() or (self.events("recovery_ready") and self._warm_processes() >= self._warm + more)
            ),
            f"warm processes; so far {self.events('recovery_failed', 'recovery_unavailable')}",
            deadline_s=_DEADLINE_S,
            every_s=0.2,
        )

    def _warm_processes(self) -> int:
        """How many have registered in the store of the present attempt, those that have become ranks included."""
        address = json.loads(RunDir(self.path).attempt(self.attempt()).rendezvous.read_text())
        store = TCPStore(address["host"], int(address["port"]), is_master=False, wait_for_workers=False)
        return PrefixStore(address["secret"], store).add(WARM, 0)

    def recoveries(self) -> list[dict[str, Any]]:
        """Its recoveries in memory."""
        return self.events("recovered_in_memory")

    def wait_until_recovered(self, count: int = 1) -> dict[str, Any]:
        """Wait for its `count`-th recovery in memory."""

        def recovered() -> dict[str, Any] | None:
            assert self.ended() is None, f"{self.name} ended before recovery {count} in memory"
            return next(iter(self.recoveries()[count - 1 :]), None)

        return wait_for(recovered, f"recovery {count} of {self.name}", deadline_s=_DEADLINE_S)

    def wait_until_joined(self, count: int = 1) -> dict[str, Any]:
        """Wait until ranks have joined for the `count`-th time."""

        def joined() -> dict[str, Any] | None:
            assert self.ended() is None, f"{self.name} ended before ranks joined it {count} times"
            return next(iter(self.events("ranks_joined")[count - 1 :]), None)

        return wait_for(joined, f"ranks to join {self.name}", deadline_s=_DEADLINE_S)

    def lift_time_limit(self, since: float) -> None:
        """Give the job as long as it needs once it was requeued for its limit, which was to happen once."""

        def requeued() -> bool:
            return any(event["time"] >= since for event in self.events("requeued"))

        wait_for(lambda: requeued() or self.ended(), f"{self.name} to be requeued", deadline_s=_DEADLINE_S)
        if requeued():
            argv = ["scontrol", "update", f"JobId={self.job_id()}", "TimeLimit=60"]
            self.cluster.run_as_root(argv)

    def wait_until_over(self) -> dict[str, Any]:
        """The event of its end. Nobody helps it."""

        return wait_for(self.ended, f"{self.name} to end", deadline_s=_DEADLINE_S)

    def ended(self) -> dict[str, Any] | None:
        """The event of its end; None while it continues, or is to continue."""
        return next((event for event in self.events("run_ended")[::-1] if event["outcome"] in _OVER), None)

    def job_state(self) -> str:
        """What Slurm calls its job; empty if it does not know it, or does not answer."""
        argv = ["squeue", "--noheader", "--states=all", "-o", "%T", "-j", self.job_id()]
        return self.cluster.run(argv, env=self.cluster.impatient, check=False).stdout.strip()

    def hasten(self) -> None:
        """Let a job that was requeued start now: Slurm holds it back for two minutes, as every requeued one."""
        if self.job_state() == "PENDING":
            argv = ["scontrol", "update", f"JobId={self.job_id()}", "StartTime=now"]
            self.cluster.run(argv, check=False)  # it may have started, or be held while its supervisor changes it

    def wait_until_idle(self) -> dict[str, Any]:
        """Its state, once Slurm has nothing more to do for it."""
        wait_for(lambda: not self.user.state(self.name)["active"], f"the job of {self.name} to end")
        return self.user.state(self.name)

    def make_partition(self, nodes: str) -> str:
        """A partition of these nodes; returns its name."""
        options = [f"PartitionName={PARTITION}", f"Nodes={nodes}", "State=UP", "MaxTime=1-0"]
        self.cluster.run_as_root(["scontrol", "create", *options])
        return PARTITION

    def cleanup(self) -> None:
        """Give the tmpfs back, if one was made."""
        if self._tmpfs is not None:
            subprocess.run(["umount", "--lazy", str(self._tmpfs)], check=True)
            self._tmpfs = None

    # --- what it did --------------------------------------------------------------------------------------

    def events(self, *kinds: str) -> list[dict[str, Any]]:
        """Its events of these kinds, or all."""
        events = read_jsonl(self.written / "events.jsonl")
        return [event for event in events if not kinds or event["event"] in kinds]

    def metrics(self, kind: str) -> list[dict[str, Any]]:
        """Lines of metrics.jsonl."""
        return [row for row in read_jsonl(self.written / "metrics.jsonl") if row["kind"] == kind]

    def marks(self, *kinds: str) -> list[dict[str, Any]]:
        """What its ranks noted by themselves; see in_ranks/sitecustomize.py."""
        return [mark for mark in read_jsonl(self.faults / "marks.jsonl") if not kinds or mark["mark"] in kinds]

    def committed(self) -> list[dict[str, Any]]:
        """Its commits of checkpoints."""
        return [row for row in self.metrics("checkpoint") if row["state"] == "COMMITTED"]

    def attempt(self) -> int:
        """Number of the present attempt."""
        return int(self.events("attempt_started")[-1]["attempt"])

    def job_id(self) -> str:
        return str(self.events("attempt_started")[-1]["job_id"])

    def node_of(self, rank: int) -> str:
        """Where a rank of the newest attempt runs or, while that has not come so far, where it ran before."""
        return str([mark for mark in self.marks() if mark["rank"] == rank][-1]["node"])

    def story(self) -> str:
        """What a person needs in order to see why a row failed."""
        log = "\n".join(
            path.read_text(errors="replace")[-6000:] for path in sorted(self.written.glob("logs/job-*"))
        )
        queue = self.cluster.run(["squeue", "--noheader", "-o", "%i %T %r %N"], check=False).stdout
        return f"--- supervisor\n{log}\n--- queue\n{queue}"

    def left_over(self) -> list[psutil.Process]:
        """Living processes of its ranks and agents."""
        words = f"{self.path}"
        return [
            process
            for process in processes.members(self.cluster.instance)
            if any(words in argument for argument in _command(process))
        ]

    # --- waiting for the moment -----------------------------------------------------------------------------

    def wait_for_step(self, step: int = AT, *, attempt: int = 1) -> None:
        if self.struck:
            return
        wait_for(
            lambda: any(row["step"] >= step and row["attempt"] >= attempt for row in self.metrics("step")),
            f"{self.name} to take step {step} in attempt {attempt}",
            deadline_s=_DEADLINE_S,
        )

    def wait_for_event(self, kind: str) -> dict[str, Any]:
        def seen() -> dict[str, Any] | None:
            return next(iter(self.events(kind)), None)

        return wait_for(seen, f"{self.name} to record {kind}")

    def wait_for_mark(self, kind: str = "fault", what: str | None = None) -> float:
        """When the first mark of a kind was made, or that of one fault; for what happens inside the ranks."""

        def made() -> float | None:
            marks = (mark for mark in self.marks(kind) if what in (None, mark.get("fault")))
            return next((float(mark["time"]) for mark in marks), None)

        return wait_for(made, f"{self.name} to note {what or kind}")

    def log_of(self, rank: int) -> str:
        """What a rank of the present attempt has printed."""
        return RunDir(self.path).attempt(self.attempt()).rank_log(rank).read_text(errors="replace")

    def wait_until_gone(self, pid: int) -> None:
        """Wait for the end of a process."""
        wait_for(lambda: not psutil.pid_exists(pid), f"process {pid} to end")

    # --- processes ------------------------------------------------------------------------------------------

    def rank(self, rank: int) -> psutil.Process:
        """The process of a rank of the present attempt; of one that was replaced in memory, the new process."""
        if self.in_memory:
            return psutil.Process([mark for mark in self.marks("loaded") if mark["rank"] == rank][-1]["pid"])
        wanted = [str(self.path), str(self.attempt())]
        (found,) = [
            process
            for process in processes.members(self.cluster.instance)
            if "zslurm.job.rank" in (words := _command(process))
            and words[-2:] == wanted
            and "python" in words[0]
            and process.environ().get("SLURM_PROCID") == str(rank)
        ]
        return found

    def agent(self, node: str) -> psutil.Process:
        """The agent of a node."""
        (found,) = [
            process
            for process in processes.members(self.cluster.instance)
            if "zslurm.aegis.agent.main" in (words := _command(process))
            and str(self.path) in words
            and "python" in words[0]
            and process.environ().get("SLURMD_NODENAME") == node
            and process.environ().get("SLURM_PROCID") is not None
        ]
        return found

    def agents_srun(self) -> psutil.Process:
        """The srun of the agents, on the node of the supervisor."""
        (found,) = [
            process
            for process in processes.members(self.cluster.instance)
            if (words := _command(process))[0] == "srun"
            and any(word.startswith("--job-name=agents-") for word in words)
            and str(self.path) in words
            and "srun" not in _command(process.parent() or process)[0]
        ]
        return found

    def signal_rank(self, rank: int, signum: signal.Signals = signal.SIGKILL) -> float:
        process = self.rank(rank)
        now = time.time()
        process.send_signal(signum)
        return now

    def kill_supervisor(self) -> float:
        record = json.loads((self.written / "supervisor.json").read_text())
        now = time.time()
        os.kill(record["pid"], signal.SIGKILL)
        return now

    def supervisors(self) -> list[psutil.Process]:
        """Its living supervisors, without what they start."""
        found = {
            process.pid: process
            for process in processes.members(self.cluster.instance)
            if "submitit.core._submit" in (words := _command(process)) and str(self.path) in " ".join(words)
        }
        return [process for process in found.values() if _parent(process) not in found]

    # --- files ----------------------------------------------------------------------------------------

    def move_away(self) -> None:
        """Take its directory away, as a user who tidies up does."""
        self.written = self.path.with_name(f"{self.name}-moved")
        self.path.rename(self.written)

    def damage_newest_checkpoint(self) -> int:
        """Flip bits in the middle of a shard of the newest checkpoint; returns its step."""
        newest = sorted((self.path / "checkpoints").glob("step-*"))[-1]
        shard = sorted(newest.glob("shard-*"))[1]
        with shard.open("r+b") as file:
            file.seek(shard.stat().st_size // 2)
            word = file.read(8)
            file.seek(-len(word), os.SEEK_CUR)
            file.write(bytes(byte ^ 0xFF for byte in word))
        return int(newest.name.partition("-")[2])

    def put_checkpoints_on_small_disk(self, megabytes: float) -> None:
        """Give `checkpoints` a file system of its own, before the run is submitted.

        Raises:
            subprocess.CalledProcessError: this machine does not let us mount.
        """
        place = self.path / "checkpoints"
        for directory in (self.path.parent, self.path, place):
            directory.mkdir(exist_ok=True)
            shutil.chown(directory, self.cluster.user.pw_uid, self.cluster.user.pw_gid)
        uid = self.cluster.user.pw_uid
        options = f"size={int(megabytes * 1024)}k,uid={uid},gid={self.cluster.user.pw_gid},mode=700"
        subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)], check=True)
        self._tmpfs = place

    def fill_disk(self) -> Path:
        """Fill that file system; returns the file whose removal frees it."""
        filler = self.path / "checkpoints" / "filler"
        with filler.open("wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(64 * 1024))
            except OSError:
                pass
        return filler


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline() or [""]
    except psutil.Error:
        return [""]


def _parent(process: psutil.Process) -> int | None:
    try:
        return process.ppid()
    except psutil.Error:
        return None
