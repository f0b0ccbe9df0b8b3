"""The step time that `zslurm plan size` expects against a step of the trainer, on this CPU.

Expected: the rates of every product and of attention, the times of the parts of a microbatch and of Muon's
Newton-Schulz steps as `zslurm bench gemm --run` measures them, and the triad of `zslurm bench hbm`, read by
`zslurm plan size`. Peer: the run's optimizer step by the trainer, on synthetic tokens, as `zslurm bench train`
takes it. Both on one thread of this process and in processor time: the machine is shared, and by the clock a step
of seconds is disturbed more often than a product of milliseconds.

Processor time too depends on what else runs: on the caches and the memory that others leave. So the two take turns
within a turn already: a step is taken after every few of the measured calls. The ratio of a turn is the step time
expected from the rates measured in that turn, divided by the median time of the steps taken in it. The result is
the median of these ratios, with the smallest and the largest.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
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
from zslurm.bench.measurement import Point, Row
from zslurm.bench.ranks import BenchRanks
from zslurm.config.spec import RunSpec
from zslurm.submit.resolve import resolve_run
from zslurm.submit.run_products import measured_products
from zslurm.submit.size import Card, run_size
from zslurm.train.config import ModelConfig
from zslurm.train.jsonl import read_jsonl
from zslurm.train.loop import Trainer
from zslurm.train.parallel.world import World
from zslurm.train.plan.rates import Rates, load_rates
from zslurm.train.plan.step_time import StepTime
from zslurm.train.setup import open_trainer
from zslurm.train.stop import StopRequest
from zslurm.train.telemetry.timing import StepClock

TURNS, STEPS = 7, 6
TRIAD = {"pattern": "triad", "bytes": 64 << 20, "dtype": "fp64"}
_POINT_S = 0.15
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


def run(names: Sequence[str] = ()) -> None:
    """Measure the shapes of these names, by default all, and write results/size.json."""
    torch.set_num_threads(1)
    ranks = BenchRanks(
        rank=0, local_rank=0, local_size=1, nodes=["n0"], device=torch.device("cpu"), store=dist.HashStore(),
        timeout=timedelta(seconds=600),
    )  # fmt: skip
    dist.init_process_group("gloo", store=dist.PrefixStore("groups", ranks.store), rank=0, world_size=1)
    rows = []
    with mock.patch("time.perf_counter", time.process_time), mock.patch.object(gemm, "_POINT_S", _POINT_S):
        for each in (each for each in RUNS if each[0] in names or not names):
            rows.append(_row(ranks, *each))
            print(f"size: {each[0]}: {rows[-1]['ratio']} of the measured step", file=sys.stderr, flush=True)
            about = {"torch": torch.__version__, "threads": 1, "clock": "processor time"}
            write_result("size", {**about, "shapes": len(RUNS), "runs": rows})  # each row: they take long


def _row(
    ranks: BenchRanks, name: str, model: ModelConfig, context: int, global_batch: int, micro_batch: int
) -> dict[str, Any]:
    phase = {"name": name, "tokens": 10**9, "context": context, "global_batch": global_batch, "lr": 1e-3}
    phase["micro_batch"] = micro_batch
    turns: list[_Turn] = []
    with tempfile.TemporaryDirectory() as folder:
        spec = _spec(Path(folder), model, phase)
        products = [Point({"dtype": "fp32", **each}, 0.0) for each in measured_products(spec, on_cpu=True)]
        with _trainer(Path(folder), spec, ranks) as trainer:
            for _ in range(TURNS):
                turns.append(_turn(Path(folder), spec, products, trainer, ranks))
                print(f"size: {name}: {turns[-1].ratio:.3f} in a turn", file=sys.stderr, flush=True)
        split = [row["time_split_s"] for row in read_jsonl(Path(folder, "metrics.jsonl")) if row["kind"] == "step"]
    ratios = [turn.ratio for turn in turns]
    steps = [each for turn in turns for each in turn.steps_s]
    return {
        "model": name,
        "tokens_of_a_step": global_batch * context,
        "ratio": round(median(ratios), 3),
        "least_and_most_of_a_turn": [round(min(ratios), 3), round(max(ratios), 3)],
        "turns": TURNS,
        "expected_s": round(median(turn.expected.seconds for turn in turns), 4),
        "measured_s": round(median(steps), 4),
        "least_and_most_of_a_step_s": [round(min(steps), 4), round(max(steps), 4)],
        "steps": len(steps),
        "expected_parts_s": {
            part: round(median(asdict(turn.expected)[part] for turn in turns), 4)
            for part in asdict(turns[0].expected)
        },
        "measured_parts_s": {
            part: round(median(each[part] for each in split[train.WARM_UP :]), 4)
            for part in ("forward", "backward", "reduce", "optimizer")
        },
    }


@dataclass(frozen=True)
class _Turn:
    """Steps of the trainer, and the step time expected from the rates that were measured between them."""

    expected: StepTime
    steps_s: list[float]

    @property
    def ratio(self) -> float:
        return self.expected.seconds / median(self.steps_s)


def _turn(folder: Path, spec: RunSpec, products: list[Point], trainer: Trainer, ranks: BenchRanks) -> _Turn:
    rows: list[Row | None] = []
    steps_s: list[float] = []
    for number, each in enumerate(products):
        if number * STEPS // len(products) == len(steps_s):
            began = time.process_time()
            trainer.take_step()
            steps_s.append(time.process_time() - began)
        rows.append(gemm.run(each, ranks))
    machine = {"gpu": None, "cpu": "this one"}
    files = [folder / "gemm.json", folder / "hbm.json"]
    files[0].write_text(json.dumps({"benchmark": "gemm", "machine": machine, "rows": rows}))
    triad = hbm.run(Point(TRIAD, 0.0), ranks)
    files[1].write_text(json.dumps({"benchmark": "hbm", "machine": machine, "rows": [triad]}))
    rates = Rates(load_rates(files, "fp32"), on_cpu=True)
    (size,) = run_size(spec, Card(None, None), rates, on_cpu=True).phases
    assert size.time is not None
    return _Turn(size.time, steps_s)


def _spec(folder: Path, model: ModelConfig, phase: dict[str, Any]) -> RunSpec:
    file = folder / "run.yaml"
    parallel = {"dtype": "fp32", "threads": 1, "device": "cpu"}
    body = {"model": model.model_dump(mode="json"), "phases": [phase], "parallel": parallel}
    file.write_text(json.dumps({**body, "data": {"path": "tokens.h5"}, "slurm": {"ranks_per_node": 1}}))
    return resolve_run(file, cluster="local").spec


@contextmanager
def _trainer(folder: Path, spec: RunSpec, ranks: BenchRanks) -> Iterator[Trainer]:
    """Yield a trainer that has taken its first steps."""
    sections = spec.model_dump(mode="json", include={"model", "optim", "parallel", "metrics"})
    phase = spec.phases[0]
    values = {"sections": sections, "phase": phase.model_dump(mode="json"), "steps": 2 * TURNS * STEPS}
    config = train.config_of({**values, "microbatches": phase.global_batch // phase.micro_batch}, 1, folder)
    train.write_tokens(folder / "tokens.h5", config)
    group = dist.group.WORLD
    assert group is not None
    world = World(0, 1, 1, ranks.device, group, dist.PrefixStore(spec.phases[0].name, ranks.store))
    clock = partial(StepClock, now=time.process_time)
    with mock.patch("zslurm.train.setup.StepClock", clock):
        trainer = open_trainer(folder, config, world, StopRequest())
    with trainer.observers, trainer.loader:
        for _ in range(train.WARM_UP):
            trainer.take_step()
        yield trainer
    trainer.checkpointer.close()
