"""Single bits that flip in a run with `integrity.every_steps`: how many are found, when, and with the right rank.

    flips    four ranks on two nodes; each flip is of a random rank, element and bit, in a running trainer, which
             takes back what it did after each. A product is wrong from a random step until it is found; a received
             gradient and weights in one checked step; masters and moments between two steps, checked or not
    files    a random bit of a random file of a checkpoint, which is then read
    clean    steps of sound runs, which are resumed, resized and recovered: each check passes, or there is an alarm
    cost     seconds of the checks and of the digests in every step, against those of a step

ZSLURM_BENCHMARK_FLIPS and ZSLURM_BENCHMARK_STEPS have the numbers of flips of each target and of clean steps.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.common import write_result
from tests.train.integrity.flips import PLACES, flipped
from tests.train.ranks import train_on
from tests.train.recovery.cluster import Cluster
from tests.train.recovery.test_recovery import recover_once
from tests.train.runs import make_corpus, make_run
from zslurm.checkpoint_tools import CheckpointError, list_checkpoints, verify
from zslurm.train.errors import NumbersWrong
from zslurm.train.integrity.checks import Integrity
from zslurm.train.jsonl import read_jsonl
from zslurm.train.loop import Trainer
from zslurm.train.stop import Ending

FLIPS = int(os.environ.get("ZSLURM_BENCHMARK_FLIPS", "1000"))
STEPS = int(os.environ.get("ZSLURM_BENCHMARK_STEPS", "100000"))
EVERY = 4
PARTS = 5
"""Starts of a sound run."""
LARGER = {"hidden_size": 512, "layers": 6, "expert_hidden_size": 512, "router_hidden_size": 64}


def run() -> None:
    """Measure, and write the result."""
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        corpus = make_corpus(folder / "corpus.h5")
        flips = {target: of_target(folder / target, corpus, target) for target in PLACES}
        flips["file"] = in_files(folder / "file", corpus)
        figures = {
            "what": f"flipped bits on four ranks, a check every {EVERY} steps; clean steps; cost at K = 100",
            "flips": flips,
            "clean": clean(folder, corpus),
            "cost": cost(folder / "cost", corpus),
        }
    write_result("integrity", figures)


def of_target(run_dir: Path, corpus: Path, target: str) -> dict[str, Any]:
    """Flip bits in one place of running ranks."""
    make_run(
        run_dir, corpus, steps=1000, integrity={"every_steps": EVERY}, data={"path": str(corpus), "prefetch": 0}
    )
    done = train_on(run_dir, 4, partial(_flip_in_rank, target, FLIPS), local_size=2)
    assert done.returncode == 0, done.stderr[-2000:]
    outcomes = json.loads((run_dir / "outcomes.json").read_text())
    detected = [outcome for outcome in outcomes if outcome["steps"] is not None]
    missed = Counter(outcome["bit"] for outcome in outcomes if outcome["steps"] is None)
    return {
        "flips": len(outcomes),
        "found": len(detected),
        "right_rank": sum(outcome["named"] == outcome["rank"] for outcome in detected),
        "steps_at_most": max((outcome["steps"] for outcome in detected), default=None),
        "missed_by_bit": {str(bit): missed[bit] for bit in sorted(missed)},
    }


def _flip_in_rank(target: str, flips: int) -> None:
    Trainer.run = lambda self: _flipping_run(self, target, flips)  # type: ignore[method-assign]


def _flipping_run(trainer: Trainer, target: str, flips: int) -> Ending:
    outcomes = []
    names = [
        name
        for name, _ in trainer.model.named_parameters()
        if ".experts." not in name and not name.startswith("embedding")  # their gradients pass no hook
    ]
    with trainer.observers, trainer.loader:
        for _ in range(3):
            trainer.take_step()
        state = _state_of(trainer)
        for number in range(flips):
            draw = random.Random(f"{target} {number}")
            rank, element, bit = draw.randrange(trainer.world.size), draw.randrange(1 << 30), draw.randrange(32)
            tensor = draw.choice(names)
            for _ in range(draw.randrange(EVERY) if target not in ("received", "weights") else 0):
                trainer.take_step()
            outcome: dict[str, Any] = {"rank": rank, "bit": bit, "steps": None, "named": None}
            for steps in range(1, EVERY + 1 if target == "product" else 2):
                try:
                    if rank == trainer.world.rank:
                        with flipped(trainer, target, element, bit, tensor):
                            trainer.take_step()
                    else:
                        trainer.take_step()
                except NumbersWrong as error:
                    outcome |= {
                        "steps": steps,
                        "named": int(str(error).partition(" on rank ")[2].split()[0].rstrip(",;")),
                    }
                    break
            outcomes.append(outcome)
            _restore(trainer, state)
    if trainer.world.is_first:
        (trainer.run_dir / "outcomes.json").write_text(json.dumps(outcomes))
    return Ending.COMPLETED


def _state_of(trainer: Trainer) -> dict[str, Any]:
    states = [state.values.clone() for state in trainer.optimizer.states]
    return {
        "step": trainer.step,
        "steps": trainer.optimizer.steps,
        "states": states,
        "balance": trainer.balance,
        "recent": trainer.guard.recent,
    }


def _restore(trainer: Trainer, state: dict[str, Any]) -> None:
    trainer.shards.abandon()
    for owned, values in zip(trainer.optimizer.states, state["states"], strict=True):
        owned.values.copy_(values)
    trainer.step, trainer.optimizer.steps = state["step"], state["steps"]
    trainer.guard.recent = state["recent"]
    trainer.set_balance(state["balance"])
    trainer.shards.gather_weights()
    trainer.integrity.rest()


def in_files(run_dir: Path, corpus: Path) -> dict[str, Any]:
    """Flip bits in the files of a checkpoint, and read it."""
    make_run(run_dir, corpus, steps=3)
    assert train_on(run_dir, 2).returncode == 0
    (listing,) = list_checkpoints(run_dir / "checkpoints")
    files = sorted(path for path in listing.path.rglob("*") if path.is_file())
    sizes, detected, draw = [path.stat().st_size for path in files], 0, random.Random(5)
    missed: Counter[str] = Counter()
    for _ in range(FLIPS):
        (path,) = draw.choices(files, sizes)
        content = path.read_bytes()
        spoiled = bytearray(content)
        spoiled[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        path.write_bytes(spoiled)
        if _is_refused(listing.path):
            detected += 1
        else:
            missed[path.name] += 1
        path.write_bytes(content)
    return {"flips": FLIPS, "found": detected, "missed_by_file": dict(missed)}


def _is_refused(path: Path) -> bool:
    try:
        return not verify(path, threads=1).sound
    except CheckpointError:
        return True


def clean(folder: Path, corpus: Path, steps: int = STEPS) -> list[dict[str, Any]]:
    """Train sound runs of several shapes, a part of the steps each, then two that recover in memory."""
    shapes: tuple[tuple[int, int, dict[str, Any]], ...] = (
        (1, 1, {"dtype": "fp32"}),
        (1, 1, {"dtype": "bf16"}),
        (2, 1, {"dtype": "bf16", "reduce_dtype": "bf16"}),
        (3, 3, {"dtype": "fp32"}),
        (4, 2, {"dtype": "fp32", "collectives": "two_level"}),
        (4, 2, {"dtype": "bf16"}),
    )
    rows = [
        _sound_run(folder / f"clean-{number}", corpus, steps // len(shapes), *shape)
        for number, shape in enumerate(shapes)
    ]
    return [
        *rows,
        *(_recovered_run(folder / name, corpus, shrinks=name == "shrunk") for name in ("joined", "shrunk")),
    ]


def _sound_run(
    run_dir: Path, corpus: Path, steps: int, ranks: int, local: int, parallel: dict[str, Any]
) -> dict[str, Any]:
    """Train a sound run in PARTS starts: each resumes where the last one ended, the third with one rank more."""
    failed = 0
    for part in range(1, PARTS + 1):
        _make_sound(run_dir, corpus, steps * part // PARTS, parallel=parallel)
        resized = part == 3
        done = train_on(run_dir, ranks + resized, local_size=ranks + resized if resized else local)
        failed += done.returncode != 0
    return _tallied(run_dir, ranks, local, parallel, failed, "resumed 4 times, once with one rank more")


def _recovered_run(run_dir: Path, corpus: Path, *, shrinks: bool) -> dict[str, Any]:
    """Train without wrong numbers, and lose a rank: a warm process replaces it, or the ranks shrink."""
    _make_sound(run_dir, corpus, 500, checkpoint={"every_steps": 100, "background": True})
    cluster = Cluster(run_dir, 3, warm=0 if shrinks else 1, faults={"1": "reduce_scatter:100:KILL"})
    try:
        if shrinks:
            cluster.shrink(cluster.wait_lost())
            cluster.outcome()
        else:
            recover_once(cluster)
        failed = sum(code != 0 for code in cluster.finish().values())
    finally:
        cluster.stop()
    what = "one rank lost in memory" + (", no spare" if shrinks else ", a spare joined")
    return _tallied(run_dir, 3, 1, {"dtype": "fp32"}, failed, what)


def _make_sound(run_dir: Path, corpus: Path, steps: int, **sections: dict[str, Any]) -> None:
    sections = {"checkpoint": {"every_steps": 100_000}, "metrics": {"log_every": 1000}} | sections
    make_run(run_dir, corpus, steps=steps, integrity={"every_steps": 10}, **sections)


def _tallied(
    run_dir: Path, ranks: int, local: int, parallel: dict[str, Any], failed: int, what: str
) -> dict[str, Any]:
    kinds = Counter(row["kind"] for row in read_jsonl(run_dir / "metrics.jsonl"))
    row = {
        "ranks": ranks,
        "ranks_of_a_node": local,
        "parallel": parallel,
        "what": what,
        "steps": kinds["step"],
        "checks": kinds["integrity"],
        "alarms": kinds["integrity_off"] + failed,
    }
    print(json.dumps(row), file=sys.stderr, flush=True)
    return row


def cost(run_dir: Path, corpus: Path) -> dict[str, Any]:
    """Time the checks of a larger model on one rank, which computes all the time."""
    phase = {"context": 256, "global_batch": 8, "micro_batch": 1, "tokens": 24 * 256 * 8}
    make_run(run_dir, corpus, model=LARGER, phase=phase, integrity={"every_steps": 4})
    done = train_on(run_dir, 1, _timed)
    assert done.returncode == 0, done.stderr[-2000:]
    times = json.loads((run_dir / "times.json").read_text())
    step_s = statistics.median(
        row["step_time_s"]
        for row in read_jsonl(run_dir / "metrics.jsonl")
        if row["kind"] == "step" and row["step"] % 4
    )
    check_s = statistics.median(times["begin"]) + statistics.median(times["finish"])
    rest_s = statistics.median(times["rest"]) + statistics.median(times["changed"])
    return {
        "parameters": times["parameters"],
        "microbatches_of_a_rank": 8,
        "step_s": round(step_s, 4),
        "check_s": round(check_s, 4),
        "every_step_s": round(rest_s, 5),
        "share_at_100": round((check_s / 100 + rest_s) / step_s, 5),
    }


def _timed() -> None:
    times: dict[str, Any] = {}
    for name in ("begin", "finish", "rest", "changed"):
        setattr(Integrity, name, _timing(getattr(Integrity, name), times.setdefault(name, [])))
    run_trainer = Trainer.run

    def timed(self: Trainer) -> Ending:
        ending = run_trainer(self)
        times["finish"] = sorted(times["finish"])[-len(times["begin"]) :]  # in other steps it does nothing
        times["parameters"] = sum(weight.numel() for weight in self.model.parameters())
        (self.run_dir / "times.json").write_text(json.dumps(times))
        return ending

    Trainer.run = timed  # type: ignore[method-assign]


def _timing(function: Any, seconds: list[float]) -> Any:
    def timed(*arguments: Any, **named: Any) -> Any:
        started = time.perf_counter()
        try:
            return function(*arguments, **named)
        finally:
            seconds.append(time.perf_counter() - started)

    return timed
