"""`zslurm plan run` against runs: a small local one into which faults are injected, and those that are on record.

local       One run trains with one fault, and `--measured` takes the times of steps, saves and restarts from it.
            Another run of the same model then meets three killed ranks at times that are drawn. The simulation
            is given the times of the first run, the moments of the kills, and nothing else of the second.
recorded    The ten minutes of benchmarks/results/goodput.json: two nodes and a spare on a real Slurm, a dead
            node, a killed rank, another dead node. The simulation is given the times of faults.json, which other
            runs had.
daly        The formula, if it applies.
world       Goodput by the plan and in the simulated world of Aegis, for each way to replace a lost node; and the
            processor seconds of 30 days in both.
scale       Seconds to plan a run of 54 days on 16,384 GPUs, with everything that the command simulates.
"""

from __future__ import annotations

import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import psutil

from benchmarks.aegis.simulated_healing import play as play_healing
from benchmarks.common import RESULTS, write_result
from tests.plan.in_world import drawn, play
from tests.train.runs import MODEL, clean_environment, make_corpus
from tests.waiting import wait_for
from zslurm.config.aegis import AegisSection, Heal
from zslurm.plan.failures import PRESETS, FailureRates, GivenFaults
from zslurm.plan.measured import Measured, measure
from zslurm.plan.simulate import Scenario, simulate
from zslurm.plan.study import Study
from zslurm.plan.young_daly import daly_wall_s
from zslurm.train.jsonl import read_jsonl

STEPS, SAVE_EVERY = 1200, 40
PHASE = {"tokens": STEPS * 64 * 8, "context": 64, "global_batch": 8, "micro_batch": 2, "lr": 1e-3}
GOAL = 0.10


def run() -> None:
    """Measure, and write the result."""
    with tempfile.TemporaryDirectory() as directory:
        local = _local(Path(directory))
    write_result(
        "plan_run",
        {
            "what": "predicted over measured, minus one; goodput is the share of the time that became kept steps",
            "aim": GOAL,
            "local": local,
            "recorded": _recorded(),
            "daly": _daly(),
            "world": [_world(nodes) for nodes in (16, 128, 1024)],
            "scale": _scale(),
            "load_average": round(os.getloadavg()[0], 1),
        },
    )


def _local(place: Path) -> dict[str, Any]:
    """Predict a run with three killed ranks from one with one."""
    make_corpus(place / "tokens.h5")
    first = _train(place, "first", [0.5])
    times = measure(place / "runs" / "first")
    drawn = random.Random(19)
    at = [(third + drawn.uniform(0.2, 0.8)) / 3 for third in range(3)]
    second = _train(place, "second", at)
    assert times.step_s is not None and times.down_s is not None
    scenario = _scenario(times)
    out = simulate(scenario, GivenFaults([(moment, "process") for moment in second["kills_s"]]))
    goodput = scenario.ideal_s / second["wall_s"]
    return {
        "measured_in_the_first_run": {
            "step_s": round(times.step_s, 5),
            "stall_s": round(times.stall_s or 0.0, 5),
            "write_s": round(times.write_s or 0.0, 4),
            "down_s": round(times.down_s, 3),
            "wall_s": round(first["wall_s"], 2),
        },
        "kills_s": [round(moment, 2) for moment in second["kills_s"]],
        "predicted": {"wall_s": round(out.wall_s, 2), "goodput": round(out.goodput, 4)},
        "measured": {"wall_s": round(second["wall_s"], 2), "goodput": round(goodput, 4)},
        "error": round(out.goodput / goodput - 1, 4),
    }


def _scenario(times: Measured) -> Scenario:
    assert times.step_s is not None and times.down_s is not None
    return Scenario(
        steps=STEPS,
        step_s=times.step_s,
        nodes=1,
        every=SAVE_EVERY,
        stall_s=times.stall_s or 0.0,
        write_s=times.write_s or 0.0,
        restart_s=times.down_s,
    )


