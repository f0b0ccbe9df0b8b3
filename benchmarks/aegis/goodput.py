"""Goodput of runs that meet the same faults: zslurm with Aegis, plain `sbatch --requeue`, and submitit's requeue.

All of them train the same model with the same trainer, on two nodes each of one real Slurm (the tests' one, on
this machine; needs root), at the same time, so a slow minute hits all. Three faults come to each in turn: the node
of its second rank dies, that rank is killed, and its node dies again. A dead node is back after a minute. Each
step takes a quarter of a second longer than it must, so that the cores of this machine do not run short.

    zslurm            one spare, mode act
    sbatch            `sbatch --requeue` of an srun
    sbatch, requeues  the same, and the script's last line requeues the job if srun failed, as those of
                      torchx and NeMo-Run do
    submitit          its executor on the same command, with its checkpointing and `--requeue`

Goodput is the share of the time from submission to the end of the measurement that became steps that are kept: the
highest step that was reached, times the median time of a step of all contenders.
"""

from __future__ import annotations

import json
import shlex
import shutil
import signal
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil

from benchmarks.common import write_result
from tests.faults.harness import FaultRun
from tests.faults.nodes import FaultNodes
from tests.on_slurm.cluster import processes
from tests.on_slurm.cluster.slurm_cluster import SlurmCluster
from tests.on_slurm.cluster.user import User
from tests.train.runs import STEP_TOKENS, make_run
from tests.waiting import wait_for
from zslurm.train.jsonl import read_jsonl

NODES = 2
PACE_S = 0.25
SAVE_EVERY = 20
FAULTS = ("node dies", "rank killed", "node dies")
WHEN = (0.1, 0.4, 0.75)
"""Each fault comes after this share of the time: a job that Slurm requeues waits for two minutes and more."""
BETWEEN_S = 15.0
"""Between the faults of two contenders: they share the cores on which each imports torch again."""
BACK_AFTER_S = 60.0

# What srun or submitit starts on each node: the variables that torchrun would set.
_RANK = """\
export RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=$SLURM_LOCALID LOCAL_WORLD_SIZE=1
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1) MASTER_PORT={port}
export PYTHONPATH={hook} ZSLURM_TEST_FAULTS={faults} PYTHONSAFEPATH=1
exec {python} -u -m zslurm.train {run}
"""
_SUBMITIT = """\
import submitit

class Train(submitit.helpers.Checkpointable):
    def __call__(self):
        submitit.helpers.CommandFunction(["bash", "-c", {command!r}], verbose=False)()

executor = submitit.SlurmExecutor({folder!r})
executor.update_parameters(
    nodes={nodes}, ntasks_per_node=1, time=60, job_name="submitit", exclusive=True,
    additional_parameters={{"requeue": True}},
)
print(executor.submit(Train()).job_id)
"""


@dataclass
class Contender:
    """One way to run the trainer.

    Attributes:
        name: as the result shows it.
        run: the run's directory.
        faults: where its ranks leave their marks; see tests/faults/in_ranks.
        submitted: UNIX seconds.
        recoveries: what became of each fault.
    """

    name: str
    cluster: SlurmCluster
    run: Path
    faults: Path
    submitted: float
    recoveries: list[dict[str, Any]] = field(default_factory=list)

    def marks(self, kind: str) -> list[dict[str, Any]]:
        return [mark for mark in read_jsonl(self.faults / "marks.jsonl") if mark["mark"] == kind]

    def steps(self) -> list[dict[str, Any]]:
        return [row for row in read_jsonl(self.run / "metrics.jsonl") if row["kind"] == "step"]

    def rank(self, rank: int) -> psutil.Process | None:
        """The process of a rank; None if the contender has none."""
        for process in processes.members(self.cluster.instance):
            try:
                words = process.cmdline()
                trains = {"train", "zslurm.job.rank"} & set(words) and str(self.run) in words
                if trains and "python" in words[0] and process.environ().get("SLURM_PROCID") == str(rank):
                    return process
            except psutil.Error:
                continue
        return None

    def suffer(self, fault: str) -> str | None:
        """The fault; returns the node that died. A contender that does not train is spared, and has it noted."""
        victim = self.rank(1)
        now, node = time.time(), None
        if victim is None:
            self.recoveries.append({"fault": fault, "time": now, "met": False})
            return None
        if fault == "node dies":
            node = victim.environ()["SLURMD_NODENAME"]
            self.cluster.kill_node(node)
        else:
            victim.send_signal(signal.SIGKILL)
        self.recoveries.append({"fault": fault, "time": now, "met": True, "step": self.steps()[-1]["step"]})
        return node

    def step_times(self) -> list[float]:
        """Seconds between two steps of the same attempt."""
        pairs = pairwise(self.steps())
        return [later["time"] - row["time"] for row, later in pairs if later["attempt"] == row["attempt"]]

    def result(self, end: float, step_s: float) -> dict[str, Any]:
        """Return the goodput with steps of `step_s`, and the way back from each fault by part."""
        rows = self.steps()
        kept = max(row["step"] for row in rows)
        return {
            "name": self.name,
            "goodput": round(kept * step_s / (end - self.submitted), 3),
            "kept_steps": kept,
            "steps_made_again": len(rows) - len({row["step"] for row in rows}),
            "faults": [self._recovery(found) for found in self.recoveries],
        }

    def _recovery(self, found: dict[str, Any]) -> dict[str, Any]:
        """Seconds from a fault to the first new step: the last rank counts."""
        figures: dict[str, Any] = {"fault": found["fault"]}
        if not found["met"]:
            return figures | {"outcome": "it did not train then"}
        moments, before, parts = ("python", "imported", "loaded", "stepped"), found["time"], {}
        after = {kind: [m for m in self.marks(kind) if m["time"] > found["time"]] for kind in moments}
        if not after["stepped"]:
            return figures | {"outcome": "it did not train again"}
        attempt = after["stepped"][0]["attempt"]
        for part, kind in zip(("until Python runs", "import", "load", "first step"), moments, strict=True):
            moment = max(mark["time"] for mark in after[kind] if mark["attempt"] == attempt)
            parts[part] = round(max(0.0, moment - before), 2)
            before = max(before, moment)
        return figures | {"parts_s": parts, "to_first_new_step_s": round(sum(parts.values()), 2)}


