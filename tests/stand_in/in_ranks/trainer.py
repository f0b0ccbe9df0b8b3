"""The stand-in for zslurm.train.setup; see tests/stand_in/__init__.py. Its parts are called as the trainer's are.

It reads config.json as it is. What it has no part for it refuses: such a test is to use the trainer.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
from torch.distributed import TCPStore  # the stand-in's

from zslurm.checkpoint_tools import (
    Checkpoint,
    CheckpointError,
    Entry,
    ShardReport,
    Tensor,
    acquire,
    assemble,
    commit,
    list_checkpoints,
    partition,
    prune,
)
from zslurm.checkpoint_tools import begin as begin_checkpoint
from zslurm.checkpoint_tools.quantities import counted, show_bytes
from zslurm.train.checkpointing import writer  # the stand-in's
from zslurm.train.errors import TrainError
from zslurm.train.jsonl import JsonLinesWriter
from zslurm.train.progress import CheckpointState, Phase, ProgressWriter
from zslurm.train.sections.segments import segments_of
from zslurm.train.stop import Ending, StopRequest

STEP_S = float(os.environ.get("ZSLURM_TEST_STEP_S", "0.02"))
"""What a step takes: so long runs do not end before a test has done something to them."""

_PARTS = ("data", "forward", "backward", "reduce", "optimizer", "gather", "checkpoint", "other")
_TENSORS = (Tensor("weights", (16, 64), {"master": "F64"}), Tensor("norm", (64,), {"master": "F64"}))
_REFUSED = (
    ("init",), ("checkpoint", "resume_from"), ("checkpoint", "local_dir"), ("checkpoint", "rescue_dir"),
    ("evaluation", "data"), ("evaluation", "command"), ("metrics", "profile_steps"), ("metrics", "tensorboard"),
)  # fmt: skip


class Losses(NamedTuple):
    """The part of the model's losses that tests/faults/in_ranks spoils."""

    objective: float


class Model:
    """Weights that shrink a little in every step, and whose size is the loss."""

    def __init__(self) -> None:
        self.weights = {tensor.name: np.linspace(0.5, 1.5, tensor.numel) for tensor in _TENSORS}

    def losses(self) -> tuple[Losses, None]:
        return Losses(4.2 * float(np.mean(self.weights["weights"]))), None

    def update(self) -> None:
        for values in self.weights.values():
            values *= 0.999


class World:
    """The ranks of the run; collectives go through the store of rank 0."""

    def __init__(self) -> None:
        self.rank, self.size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        self.store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        self.store.join(self.rank, self.size)
        self.all_gather = self.store.all_gather
        self.all_gather(None)

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def do_on_first(self, action: Callable[[], str]) -> str:
        """What `action` returns on rank 0, for all ranks.

        Raises:
            CheckpointError: it failed.
        """
        return self.do_on_all(action if self.is_first else lambda: "")[0]

    def do_on_all(self, action: Callable[[], str]) -> list[str]:
        """What `action` returns on each rank, for all ranks.

        Raises:
            CheckpointError: it failed on some.
        """
        try:
            mine = {"value": action()}
        except CheckpointError as error:
            mine = {"problem": str(error)}
        answers = self.all_gather(mine)
        for answer in answers:
            if "problem" in answer:
                raise CheckpointError(answer["problem"])
        return [answer["value"] for answer in answers]


class Step(NamedTuple):
    """One step of the plan."""

    phase: dict[str, Any]
    tokens: int