def _train(place: Path, name: str, at: list[float]) -> dict[str, Any]:
    """Train a run to its end, and kill one of its two ranks at each of these shares of its steps."""
    body = {
        "run": {"name": name}, "model": MODEL, "data": {"path": "tokens.h5"}, "phases": [PHASE],
        "checkpoint": {"every_steps": SAVE_EVERY}, "slurm": {"ranks_per_node": 2}, "parallel": {"device": "cpu"},
        "aegis": {"recovery": "restart"},  # which the plan predicts here
    }  # fmt: skip
    (place / "run.yaml").write_text(json.dumps(body))
    environment = clean_environment() | {"HOME": str(place), "XDG_STATE_HOME": str(place / "state")}
    command = [sys.executable, "-m", "zslurm", "submit", "run.yaml", "--cluster", "local", "--wait"]
    run_dir = place / "runs" / name
    with (place / f"{name}.log").open("w") as log:
        process = subprocess.Popen(command, cwd=place, env=environment, stdout=log, stderr=log)
        kills: list[float] = []
        for share in at:
            _wait_for_step(run_dir, process, int(share * STEPS), attempt=len(kills) + 1)
            _ranks(run_dir)[-1].send_signal(signal.SIGKILL)
            kills.append(time.time())
        assert process.wait() == 0, (place / f"{name}.log").read_text()
    began = next(
        row["time"] for row in read_jsonl(run_dir / "events.jsonl") if row.get("event") == "attempt_started"
    )
    ended = max(row["time"] for row in _steps(run_dir))
    return {"wall_s": ended - began, "kills_s": [moment - began for moment in kills]}


def _steps(run_dir: Path) -> list[dict[str, Any]]:
    return [row for row in read_jsonl(run_dir / "metrics.jsonl") if row.get("kind") == "step"]


def _wait_for_step(run_dir: Path, process: subprocess.Popen[bytes], step: int, *, attempt: int) -> None:
    """Wait until an attempt has done a step."""

    def reached() -> bool:
        assert process.poll() is None, f"{run_dir.name} has ended"
        rows = _steps(run_dir)
        return bool(rows) and int(rows[-1]["step"]) >= step and int(rows[-1]["attempt"]) >= attempt

    wait_for(reached, f"step {step}", every_s=0.01, deadline_s=1800)


