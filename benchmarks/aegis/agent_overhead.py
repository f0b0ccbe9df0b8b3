"""What the agent of a node costs the training next to it.

The demo's run trains on all cores of this machine, two ranks, with its supervisor and its agent as always. The
agent is stopped (SIGSTOP) in every other slice of four seconds, so that a slow minute of the machine hits both,
and the time of the steps that lie whole in a slice is compared between each slice with the agent and the mean of
its two neighbours without. Beside it: the CPU time of the agent and of the supervisor, of one core, and what the
ranks themselves do for their watchers, one write of 56 bytes twice a step.
"""

from __future__ import annotations

import itertools
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from benchmarks.common import write_result
from zslurm.cli.data_build import make_bundle
from zslurm.cli.demo import RUN_FILE
from zslurm.core.processes import ProcessRecord
from zslurm.train.data.build.sources import demo_corpus_sources
from zslurm.train.jsonl import read_jsonl
from zslurm.train.progress import ProgressWriter

_RANKS = 2
_SLICE_S, _SLICES = 4.0, 181
_WARM_UP_STEPS = 20
_RESAMPLED = 2000
_UPDATES, _UPDATES_PER_STEP = 20_000, 2


def run() -> None:
    """Measure and write results/agent_overhead.json."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir, command = _prepare(Path(folder))
        training = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            while len(_steps(run_dir)) < _WARM_UP_STEPS:
                if training.poll() is not None:
                    raise RuntimeError("the run ended before it trained")
                time.sleep(1.0)
            agent, supervisor = _process(run_dir / "agent.json"), _process(run_dir / "supervisor.json")
            busy = {process.pid: _cpu_s(process) for process in (agent, supervisor)}
            slices = _alternate(agent)
            wall_s = slices[-1][1] - slices[0][0]
            awake_s = sum(end - start for start, end in slices[::2])
            agent_share = (_cpu_s(agent) - busy[agent.pid]) / awake_s
            supervisor_share = (_cpu_s(supervisor) - busy[supervisor.pid]) / wall_s
        finally:
            training.send_signal(signal.SIGINT)
            training.wait()
        means = _mean_step_times(_steps(run_dir), slices)
    ratios = _ratios(means)
    step_s = statistics.median(mean for mean in means if mean is not None)
    resampled = [
        statistics.median(random.Random(seed).choices(ratios, k=len(ratios))) for seed in range(_RESAMPLED)
    ]
    low, high = (sorted(resampled)[int(share * _RESAMPLED)] for share in (0.025, 0.975))
    write_result(
        "agent_overhead",
        {
            "peer": "the same run while its agent is stopped",
            "ranks": _RANKS,
            "slices_of_s": _SLICE_S,
            "pairs": len(ratios),
            "step_s": round(step_s, 4),
            "step_time_more_percent": round(100 * (statistics.median(ratios) - 1), 2),
            "step_time_more_percent_95": [round(100 * (bound - 1), 2) for bound in (low, high)],
            "agent_percent_of_one_core": round(100 * agent_share, 2),
            "agent_percent_of_all_cores": round(100 * agent_share / (psutil.cpu_count() or 1), 2),
            "supervisor_percent_of_one_core": round(100 * supervisor_share, 2),
            "progress_writes_percent_of_step": round(100 * _UPDATES_PER_STEP * _update_s() / step_s, 4),
        },
    )


def _prepare(place: Path) -> tuple[Path, list[str]]:
    """The demo's data and recipe, for more tokens than it will train on: the run, and the command to submit it."""
    make_bundle([demo_corpus_sources()], place / "data", vocab_size=4096, tokenizer=None, glob="*.py")
    (place / "run.yaml").write_text(RUN_FILE.format(ranks=_RANKS))
    command = [sys.executable, "-m", "zslurm", "submit", str(place / "run.yaml"), "--cluster", "local", "--wait"]
    command += ["--set", "phases[0].tokens=1e8", "--set", f"run.runs_dir={place / 'runs'}"]
    return place / "runs" / "demo", command


def _steps(run_dir: Path) -> list[dict[str, float]]:
    metrics = run_dir / "metrics.jsonl"
    return [row for row in read_jsonl(metrics) if row["kind"] == "step"] if metrics.exists() else []


def _process(record: Path) -> psutil.Process:
    """The process that a file of the run directory names."""
    found = ProcessRecord.read(record)
    if found is None:
        raise RuntimeError(f"{record.name}: it does not run")
    return psutil.Process(found.pid)


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _alternate(agent: psutil.Process) -> list[tuple[float, float]]:
    """Slices of time; in each second one the agent is stopped."""
    slices: list[tuple[float, float]] = []
    try:
        for number in range(_SLICES):
            agent.send_signal(signal.SIGSTOP if number % 2 else signal.SIGCONT)
            started = time.time()
            time.sleep(_SLICE_S)
            slices.append((started, time.time()))
    finally:
        agent.send_signal(signal.SIGCONT)
    return slices


def _mean_step_times(steps: list[dict[str, float]], slices: list[tuple[float, float]]) -> list[float | None]:
    """Seconds per step of each slice, between the first and the last that ended in it; None with under three."""
    means: list[float | None] = []
    for start, end in slices:
        ends = [row["time"] for row in steps if start <= row["time"] < end]
        means.append((ends[-1] - ends[0]) / (len(ends) - 1) if len(ends) > 2 else None)
    return means


def _ratios(means: list[float | None]) -> list[float]:
    """For each slice with the agent: its step time over the mean of those before and after, without."""
    found = []
    for before, awake, after in itertools.islice(zip(means, means[1:], means[2:], strict=False), 1, None, 2):
        if before is not None and awake is not None and after is not None:
            found.append(awake / ((before + after) / 2))
    return found


def _update_s() -> float:
    """Seconds of one word of a rank to its watchers."""
    with tempfile.TemporaryDirectory() as folder:
        progress = ProgressWriter(0, 1, folder)
        started = time.perf_counter()
        for step in range(_UPDATES):
            progress.update(step=step)
        seconds = time.perf_counter() - started
        progress.close()
    return seconds / _UPDATES