class Trainer:
    """One rank of a run."""

    def __init__(self, run_dir: Path, config: dict[str, Any], world: World, stop: StopRequest) -> None:
        for section, *keys in _REFUSED:
            found = config.get(section)
            for key in keys:
                found = (found or {}).get(key)
            assert not found, f"the stand-in has no {'.'.join((section, *keys))}: let this test use the trainer"
        assert config["parallel"]["device"] != "cuda", "the stand-in has no GPU: let this test use the trainer"
        self.config, self.world, self.stop = config, world, stop
        self.root, self.attempt = run_dir / "checkpoints", int(os.environ["ZSLURM_ATTEMPT"])
        self.stages = [
            (phase, stage)
            for phase in config["phases"]
            for stage in segments_of(
                phase["tokens"], phase["context"], phase["global_batch"],
                [(ramp["until_tokens"], ramp["global_batch"]) for ramp in phase["batch_ramp"]],
            )
        ]  # fmt: skip
        self.total_steps = sum(stage.steps for _, stage in self.stages)
        self.progress = ProgressWriter(world.rank, self.attempt)
        self.model, self.step, self.tokens, self.work_ns = Model(), 0, 0, 0
        self.lock = None
        world.do_on_first(self._lock)
        self._resume()
        self.metrics = JsonLinesWriter(run_dir / "metrics.jsonl") if world.is_first else None

    def _lock(self) -> str:
        self.lock = acquire(self.root, job=os.environ.get("SLURM_JOB_ID", ""))
        return ""

    def _resume(self) -> None:
        name, on = self.config["run"]["name"], f"on {counted(self.world.size, 'rank')}"
        found = json.loads(self.world.do_on_first(self._candidates))
        for path in map(Path, found):
            try:
                self.world.do_on_all(lambda path=path: self._load(path))
            except CheckpointError as error:
                self._say(f"checkpoint {path.name} is passed over: {error}")
                continue
            return self._say(f"resuming {name} from {path.name} {on}")
        if found:
            raise TrainError(f"{self.root}: none of its {counted(len(found), 'checkpoint')} can be read")
        return self._say(f"starting {name} {on} (cpu)")

    def _candidates(self) -> str:
        listings = list_checkpoints(self.root)
        for listing in listings:
            if not listing.complete:
                self._say(f"checkpoint {listing.path.name} is passed over: {listing.reason}")
        return json.dumps([str(listing.path) for listing in listings if listing.complete])

    def _load(self, path: Path) -> str:
        with Checkpoint.open(path) as checkpoint:
            for tensor in _TENSORS:
                checkpoint.read(tensor.name, "master", 0, tensor.numel, self.model.weights[tensor.name])
            self.step, self.tokens = checkpoint.manifest.step, checkpoint.manifest.tokens
        return ""

    def run(self) -> Ending:
        """Train to the end of the plan, or until asked to stop."""
        while self.step < self.total_steps:
            began, here = time.monotonic(), self._at(self.step)
            loss, stop = self.train_step(here)
            self.stop.renew()
            self.step, self.tokens = self.step + 1, self.tokens + here.tokens
            self.progress.update(phase=Phase.STEP, step=self.step, work_ns=self.work_ns)
            self._write_step(here, loss, time.monotonic() - began)
            last = self.step == self.total_steps
            if last or stop or self.step % (self.config["checkpoint"]["every_steps"] or self.step + 1) == 0:
                self._save()
            if stop and not last:
                self._release()
                self._say(f"stopped as asked after step {self.step}; start again to continue")
                return Ending.INTERRUPTED
        self._release()
        self.progress.update(phase=Phase.DONE)
        self._say(f"completed {counted(self.total_steps, 'step')}, saved at {self.step}")
        return Ending.COMPLETED

    def train_step(self, here: Step) -> tuple[float, bool]:
        time.sleep(STEP_S)
        losses, _ = self.model.losses()
        self.work_ns += int(STEP_S * 1e9)
        self.progress.update(waiting=True)
        ranks = self.world.all_gather([losses.objective, self.stop.asked])
        loss = sum(loss for loss, _ in ranks) / len(ranks)
        assert math.isfinite(loss), "the stand-in skips no steps: let this test use the trainer"
        self.model.update()
        return loss, any(asked for _, asked in ranks)

    def _at(self, step: int) -> Step:
        for phase, stage in self.stages:
            if step < stage.steps:
                return Step(phase, stage.global_batch * phase["context"])
            step -= stage.steps
        raise IndexError(step)

    def _write_step(self, here: Step, loss: float, seconds: float) -> None:
        per_s, lr = here.tokens / seconds, here.phase["lr"]
        in_detail = self.step % self.config["metrics"]["log_every"] == 0
        self._write(
            "step", step=self.step, tokens=self.tokens, phase=here.phase["name"], loss=loss, lr=lr, grad_norm=1.0,
            tokens_per_s=per_s, tokens_per_s_per_rank=per_s / self.world.size, tflops_per_rank=per_s / 1e9,
            mfu=None, step_time_s=seconds, time_split_s=dict.fromkeys(_PARTS, seconds / len(_PARTS)),
            memory_rss_bytes=psutil.Process().memory_info().rss, skip_share=0.0, load_entropy=1.0,
            **({"load_entropy_by_layer": [1.0], "load_shares": [[1.0]]} if in_detail else {}),
        )  # fmt: skip
        if self.step % 10 == 0 or self.step == self.total_steps:
            self._write("sources", step=self.step, phase=here.phase["name"], sources=self._sources())
        if self.step == 1 or in_detail:
            self._say(
                f"step {self.step}/{self.total_steps} loss {loss:.4f} lr {lr:.3g} "
                f"grad norm 1 {per_s:,.0f} tokens/s"
            )

    def _sources(self) -> dict[str, dict[str, float]]:
        """Of each source as much; no data are read."""
        names = sorted(self.config["data"]["sources"]) or ["data"]
        return {name: {"tokens": self.tokens // len(names), "epochs": 0.5} for name in names}

    def _save(self) -> None:
        self.progress.update(phase=Phase.SAVE, checkpoint=CheckpointState.REQUESTED)
        began = time.monotonic()

        def report(state: str, size: int = 0, **more: Any) -> None:
            seconds = time.monotonic() - began
            facts = {"bytes": size, "seconds": seconds, "stall_s": seconds, "reason": None} | more
            self._write("checkpoint", step=self.step, state=state, **facts)

        report("REQUESTED")
        try:
            nonce = f"attempt{self.attempt}-{os.getpid():x}-{self.step}"
            directory = Path(self.world.do_on_first(lambda: str(begin_checkpoint(self.root, self.step, nonce))))
            self.progress.update(checkpoint=CheckpointState.STAGED)
            report("STAGED")
            reports = [ShardReport.from_json(one) for one in self.world.do_on_all(lambda: self._shard(directory))]
            self.progress.update(checkpoint=CheckpointState.WRITTEN)
            report("WRITTEN", reports[0].size)
            path = Path(self.world.do_on_first(lambda: self._commit(directory, reports)))
        except CheckpointError as error:
            report("FAILED", reason=str(error))
            self._say(f"the save of step {self.step} failed: {error}")
            raise TrainError(f"checkpoint: {error}") from error
        size = sum(one.size for one in reports)
        self.progress.update(phase=Phase.STEP, checkpoint=CheckpointState.COMMITTED, committed_step=self.step)
        report("COMMITTED", size, best_step=None, best_loss=None, best_metric=None)
        took = time.monotonic() - began
        self._say(f"saved {path.name} ({show_bytes(size)} in {took:.2f} s, training waited {took:.3f} s)")

    def _shard(self, directory: Path) -> str:
        entries = [
            Entry(extent.tensor, "master", extent.start, extent.stop,
                  self.model.weights[extent.tensor][extent.start : extent.stop])
            for extent in partition(_TENSORS, self.world.size).extents(self.world.rank)
        ]  # fmt: skip
        return writer.write_shard(directory, self.world.rank, self.world.size, entries).to_json()

    def _commit(self, directory: Path, reports: list[ShardReport]) -> str:
        cursor = {"step": self.step, "stand_in": True}
        facts = {"model": self.config["model"], "cursor": cursor, "state": {}, "tensors": _TENSORS}
        manifest = assemble(reports, step=self.step, tokens=self.tokens, **facts)
        path = commit(self.root, directory, manifest)
        section = self.config["checkpoint"]
        prune(self.root, section["keep_last"], keep_every=section["keep_every"])
        return str(path)

    def _release(self) -> None:
        if self.lock is not None:
            self.lock.release()

    def _write(self, kind: str, **fields: Any) -> None:
        if self.metrics is not None:
            self.metrics.append({"kind": kind, "attempt": self.attempt, **fields, "time": time.time()})

    def _say(self, text: str) -> None:
        if self.world.is_first:
            print(text, flush=True)


def build(run_dir: Path, config: dict[str, Any], world: World, stop: StopRequest) -> Trainer:
    return Trainer(run_dir, config, world, stop)


def begin(trainer: Trainer) -> None:
    """Begin to train: all is open."""


def open_trainer(run_dir: Path, config: dict[str, Any], world: World, stop: StopRequest) -> Trainer:
    trainer = build(run_dir, config, world, stop)
    begin(trainer)
    return trainer