def _ranks(run_dir: Path) -> list[psutil.Process]:
    """The processes of a run's ranks."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if "zslurm.job.rank" in words and str(run_dir) in words:
            found.append(process)
    return found


def _recorded() -> dict[str, Any]:
    """Simulate the run of goodput.json with the times of faults.json."""
    faults = {row["number"]: row for row in json.loads((RESULTS / "faults.json").read_text())["rows"]}
    run = json.loads((RESULTS / "goodput.json").read_text())
    (ours,) = (row for row in run["contenders"] if row["name"] == "zslurm")
    killed, dead, limit = (faults[number]["parts_s"] for number in (1, 4, 15))
    start = sum(dead[part] for part in ("tear down", "decide", "srun", "import", "load", "first step"))
    seconds = 60 * run["minutes"]
    scenario = Scenario(
        steps=10**6,
        step_s=run["median_step_s"],
        nodes=2,
        spares=1,
        every=run["checkpoint_every_steps"],
        detect_s={"node": dead["detect"], "process": killed["detect"]},
        restart_s=start,
        wait_s=limit["queue"],
        horizon_s=seconds,
    )
    kinds = ["process" if fault == "rank killed" else "node" for fault in run["faults"]]
    given = [(share * seconds, kind) for share, kind in zip((0.1, 0.4, 0.75), kinds, strict=True)]
    out = simulate(scenario, GivenFaults(given))  # type: ignore[arg-type]
    return {
        "predicted_goodput": round(out.goodput, 3),
        "measured_goodput": ours["goodput"],
        "error": round(out.goodput / ours["goodput"] - 1, 4),
        "note": "the time from submission to the first start is not in the simulation",
    }


def _daly() -> dict[str, Any]:
    """Compare with the formula at four intervals."""
    between, restart, save, step_s = 4 * 3600.0, 600.0, 120.0, 10.0
    study = Study(FailureRates((0.0, 0.0, 3600 / between / 8, 0.0), ""), gpus_per_node=8)
    never_stops = AegisSection(retries=10**6, restarts_per_hour=10**6, max_excluded=10**6)
    scenario = Scenario(steps=500_000, step_s=step_s, nodes=1, stall_s=save, restart_s=restart, aegis=never_stops)
    errors = {}
    for interval in (300.0, 1000.0, 1700.0, 6000.0):
        found = study.predict(replace(scenario, every=round(interval / step_s)), runs=20)
        errors[f"{interval:g} s"] = round(
            found.wall_s.mean / daly_wall_s(scenario.ideal_s, interval, save, restart, between) - 1, 5
        )
    return {"errors": errors, "largest": max(map(abs, errors.values()))}


def _world(nodes: int) -> dict[str, Any]:
    """Compare a month on some nodes with the simulated world; the play of a large run ends early."""
    month = Scenario(steps=30 * 43200, step_s=2.0, nodes=nodes, regroup_s=5.0, wait_s=1800.0)
    study, heals = Study(PRESETS["llama3"], 8), dict[str, Any]()
    ways: tuple[tuple[Heal, int], ...] = (("requeue", 4), ("helper", 0), ("shrink", 0), ("requeue", 0))
    for heal, spares in ways:
        scenario = replace(
            month, spares=spares, helpers=heal == "helper", aegis=AegisSection(recovery="memory", heal=heal)
        )
        used = time.process_time()
        played = play(scenario, drawn(study.rates, 8, scenario, 1))
        heals["spare" if spares else heal] = {
            "in_the_world": round(played.goodput, 5),
            "predicted": round(played.simulated, 5),
            "faults": played.faults,
            "days": round(played.seconds / 86400, 2),
            "processor_s": round(time.process_time() - used, 2),
        }
    used = time.process_time()
    study.outcomes(replace(month, helpers=True, aegis=AegisSection(heal="helper")), 20)
    simulated_s = (time.process_time() - used) / 20
    with get_context("spawn").Pool(1) as pool:
        whole = pool.apply(play_healing, ("helper", nodes, 30))
    return {
        "nodes": nodes,
        "goodput": heals,
        "processor_s_of_30_days": {"in_the_world": whole["processor_s"], "predicted": round(simulated_s, 5)},
    }


def _scale() -> dict[str, Any]:
    """Time what the command does for Llama 3's cluster."""
    scenario = Scenario(
        steps=54 * 86400 // 10, step_s=10.0, nodes=2048, spares=16, every=100, stall_s=1.0, write_s=60.0,
        detect_s={"node": 3.0, "hang": 200.0}, restart_s=180.0, wait_s=3600.0,
    )  # fmt: skip
    study = Study(PRESETS["llama3"], 8)
    seconds, processor = [], []
    for _ in range(3):
        started, used = time.perf_counter(), time.process_time()
        every, _ = study.best_interval(scenario, 24)
        spares, _ = study.best_spares(replace(scenario, every=every), 24)
        shown = study.predict(scenario, 100)
        study.predict(replace(scenario, every=every, spares=spares), 100)
        seconds.append(time.perf_counter() - started)
        processor.append(time.process_time() - used)
    return {
        "gpus": 16384,
        "seconds_median": round(statistics.median(seconds), 2),
        "processor_seconds_median": round(statistics.median(processor), 2),
        "advised_every_steps": every,
        "advised_spares": spares,
        "goodput": round(shown.goodput.mean, 4),
        "goodput_error": round(shown.goodput.error, 4),
    }
