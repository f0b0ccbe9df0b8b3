"""A recipe's optimizer step on all ranks, and where its time goes: the trainer itself, on synthetic tokens.

The ranks build the trainer as a run does (`train/loop.py`) and take steps with it; the row is made of the lines
that its telemetry writes (docs/metrics.md), so the parts, MFU and tokens a second are those that a run reports.
Nothing is saved. Tokens are drawn uniformly from the vocabulary, and weights are fresh: the experts' load is more
even than in a run. They are read as a run reads them, from a file in the node's directory for temporary files.

The first WARM_UP steps are not counted: kernels are built and memory is taken in them. A step has as many
microbatches for each rank as the run has, at most those of the option `microbatches`; with fewer of them, what a
step does once (the reduction and the update) has a larger share.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from statistics import median
from typing import Any
from uuid import uuid4

import numpy as np
import torch
import torch.distributed as dist

from zslurm.bench.measurement import MeasurementPlan, Options, Point, Row
from zslurm.bench.ranks import BenchRanks
from zslurm.bench.result import MeasuredMachine, Skipped
from zslurm.bench.run.timing import summarize
from zslurm.checkpoint_tools.quantities import counted, show_bytes
from zslurm.train.config import TrainConfig
from zslurm.train.data.build.bundle_writer import BundleWriter
from zslurm.train.data.schema import BundleHeader
from zslurm.train.jsonl import read_jsonl
from zslurm.train.parallel.world import World, cpu_threads
from zslurm.train.plan.memory import plan_memory, with_least_recompute
from zslurm.train.setup import open_trainer
from zslurm.train.stop import StopRequest
from zslurm.train.telemetry.flops import token_flops
from zslurm.train.telemetry.timing import StepPart

WARM_UP = 3

_GUESS = {"cuda": 1.5e14, "cpu": 1e10}
_DOCUMENT = 1 << 20
_MOST_TOKENS = 1 << 26


def config_of(values: dict[str, Any], ranks: int, folder: Path | None = None) -> TrainConfig:
    """Return the configuration of a point: its run with one phase of just the steps that are taken."""
    body = dict(values["sections"])
    phase = dict(values["phase"])
    groups = max(1, ranks // phase.get("context_parallel", 1))
    phase["global_batch"] = values["microbatches"] * phase["micro_batch"] * groups
    step_tokens = phase["global_batch"] * phase["context"]
    # More steps than are taken: the trainer saves at its last one.
    phase |= {"tokens": (values["steps"] + WARM_UP + 1) * step_tokens, "batch_ramp": [], "mix": {}}
    phase |= {"warmup_steps": 0, "schedule": "constant", "final_lr": 0.0, "warmup_from": 0.0, "decay_steps": 0}
    body["phases"] = [phase]
    body["data"] = {"path": None if folder is None else str(folder / "tokens.h5")}
    body["checkpoint"] = {"background": False}
    return TrainConfig.model_validate(body)


def points(options: Options, machine: MeasuredMachine) -> MeasurementPlan:
    """Return a point for each phase that was asked for, unless it does not fit into memory."""
    planned: list[Point] = []
    skipped: list[Skipped] = []
    on_cpu = machine.device == "cpu"
    for phase in options["phases"]:
        values = {
            "run": options["run"],
            "phase_name": phase["name"],
            "phase": phase,
            "sections": options["sections"],
            "steps": options["steps"],
            "microbatches": options["microbatches"][phase["name"]],
        }
        shown = {"phase": phase["name"], "microbatches": values["microbatches"]}
        if machine.ranks % (shared := phase.get("context_parallel", 1)):
            reason = f"{counted(machine.ranks, 'rank')}, no multiple of its context_parallel {shared}"
            skipped.append(Skipped(point=shown, reason=reason))
            continue
        config = config_of(values, machine.ranks)
        local = machine.ranks_per_node
        card = None if on_cpu else machine.gpu_memory
        config = with_least_recompute(config, machine.ranks, card, on_cpu=on_cpu, local=local)
        peak = plan_memory(config, machine.ranks, on_cpu=on_cpu, local=local).peak
        if peak > machine.gpu_memory:
            free = show_bytes(machine.gpu_memory)
            reason = f"a rank takes {show_bytes(peak)} at its peak, of {free} that are free"
            skipped.append(Skipped(point=shown, reason=reason))
            continue
        tokens = config.phases[0].global_batch * config.phases[0].context / machine.ranks
        step = tokens * token_flops(config.model, config.phases[0].context, 0.0) / _GUESS[machine.device]
        planned.append(Point(values, (options["steps"] + WARM_UP) * step))
    return MeasurementPlan(planned, skipped)


def run(point: Point, ranks: BenchRanks) -> Row | None:
    """Take the steps on all ranks; the row is rank 0's."""
    values = point.values
    folder = Path(tempfile.gettempdir(), ranks.share(f"zslurm-bench-train-{uuid4().hex}"))
    try:
        config = config_of(values, ranks.size, folder)
        if ranks.local_rank == 0:
            folder.mkdir(mode=0o700)
            write_tokens(folder / "tokens.h5", config)
        ranks.barrier()
        rows = _steps(config, folder, values["steps"], ranks)
        ranks.barrier()
        return _row(values, config, rows, ranks) if ranks.is_first else None
    finally:
        if ranks.local_rank == 0:
            shutil.rmtree(folder, ignore_errors=True)


