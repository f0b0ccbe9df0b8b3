"""In a Slurm job of a test: a supervisor that only watches, and ranks that only walk in step.

    python -m tests.on_slurm.cluster.agent_driver watch RUN_DIR      what the batch script runs
    python -m tests.on_slurm.cluster.agent_driver rank RUN_DIR       a task of the step that it starts

The ranks keep the progress records of real ones, and none continues before all have come as far; they meet in
files of the shared directory. What the watcher hears and finds lies in RUN_DIR/watched.jsonl.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from zslurm.aegis.core.attempt import AttemptState
from zslurm.aegis.core.detection.detector import Detector
from zslurm.aegis.core.messages import AskAbout, Record, Tick
from zslurm.aegis.core.step import step
from zslurm.aegis.supervisor.agents.agents import Agents
from zslurm.config.load import load_spec
from zslurm.core.processes import ProcessRecord
from zslurm.run.events import FaultDetected
from zslurm.run.run_dir import RunDir
from zslurm.slurm.environment import step_environment
from zslurm.slurm.hostlist import expand
from zslurm.train.jsonl import JsonLinesWriter
from zslurm.train.progress import Phase, ProgressWriter

STEP_S, LOOK_S = 0.3, 0.2
RANKS_PER_NODE = 2


def watch(run: RunDir) -> None:
    """Start ranks and agents, and write down what becomes of them; never ends."""
    spec = load_spec(run.config)
    nodes = expand(os.environ["SLURM_JOB_NODELIST"])
    ProcessRecord.of(os.getpid()).write(run.supervisor)
    restarted = (run.path / "watched.jsonl").exists()
    with JsonLinesWriter(run.path / "watched.jsonl") as rows:

        def write(kind: str, **fields: object) -> None:
            rows.append({"time": time.time(), "kind": kind, **fields})

        write("watcher", pid=os.getpid(), restarted=restarted)
        agents, detector = (
            Agents(spec.aegis, lambda event: write(event.NAME, **event.fields())),
            Detector(spec.aegis),
        )
        if restarted:  # as a supervisor does that takes a running attempt over
            agents.attempt = 1
        agents.start(spec, run, os.environ["SLURM_JOB_ID"], nodes, os.environ)
        agents.attempt = 1
        ranks = [node for node in nodes for _ in range(RANKS_PER_NODE)]
        if not restarted:
            start_ranks(run, len(nodes))
        detector.begin(1, ranks, time.monotonic(), adopted=restarted)
        state = AttemptState(spec.aegis, 1, tuple(nodes), ranks, detector)
        told, known = -1, dict[str, str]()
        while True:
            actions = [action for event in agents.news() for action in step(state, event)[1]]
            actions += step(state, Tick(time.monotonic(), time.time()))[1]
            if (trouble := state.nodes_heard.trouble(time.monotonic())) != known:
                known = trouble
                write("trouble", nodes=trouble)
            for action in actions:
                if isinstance(action, AskAbout):
                    agents.ask_about(action)
                    continue
                found = action.event if isinstance(action, Record) else None
                if isinstance(found, FaultDetected) and found.kind != "sensor_unavailable":
                    write("fault", fault=found.fields())
            if detector.step > told:
                told = detector.step
                write("step", step=told)
            time.sleep(LOOK_S)


def start_ranks(run: RunDir, nodes: int) -> None:
    """Their step, in a session of its own, as the supervisor starts it."""
    command = [
        "srun", "--job-name=attempt-1", f"--nodes={nodes}", f"--ntasks={RANKS_PER_NODE * nodes}",
        f"--ntasks-per-node={RANKS_PER_NODE}", "--mem=0", "--kill-on-bad-exit=0", "--input=none",
        "--gpus-per-node=mi300x:8", "--gpu-bind=none", f"--output={run.path}/ranks.log",
        sys.executable, "-m", "tests.on_slurm.cluster.agent_driver", "rank", str(run.path),
    ]  # fmt: skip
    subprocess.Popen(command, env=step_environment(os.environ), start_new_session=True)


def rank(run: RunDir) -> None:
    """Step together with the others; never ends."""
    number, world = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_NTASKS"])
    folder = run.attempt(1).progress(os.environ)
    folder.mkdir(mode=0o700, exist_ok=True)
    progress = ProgressWriter(number, 1, str(folder))
    step = 0
    while True:
        time.sleep(STEP_S)
        (run.path / f"arrived-{number}-{step}").touch()
        progress.update(waiting=True)
        while not all((run.path / f"arrived-{other}-{step}").exists() for other in range(world)):
            time.sleep(0.02)
        step += 1
        progress.update(phase=Phase.STEP, step=step, work_ns=step * int(STEP_S * 1e9))


if __name__ == "__main__":
    what, run_dir = sys.argv[1:]
    {"watch": watch, "rank": rank}[what](RunDir(Path(run_dir)))
