"""What a job used of what it asked for, and advice for the next submission.

Sources: the record that each rank leaves when it ends (processor time, highest memory), Slurm's accounting if
all ranks were killed and left none, the metrics of rank 0 (memory, GPU memory, MFU, the parts of a step), the
timeline, and the configuration for what was asked. What was not measured is not shown: there is no row for GPUs on
a machine without any.
"""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zslurm.checkpoint_tools.quantities import counted, show_bytes, show_duration
from zslurm.core.files import read_json
from zslurm.job.step import step_name
from zslurm.report.timeline import Timeline
from zslurm.run.metrics.columns import Metrics
from zslurm.run.run_dir import RunDir
from zslurm.slurm.accounting import StepUsage
from zslurm.slurm.jobs import time_limit

_GIB = 1 << 30
_ACCOUNTING = " (Slurm's accounting)"
_LOST_S = 300
"""Seconds of lost steps from which on the report advises another interval between saves: in a short run, one fault
says nothing about how often faults come."""


@dataclass(frozen=True)
class Use:
    """One resource.

    Attributes:
        resource: what it is.
        used: in words.
        asked: what was asked for, in words; empty if nothing was.
        share: used of asked, if both are known.
    """

    resource: str
    used: str
    asked: str = ""
    share: float | None = None


@dataclass(frozen=True)
class Efficiency:
    """Every resource that was measured, and what to do differently."""

    uses: Sequence[Use]
    advice: Sequence[str]


@dataclass(frozen=True)
class _Ranks:
    """What the ranks of the newest attempt that left records used, or accounting's longest; zeros without any."""

    count: int = 0
    cpu_s: float = 0.0
    wall_s: float = 0.0
    cores: float = 0.0
    max_rss: int = 0
    on_fullest_node: int = 0
    by_accounting: bool = False


def efficiency(
    run: RunDir,
    config: Mapping[str, Any],
    metrics: Metrics,
    line: Timeline,
    checkpoints: Sequence[int],
    accounting: Sequence[StepUsage] = (),
) -> Efficiency:
    """Compare what a job used with what it asked for.

    Args:
        run: its directory.
        config: its resolved configuration.
        metrics: of it.
        line: its timeline.
        checkpoints: bytes of each checkpoint that is kept.
        accounting: what Slurm's accounting has of the steps of its jobs.
    """
    slurm, cluster = _section(config, "slurm"), _section(config, "cluster")
    ranks = _ranks(run, slurm, cluster) or _accounted(run, accounting) or _Ranks()
    uses: list[Use] = []
    advice: list[str] = []
    for use_and_advice in (
        _cpu(ranks, slurm),
        _memory(ranks, metrics, slurm),
        _gpu(metrics),
        _gpu_memory(metrics),
        _disk(run, checkpoints),
        _energy(accounting),
        _time(line, slurm),
    ):
        if use_and_advice is not None:
            uses.append(use_and_advice[0])
            advice += [use_and_advice[1]] if use_and_advice[1] else []
    advice += _of_the_steps(metrics)
    advice += _of_the_timeline(line, metrics, config)
    return Efficiency(uses, advice)


def _section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = config.get(name)
    return value if isinstance(value, dict) else {}


