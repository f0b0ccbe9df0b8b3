"""The step time that `zslurm size` expects against a step of the trainer, on this CPU.

Expected: the rates of every product and of attention, the times of the parts of a microbatch and of Muon's
Newton-Schulz steps as `zslurm bench gemm --run` measures them, and the triad of `zslurm bench hbm`, read by
`zslurm size`. Peer: the run's optimizer step by the trainer, on synthetic tokens, as `zslurm bench train` takes
it. Both on one thread of this process, in turn, and both in processor time: the machine is shared, and by the
clock a step of seconds is disturbed more often than a product of milliseconds. The ratio is expected over
measured.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from benchmarks.common import write_result
from benchmarks.models import TINY
from zslurm.bench import gemm, hbm, train
from zslurm.bench.measurement import Point
from zslurm.bench.ranks import Ranks
from zslurm.config.spec import RunSpec
from zslurm.submit.resolve import resolve_run
from zslurm.submit.run_products import measured_products
from zslurm.submit.size import Card, run_size
from zslurm.train.config import ModelConfig
from zslurm.train.jsonl import read_jsonl
from zslurm.train.loop import Trainer
from zslurm.train.parallel.world import World
from zslurm.train.plan.rates import Rates, load_rates
from zslurm.train.stop import StopRequest
from zslurm.train.telemetry.timing import StepClock

TURNS, STEPS = 3, 2
TRIAD = {"pattern": "triad", "bytes": 64 << 20, "dtype": "fp64"}
_POINT_S = 0.2
_WIDE = {"vocab_size": 2048, "hidden_size": 256, "layers": 2, "experts": 8, "expert_hidden_size": 384}
_LONG = {"vocab_size": 1024, "hidden_size": 128, "layers": 3, "experts": 2, "expert_hidden_size": 512}
_WORDS = {"vocab_size": 32768, "hidden_size": 128, "layers": 2, "experts": 4, "expert_hidden_size": 256}


def _model(sizes: dict[str, int], query_heads: int, kv_heads: int) -> ModelConfig:
    heads = {"query_heads": query_heads, "kv_heads": kv_heads, "head_dim": 32}
    return ModelConfig.model_validate({**sizes, **heads, "router_hidden_size": 32, "skip_rule": "zero"})


RUNS = (
    ("tiny", TINY, 256, 8, 4),
    ("wide", _model(_WIDE, 8, 2), 128, 16, 8),
    ("long", _model(_LONG, 4, 1), 1024, 2, 1),
    ("large vocabulary", _model(_WORDS, 4, 2), 256, 4, 2),
)
"""Name, model, context, and the sequences of a step and of a microbatch. Nothing was fitted to any of them."""


def run() -> None:
    """Measure and write results/size.json."""
    torch.set_num_threads(1)
    ranks = Ranks(
        rank=0, local_rank=0, local_size=1, nodes=["n0"], device=torch.device("cpu"), store=dist.HashStore(),
        timeout=timedelta(seconds=600),
    )  # fmt: skip
    dist.init_process_group("gloo", store=dist.PrefixStore("groups", ranks.store), rank=0, world_size=1)
    rows = []
    with mock.patch("time.perf_counter", time.process_time), mock.patch.object(gemm, "_POINT_S", _POINT_S):
        for each in RUNS:
            rows.append(_row(ranks, *each))
            print(f"size: {each[0]}: {rows[-1]['ratio']} of the measured step", file=sys.stderr, flush=True)
            about = {"torch": torch.__version__, "threads": 1, "clock": "processor time"}
            write_result("size", {**about, "shapes": len(RUNS), "runs": rows})  # each row: they take long


def _row(
    ranks: Ranks, name: str, model: ModelConfig, context: int, global_batch: int, micro_batch: int
) -> dict[str, Any]:
    phase = {"name": name, "tokens": 10**9, "context": context, "global_batch": global_batch, "lr": 1e-3}
    phase["micro_batch"] = micro_batch
    with tempfile.TemporaryDirectory() as folder:
        spec = _spec(Path(folder), model, phase)
        products = [Point({"dtype": "fp32", **each}, 0.0) for each in measured_products(spec, on_cpu=True)]
        rates: list[list[dict[str, Any]]] = []
        with _steps(Path(folder), spec, ranks) as steps:
            for _ in range(TURNS):
                found = [gemm.run(each, ranks) for each in products]
                rates.append([each for each in found if each])
                triad = hbm.run(Point(TRIAD, 0.0), ranks)
                steps.take()
        middle = [min(each, key=lambda row: abs(row["seconds"] - median(other["seconds"] for other in each)))
                  for each in (list(rows) for rows in zip(*rates, strict=True))]  # fmt: skip
        machine = {"gpu": None, "cpu": "this one"}
        files = [Path(folder, "gemm.json"), Path(folder, "hbm.json")]
        files[0].write_text(json.dumps({"benchmark": "gemm", "machine": machine, "rows": middle}))
        files[1].write_text(json.dumps({"benchmark": "hbm", "machine": machine, "rows": [triad]}))
        table = load_rates(files, "fp32")
    (size,) = run_size(spec, Card(None, None), Rates(table, on_cpu=True), on_cpu=True).phases
    assert size.time is not None
    measured = median(row["step_time_s"] for row in steps.rows)
    return {
        "model": name,
        "tokens_of_a_step": global_batch * context,
        "expected_s": round(size.time.seconds, 4),
        "measured_s": round(measured, 4),
        "ratio": round(size.time.seconds / measured, 3),
        "expected_parts_s": {part: round(seconds, 4) for part, seconds in asdict(size.time).items()},
        "measured_parts_s": {
            part: round(median(row["time_split_s"][part] for row in steps.rows), 4)
            for part in ("data", "forward", "backward", "reduce", "optimizer", "other")
        },
        "measured_steps_s": [round(row["step_time_s"], 4) for row in steps.rows],
    }


def _spec(folder: Path, model: ModelConfig, phase: dict[str, Any]) -> RunSpec:
    file = folder / "run.yaml"
    parallel = {"dtype": "fp32", "threads": 1, "device": "cpu"}
    body = {"model": model.model_dump(mode="json"), "phases": [phase], "parallel": parallel}
    file.write_text(json.dumps({**body, "data": {"path": "tokens.h5"}, "slurm": {"ranks_per_node": 1}}))
    return resolve_run(file, cluster="local").spec


class _Steps:
    """A trainer whose steps are taken a few at a time."""

    def __init__(self, trainer: Trainer, folder: Path) -> None:
        self._trainer, self._folder = trainer, folder
        self.rows: list[dict[str, Any]] = []

    def take(self, count: int = STEPS) -> None:
        """Take steps, and keep what the telemetry wrote of them; the first has the time since the last ones."""
        before = self._trainer.step
        for _ in range(count + 1):
            self._trainer.take_step()
        found = read_jsonl(self._folder / "metrics.jsonl")
        self.rows += [row for row in found if row["kind"] == "step" and row["step"] > before + 1]


@contextmanager
def _steps(folder: Path, spec: RunSpec, ranks: Ranks) -> Iterator[_Steps]:
    sections = spec.model_dump(mode="json", include={"model", "optim", "parallel", "metrics"})
    phase = spec.phases[0]
    values = {"sections": sections, "phase": phase.model_dump(mode="json"), "steps": 10 * TURNS * STEPS}
    config = train.config_of({**values, "microbatches": phase.global_batch // phase.micro_batch}, 1, folder)
    train.write_tokens(folder / "tokens.h5", config)
    group = dist.group.WORLD
    assert group is not None
    world = World(0, 1, 1, ranks.device, group, dist.PrefixStore(spec.phases[0].name, ranks.store))
    clock = partial(StepClock, now=time.process_time)
    with mock.patch("zslurm.train.loop.StepClock", clock):
        trainer = Trainer(folder, config, world, StopRequest())
    with trainer.observers, trainer.loader:
        steps = _Steps(trainer, folder)
        steps.take(train.WARM_UP)
        steps.rows.clear()
        yield steps
    trainer.checkpointer.close()