def write_tokens(path: Path, config: TrainConfig) -> None:
    """Write tokens for all steps, or as many as are read again after them."""
    phase, generator = config.phases[0], np.random.default_rng(0)
    remaining = min(phase.tokens + phase.context + 1, max(_MOST_TOKENS, phase.global_batch * (phase.context + 1)))
    vocabulary = config.model.vocab_size
    header = BundleHeader(vocab_size=vocabulary, tokenizer_sha256="0" * 64, end_token=0, source="drawn uniformly")
    with BundleWriter(path, header) as writer:
        while remaining > 0:
            count = min(remaining, _DOCUMENT)
            writer.append(generator.integers(0, vocabulary, count, dtype=np.uint32))
            remaining -= count


def _steps(config: TrainConfig, folder: Path, steps: int, ranks: BenchRanks) -> list[dict[str, Any]]:
    """Take the steps and return what rank 0's telemetry wrote of those that count."""
    group = dist.group.WORLD
    assert group is not None
    torch.set_num_threads(cpu_threads(config.parallel.threads))
    store = dist.PrefixStore(folder.name, ranks.store)
    world = World(ranks.rank, ranks.size, ranks.local_size, ranks.device, group, store)
    # Every node has the run directory to itself; only rank 0's is written to.
    trainer = open_trainer(folder, config, world, StopRequest())
    with trainer.observers, trainer.loader:
        for _ in range(WARM_UP + steps):
            trainer.take_step()
    trainer.checkpointer.close()
    if not ranks.is_first:
        return []
    return [row for row in read_jsonl(folder / "metrics.jsonl") if row["kind"] == "step" and row["step"] > WARM_UP]


def _row(values: dict[str, Any], config: TrainConfig, rows: list[dict[str, Any]], ranks: BenchRanks) -> Row:
    timing = summarize([row["step_time_s"] for row in rows])

    def middle(name: str) -> float | None:
        present = [row[name] for row in rows if row.get(name) is not None]
        return median(present) if present else None

    return {
        "run": values["run"],
        "phase": values["phase_name"],
        "ranks": ranks.size,
        "context": config.phases[0].context,
        "micro_batch": config.phases[0].micro_batch,
        "microbatches": values["microbatches"],
        "dtype": config.parallel.dtype,
        "seconds": timing.seconds,
        "spread": timing.spread,
        "samples": timing.samples,
        "tokens_per_s": middle("tokens_per_s"),
        "tokens_per_s_per_rank": middle("tokens_per_s_per_rank"),
        "tflops_per_rank": middle("tflops_per_rank"),
        "mfu": middle("mfu"),
        **{
            f"{step_part}_s": median(row["time_split_s"][str(step_part)] for row in rows) for step_part in StepPart
        },
        "memory_bytes": middle("memory_allocated_bytes") or middle("memory_rss_bytes"),
    }