def _ranks(run: RunDir, slurm: Mapping[str, Any], cluster: Mapping[str, Any]) -> _Ranks | None:
    for attempt in reversed(run.attempt_dirs()):
        records = [read_json(path) for path in sorted(attempt.ranks.glob("*.json"))]
        usage = [
            (str(record.get("node")), record["usage"])
            for record in records
            if record is not None and isinstance(record.get("usage"), dict)
        ]
        if not usage:
            continue
        per_node = int(slurm.get("ranks_per_node") or cluster.get("gpus_per_node") or 1)
        asked = slurm.get("cpus_per_task")
        if asked is None and cluster.get("cpus_per_node"):
            asked = cluster["cpus_per_node"] / per_node
        cores = [asked or _of(rank_usage, "cores") / per_node for _, rank_usage in usage]
        by_node: dict[str, float] = {}
        for node, rank_usage in usage:
            by_node[node] = by_node.get(node, 0.0) + _of(rank_usage, "max_rss_bytes")
        return _Ranks(
            count=len(usage),
            cpu_s=sum(_of(rank_usage, "cpu_s") for _, rank_usage in usage),
            wall_s=max(_of(rank_usage, "wall_s") for _, rank_usage in usage),
            cores=sum(map(float, cores)),
            max_rss=int(max(_of(rank_usage, "max_rss_bytes") for _, rank_usage in usage)),
            on_fullest_node=int(max(by_node.values())),
        )
    return None


def _accounted(run: RunDir, accounting: Sequence[StepUsage]) -> _Ranks | None:
    """Return what the longest attempt used by Slurm's accounting; the fullest node as if its tasks were alike."""
    attempts = {step_name(attempt) for attempt in run.attempt_dirs()}
    steps = [step for step in accounting if step.step and step.name in attempts and step.tasks and step.cpu_s]
    if not steps:
        return None
    step = max(steps, key=lambda job_step: job_step.elapsed_s)
    return _Ranks(
        count=step.tasks,
        cpu_s=step.cpu_s,
        wall_s=step.elapsed_s,
        cores=step.cores,
        max_rss=step.max_rss,
        on_fullest_node=step.max_rss * math.ceil(step.tasks / max(1, step.nodes)),
        by_accounting=True,
    )


def _of(usage: Mapping[str, Any], name: str) -> float:
    value = usage.get(name)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else 0.0


_Found = tuple[Use, str] | None
"""A resource and, if there is any, advice."""


def _cpu(ranks: _Ranks, slurm: Mapping[str, Any]) -> _Found:
    if not ranks.cores or not ranks.wall_s:
        return None
    busy = ranks.cpu_s / ranks.wall_s
    share = busy / ranks.cores
    per_rank = ranks.cores / ranks.count
    whence = " (Slurm's accounting)" if ranks.by_accounting else ""
    use = Use(
        "CPU cores", f"{busy:.1f} busy on average{whence}", f"{ranks.cores:g} for {_ranks_text(ranks)}", share
    )
    needed = max(1, math.ceil(1.5 * busy / ranks.count))
    asked = bool(slurm.get("cpus_per_task"))
    if asked and share < 0.5 and needed < per_rank:
        return use, f"Ask for fewer cores: `slurm.cpus_per_task: {needed}` leaves a half more than were busy."
    if asked and share > 0.95:
        return use, "The cores were busy all the time: more of them (`slurm.cpus_per_task`) may be faster."
    return use, ""


def _ranks_text(ranks: _Ranks) -> str:
    return counted(ranks.count, "rank")


def _memory(ranks: _Ranks, metrics: Metrics, slurm: Mapping[str, Any]) -> _Found:
    used, where = ranks.on_fullest_node, "at most, by the ranks of one node"
    if ranks.by_accounting:
        where = "at most, if every rank of a node was as large as the largest" + _ACCOUNTING
    if not used and "memory_rss_bytes" in metrics.all_steps:
        used, where = int(_highest(metrics, "memory_rss_bytes")), "at most, by rank 0"
    if not used:
        return None
    asked = slurm.get("mem")
    limit = _slurm_memory(asked)
    if not limit or not ranks.on_fullest_node:
        return Use("memory", f"{show_bytes(used)} {where}"), ""
    share = used / limit
    use = Use("memory", f"{show_bytes(used)} {where}", f"{show_bytes(limit)} a node (slurm.mem)", share)
    if share < 0.5:
        enough = math.ceil(1.3 * used / _GIB)
        return use, f"`slurm.mem: {enough}G` would have been enough, with a third in reserve."
    if share > 0.9:
        return use, f"Memory was nearly full: ask for more than `slurm.mem: {asked}`."
    return use, ""


