"""What the supervisor's side of the agents costs: 128 nodes, 1,024 ranks, one look a second.

The agents are simulated behind an srun that is one process: it writes what 128 agents would write, each second the
progress of eight ranks of every node and every five seconds five sensors of every node, and takes the heartbeats.
A separate process is measured that does what the supervisor does with them: hear, detect, look four times a
second. Its CPU time comes from the process itself and its memory is the highest resident set, Python, zslurm and
all; both after the start, and next to them the same process without agents.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from benchmarks.common import ROOT, write_result
from zslurm.aegis.core.attempt import AttemptState
from zslurm.aegis.core.detection.detector import Detector
from zslurm.aegis.core.messages import ReportReceived, Tick
from zslurm.aegis.core.step import step
from zslurm.aegis.protocol import AgentReport, ProgressReport, RankProgress, SensorReport, Stamp, encode_report
from zslurm.aegis.supervisor.agents.agents import Agents
from zslurm.aegis.types import Fault
from zslurm.config.aegis import AegisSection
from zslurm.config.spec import RunSpec
from zslurm.run.run_dir import RunDir
from zslurm.train.progress import Phase

NODES, RANKS_PER_NODE, STEP_S = 128, 8, 1.5
_WARM_UP_S, _MEASURED_S = 10.0, 60.0
_LOOK_S = AegisSection().poll_s


def run() -> None:
    """Measure and write results/aegis_scale.json."""
    load_before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as directory:
        found = {name: _measure(Path(directory) / name, agents=name == "agents") for name in ("agents", "idle")}
    write_result(
        "aegis_scale",
        {
            "nodes": NODES,
            "ranks": NODES * RANKS_PER_NODE,
            "progress_reports_per_s": NODES,
            "sensor_reports_per_s": NODES,
            "measured_s": _MEASURED_S,
            "load_before": round(load_before, 2),
            "supervisor_with_agents": found["agents"],
            "the_same_without_agents": found["idle"],
        },
    )


def _measure(directory: Path, *, agents: bool) -> dict[str, Any]:
    tools = directory / "tools"
    tools.mkdir(parents=True)
    for name, line in (
        ("srun", f'exec {sys.executable} -m benchmarks.aegis.aegis_scale srun "$@"'),
        ("squeue", '[ "$1" = --version ] && echo slurm-wlm 22.05.8'),
    ):
        (tools / name).write_text(f"#!/bin/sh\n{line}\n")
        (tools / name).chmod(0o755)
    env = os.environ | {"PATH": f"{tools}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "benchmarks.aegis.aegis_scale", "supervise", str(directory), str(int(agents))]
    done = subprocess.run(command, env=env, check=True, capture_output=True, text=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


# --- the supervisor's part ---------------------------------------------------------------------------------------


def supervise(directory: Path, *, with_agents: bool) -> dict[str, Any]:
    """Hear and detect for a while; returns what it cost."""
    spec = _spec(directory)
    run_dir = RunDir(directory / "runs" / "scale")
    run_dir.create(group_readable=False)
    nodes = [f"node{number:03d}" for number in range(NODES)]
    events: list[str] = []
    agents = Agents(spec.aegis, lambda event: events.append(event.NAME))
    detector = Detector(spec.aegis)
    ranks = [node for node in nodes for _ in range(RANKS_PER_NODE)]
    detector.begin(1, ranks, time.monotonic())
    state = AttemptState(spec.aegis, 1, tuple(nodes), ranks, detector)
    agents.attempt = 1
    if with_agents:
        agents.start(spec, run_dir, "1", nodes, os.environ)
    reports = 0
    began = time.monotonic()
    cpu: float | None = None
    while (passed := time.monotonic() - began) < _WARM_UP_S + _MEASURED_S:
        if cpu is None and passed >= _WARM_UP_S:
            cpu, reports = time.process_time(), 0
        for event in [*agents.news(), Tick(time.monotonic(), time.time())]:
            step(state, event)
            reports += isinstance(event, ReportReceived)
        time.sleep(_LOOK_S)
    assert cpu is not None
    spent = time.process_time() - cpu
    memory = psutil.Process().memory_info().rss
    if with_agents:
        assert events == ["agents_started"], events
        assert detector.step > 0
        assert not state.faults, state.faults
        agents.stop()
    return {
        "percent_of_a_core": round(100 * spent / _MEASURED_S, 3),
        "resident_mb": round(memory / 1e6, 1),
        "reports_heard": reports,
        "last_step": detector.step,
    }


def _spec(directory: Path) -> RunSpec:
    body = {
        "run": {"name": "scale", "runs_dir": str(directory / "runs")},
        "data": {"path": str(directory / "data")},
        "phases": [{"tokens": 1e9, "context": 4096, "global_batch": 1024, "micro_batch": 1, "lr": 3e-4}],
        "cluster": {"name": "scale", "launcher": "slurm", "gpus_per_node": RANKS_PER_NODE},
        "slurm": {"nodes": NODES},
    }
    return RunSpec.model_validate(body)


# --- the agents' part --------------------------------------------------------------------------------------------


def pretend_to_be_srun() -> None:
    """Write what the agents of all nodes would write, until the input ends."""
    nodes = [f"node{number:03d}" for number in range(NODES)]
    os.set_blocking(0, False)
    began = time.monotonic()
    out = sys.stdout

    def stamp(node: str, number: int) -> Stamp:
        return Stamp(node, number, time.time(), time.monotonic())

    for node in nodes:
        out.write("".join(encode_report(AgentReport(stamp(node, 0), "started", {"pid": 1}))))
    out.flush()
    number = 1
    while True:
        for place, node in enumerate(nodes):
            # Spread over the second, as agents on different nodes are.
            due = began + number + place / NODES
            time.sleep(max(0.0, due - time.monotonic()))
            passed = time.monotonic() - began
            step = int(passed / STEP_S)
            age = passed - step * STEP_S
            first = place * RANKS_PER_NODE
            rows = tuple(
                RankProgress(rank, 1000 + rank, Phase.STEP, step, step // 100 * 100, age, age > 1.0, 1.1 * step)
                for rank in range(first, first + RANKS_PER_NODE)
            )
            lines = encode_report(ProgressReport(stamp(node, number), 1, rows))
            if (number + place) % 5 == 0:
                for sensor in ("gpu", "nic", "kernel_log", "host", "disk"):
                    values = {f"value_{index}": 1000.0 + number + index for index in range(16)}
                    faults: tuple[Fault, ...] = ()
                    lines += encode_report(SensorReport(stamp(node, number), sensor, faults=faults, values=values))
            out.write("".join(lines))
            out.flush()
        number += 1
        try:
            if os.read(0, 65536) == b"":
                return
        except BlockingIOError:
            continue


if __name__ == "__main__":
    if sys.argv[1] == "srun":
        pretend_to_be_srun()
    else:
        print(json.dumps(supervise(Path(sys.argv[2]), with_agents=sys.argv[3] == "1")))