class Site:
    """The cluster, and how each contender is submitted on it."""

    def __init__(self, cluster: SlurmCluster, steps: int) -> None:
        self.cluster, self.steps = cluster, steps
        self.user = User(cluster, cluster.user_dir("goodput"))
        self.nodes = FaultNodes(cluster, cluster.user_dir("nodes"))
        self.user.zslurm("init", "--yes")
        installed = cluster.installation()
        self.python = installed.python
        self.hook = installed.sources / "tests" / "faults" / "in_ranks"

    def zslurm(self) -> Contender:
        run = FaultRun(self.user, self.nodes, "zslurm", steps=self.steps)
        now = time.time()
        run.submit(
            pace_s=PACE_S,
            nodes=NODES,
            slurm={"spares": 1, "time": "60:00"},
            checkpoint={"every_steps": SAVE_EVERY},
        )
        return Contender("zslurm", self.cluster, run.path, run.faults, now)

    def sbatch(self, name: str, port: int, tail: str = "exit $code") -> Contender:
        contender, command = self._plain(name, port)
        script = f"srun --kill-on-bad-exit=1 bash -c {shlex.quote(command)}\ncode=$?\n{tail}"
        options = [f"--nodes={NODES}", "--ntasks-per-node=1", "--time=60", "--exclusive", "--requeue"]
        self.cluster.sbatch(script, f"--job-name={contender.run.name}", *options, cwd=self.user.directory)
        return contender

    def submitit(self, port: int) -> Contender:
        contender, command = self._plain("submitit", port)
        folder = str(self.user.directory / "submitit")
        script = _SUBMITIT.format(command=command, folder=folder, nodes=NODES)
        self.cluster.run([self.python, "-P", "-c", script], cwd=self.user.directory)
        return contender

    def _plain(self, name: str, port: int) -> tuple[Contender, str]:
        """The run directory and plan of one run; and the command of each rank."""
        folder = name.replace(", ", "-")
        run, faults = self.user.directory / folder, self.user.directory / f"{folder}-faults"
        phase = {"tokens": self.steps * STEP_TOKENS, "final_lr": 0, "micro_batch": 1}
        make_run(
            run,
            self.user.directory / "tokens.h5",
            phase=phase,
            checkpoint={"every_steps": SAVE_EVERY, "background": True},
        )
        faults.mkdir()
        (faults / "plan.json").write_text(json.dumps({"pace_s": PACE_S, "faults": []}))
        for path in (run, run / "config.json", faults):
            shutil.chown(path, self.cluster.user.pw_uid, self.cluster.user.pw_gid)
        command = _RANK.format(port=port, hook=self.hook, faults=faults, python=self.python, run=run)
        return Contender(name, self.cluster, run, faults, time.time()), command


def run(minutes: float = 10.0) -> None:
    """Measure and write results/goodput.json."""
    seconds = minutes * 60
    with SlurmCluster(nodes=12) as cluster:
        site = Site(cluster, steps=int(2 * seconds / PACE_S))
        requeue = '[ "$code" = 0 ] || scontrol requeue "$SLURM_JOB_ID"; exit $code'
        contenders = [
            site.zslurm(),
            site.sbatch("sbatch", 29511),
            site.sbatch("sbatch, requeues", 29512, requeue),
            site.submitit(29513),
        ]
        for contender in contenders:
            wait_for(contender.steps, f"{contender.name} to train")
        began = time.time()
        _let_them_suffer(cluster, contenders, began, seconds)
        end = time.time()
        step_s = statistics.median(gap for contender in contenders for gap in contender.step_times())
        results = [contender.result(end, step_s) for contender in contenders]
        cluster.run(["scancel", "--user", cluster.user.pw_name])
    write_result(
        "goodput",
        {
            "minutes": minutes,
            "faults": list(FAULTS),
            "seconds_until_slurm_notices_a_dead_node": "10 to 20 (SlurmdTimeout 10; sites have 300)",
            "checkpoint_every_steps": SAVE_EVERY,
            "median_step_s": round(step_s, 3),
            "contenders": results,
        },
    )


def _let_them_suffer(cluster: SlurmCluster, contenders: Sequence[Contender], began: float, seconds: float) -> None:
    """Every fault at its time, to each contender; dead nodes come back; returns when the time is over."""
    todo = sorted(
        (began + share * seconds + place * BETWEEN_S, fault, place)
        for share, fault in zip(WHEN, FAULTS, strict=True)
        for place in range(len(contenders))
    )
    back: list[tuple[float, str]] = []
    while (now := time.time()) < began + seconds:
        if todo and now >= todo[0][0]:
            _, fault, place = todo.pop(0)
            if (node := contenders[place].suffer(fault)) is not None:
                back.append((now + BACK_AFTER_S, node))
        if back and now >= back[0][0]:
            cluster.start_node(back.pop(0)[1])
        time.sleep(0.1)