def _slurm_memory(text: object) -> int:
    """Return the bytes of a memory size as sbatch reads it: `500G`, or megabytes; 0 if there is no limit."""
    match = re.fullmatch(r"(\d+)([KMGT]?)B?", str(text).strip().upper())
    return int(match[1]) << {"K": 10, "": 20, "M": 20, "G": 30, "T": 40}[match[2]] if match else 0


def _highest(metrics: Metrics, name: str) -> float:
    import numpy as np

    column = metrics.all_steps[name]
    return float(np.nanmax(column)) if np.isfinite(column).any() else 0.0


def median(metrics: Metrics, name: str) -> float | None:
    """Return the median of a column over the kept steps; None if there is no number."""
    import numpy as np

    column = metrics.steps.get(name)
    return float(np.nanmedian(column)) if column is not None and np.isfinite(column).any() else None


def _gpu(metrics: Metrics) -> _Found:
    mfu = median(metrics, "mfu")
    if mfu is None:
        return None
    on_gpu = "memory_reserved_bytes" in metrics.steps
    device = "GPUs" if on_gpu else "arithmetic"
    peak = "of the data sheet's peak" if on_gpu else "of the matrix products' rate on these cores"
    rate = median(metrics, "tflops_per_rank")
    used = f"{rate:.3g} TFLOP/s for each rank" if rate is not None else f"{100 * mfu:.1f} %"
    return Use(device, used, f"MFU, {peak}", mfu), ""


def _gpu_memory(metrics: Metrics) -> _Found:
    if not {"memory_reserved_bytes", "memory_total_bytes"} <= metrics.steps.keys():
        return None
    used, total = (_highest(metrics, f"memory_{name}_bytes") for name in ("reserved", "total"))
    if not used or not total:
        return None
    share = used / total
    use = Use("GPU memory", f"{show_bytes(used)} at most, on rank 0", f"{show_bytes(total)} a GPU", share)
    if share < 0.6:
        return use, (
            "GPU memory was left: a larger `phases[].micro_batch`, or less `parallel.recompute`, may be faster; "
            "`zslurm plan memory` shows what fits."
        )
    if share > 0.92:
        return use, "GPU memory was nearly full: set `parallel.recompute: auto` or lower `phases[].micro_batch`."
    return use, ""


def _disk(run: RunDir, checkpoints: Sequence[int]) -> _Found:
    if not checkpoints:
        return None
    try:
        usage_of_disk = shutil.disk_usage(run.path)
    except OSError:
        return None
    size = max(checkpoints)
    use = Use(
        "disk",
        f"{show_bytes(sum(checkpoints))} in {counted(len(checkpoints), 'checkpoint')}",
        f"{show_bytes(usage_of_disk.free)} free of {show_bytes(usage_of_disk.total)}",
        sum(checkpoints) / usage_of_disk.total if usage_of_disk.total else None,
    )
    if usage_of_disk.free < 2 * size:
        return use, (
            f"Less than two checkpoints of {show_bytes(size)} fit on the disk: "
            "lower `checkpoint.keep_last`, or make room."
        )
    return use, ""


def _energy(accounting: Sequence[StepUsage]) -> _Found:
    """Return the energy of all jobs, if the site measures it."""
    joules = sum(job.energy_j for job in accounting if not job.step)
    return (Use("energy", f"{joules / 3.6e6:.3g} kWh{_ACCOUNTING}"), "") if joules else None


def _time(line: Timeline, slurm: Mapping[str, Any]) -> _Found:
    limit = time_limit(str(slurm["time"])) if slurm.get("time") else None
    if limit is None or not line.attempts:
        return None
    first: dict[str, float] = {}
    longest = 0.0
    for attempt in line.attempts:
        began = first.setdefault(attempt.job_id, attempt.began)
        longest = max(longest, attempt.ended - began)
    asked = limit.total_seconds()
    share = longest / asked
    use = Use("time", f"{show_duration(longest)} in the longest job", f"{slurm['time']} (slurm.time)", share)
    if share < 0.5 and line.attempts[-1].outcome == "completed":
        enough = max(60, math.ceil(1.25 * longest / 60) * 60)
        return use, (
            f"A shorter limit starts earlier, because Slurm can fill gaps with it: "
            f"`slurm.time: {_clock(enough)}` would have been enough."
        )
    return use, ""


def _clock(seconds: int) -> str:
    return f"{seconds // 3600}:{seconds % 3600 // 60:02d}:{seconds % 60:02d}"


def _of_the_steps(metrics: Metrics) -> Iterator[str]:
    """Yield advice from where the time of the steps went."""
    total = metrics.steps.get("step_time_s")
    if total is None or not len(total):
        return
    shares = {
        step_part: float(_sum(metrics.steps[f"time_split_s.{step_part}"]) / _sum(total))
        for step_part in ("data", "checkpoint", "gather", "reduce")
        if f"time_split_s.{step_part}" in metrics.steps and _sum(total) > 0
    }
    if shares.get("data", 0) > 0.05:
        yield (
            f"Steps waited for data in {shares['data']:.0%} of their time: `zslurm plan io` and `zslurm bench "
            "storage` show what the storage can give; `data.prefetch` reads further ahead."
        )
    if shares.get("reduce", 0) + shares.get("gather", 0) > 0.3:
        share = shares["reduce"] + shares.get("gather", 0)
        yield (
            f"Ranks waited for each other, or for the network, in {share:.0%} of the steps' time: "
            "`zslurm bench collectives` measures the links, `zslurm plan size` shows what a larger microbatch "
            "changes."
        )
    if shares.get("checkpoint", 0) > 0.02:
        yield (
            f"Steps stood still for checkpoints in {shares['checkpoint']:.0%} of their time: save less often "
            "(`checkpoint.every_steps`), or check `checkpoint.background` and the storage."
        )


def _of_the_timeline(line: Timeline, metrics: Metrics, config: Mapping[str, Any]) -> Iterator[str]:
    """Yield advice from where the wall time went."""
    if not line.wall_s:
        return
    shares = {time_part: seconds / line.wall_s for time_part, seconds in line.seconds.items()}
    if shares.get("start", 0) > 0.1 and line.seconds["start"] > 600:
        yield (
            f"Starting took {shares['start']:.0%} of the time: `cluster.stage_env` copies the Python environment "
            "to the nodes, so that ranks do not load it from the shared file system."
        )
    if shares.get("lost", 0) > 0.02 and line.seconds["lost"] > _LOST_S:
        interval = _best_interval(line, metrics)
        every = f" about every {counted(interval, 'step')}" if interval else " more often"
        asked = _section(config, "checkpoint").get("every_steps")
        if not interval or not isinstance(asked, int) or interval < asked:
            yield (
                f"{shares['lost']:.0%} of the time went into steps that were lost with a fault: save{every} "
                f"(`checkpoint.every_steps`, {asked} now)."
            )


def _best_interval(line: Timeline, metrics: Metrics) -> int | None:
    """Return the steps between two saves that lose least: sqrt(2 cost MTBF), Young, CACM 17 (9), 1974."""
    step_s = median(metrics, "step_time_s")
    stalls = [row.get("stall_s") for row in metrics.rows("checkpoint") if row.get("state") == "COMMITTED"]
    costs = sorted(stall for stall in stalls if isinstance(stall, int | float) and stall > 0)
    if not step_s or not costs or not line.failures:
        return None
    between_failures = (line.wall_s - line.seconds.get("queue", 0.0)) / line.failures
    return max(1, round(math.sqrt(2 * costs[len(costs) // 2] * between_failures) / step_s))


def _sum(column: Any) -> float:
    import numpy as np

    return float(np.nansum(column))
