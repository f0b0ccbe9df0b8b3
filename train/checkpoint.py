"""Checkpoints of a run: what the trainer saves, and how ranks agree on saving and loading.

The format belongs to `checkpoint_tools`; here is the trainer's side. Each rank writes its chunk of the master
weights and of both moments (12 bytes a parameter in all, each byte written once), rank 0 also the balancing
state; each rank its RNG state. bf16 weights are the rounded masters and are not written.

Ranks report through keys of the store, not through collectives or the file system: a report is the shard's
size, checksums and extents, or the reason why it could not be written. Rank 0 commits when all have reported,
and everyone learns from a key how it went. For now the save is synchronous: training waits for the commit.

Loading takes the newest checkpoint that every rank could read and check; a damaged one is named and passed over
by all ranks together. Any world size can load: a rank reads the extents that it owns now.

A run that has no checkpoint of its own may start from another one's weights (`checkpoint.start_from`): a run's,
or an imported one, which holds nothing but weights and is never taken for a checkpoint to resume from.
"""

from __future__ import annotations

import os
import time
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from checkpoint_tools import (
    BufferEntry,
    Checkpoint,
    CheckpointError,
    Entry,
    Manifest,
    Mismatch,
    ShardReport,
    Tensor,
    assemble,
    begin,
    commit,
    discard,
    list_checkpoints,
    prune,
    write_shard,
)
from train.config import ModelConfig
from train.errors import ConfigError, TrainError
from train.hub import tokenizer_of, weights_only
from train.optim.adamw import STATES, ShardedAdamW
from train.optim.balance import BalanceState
from train.parallel.world import World
from train.parallel.zero import ZeroShards
from train.shapes import TensorInfo

_NUMPY_DTYPE = {torch.float32: "F32", torch.float64: "F64"}
_NOT_RESUMABLE = "it holds weights only, no optimizer state: checkpoint.start_from starts a run from it"


@dataclass(frozen=True)
class Saved:
    """A committed checkpoint."""

    path: Path
    bytes: int
    seconds: float


@dataclass(frozen=True)
class Restored:
    """What a checkpoint said besides its tensors."""

    path: Path
    step: int
    tokens: int
    cursor: dict[str, Any]
    balance: BalanceState


@dataclass(frozen=True)
class Started:
    """What a checkpoint that a run starts from said besides its weights."""

    balance: BalanceState
    tokenizer_sha256: str | None


class Checkpointer:
    """Saves and loads one run's state on all ranks."""

    def __init__(
        self,
        root: Path,
        world: World,
        model: ModelConfig,
        shards: ZeroShards,
        optimizer: ShardedAdamW,
        *,
        keep_last: int,
        attempt: int,
    ) -> None:
        """Prepare; touches no file.

        Args:
            root: the run's `checkpoints` directory.
            keep_last: complete checkpoints that stay.
            attempt: makes temporary names unique among the attempts of a run.
        """
        self.root, self.world, self.model = root, world, model
        self.shards, self.optimizer = shards, optimizer
        self.keep_last = keep_last
        self.nonce = f"attempt{attempt}-{os.getpid():x}"

    # ------------------------------------------------------------------ saving

    def save(self, step: int, tokens: int, cursor: dict[str, Any], balance: BalanceState) -> Saved:
        """Write a checkpoint; returns on every rank when it is committed.

        Raises:
            CheckpointError: a rank could not write; every rank gets the first reason. Nothing half-written is
                left, and older checkpoints are untouched.
        """
        started = time.monotonic()
        store = dist.PrefixStore(f"save/{step}", self.world.store)
        if self.world.is_first:
            store.set("directory", _try(lambda: str(begin(self.root, step, self.nonce))))
        directory = Path(_unwrap(store.get("directory").decode()))
        rank = self.world.rank
        store.set(f"shard/{rank}", _try(lambda: self._write_shard(directory, balance).to_json()))
        if self.world.is_first:
            store.set("committed", _try(lambda: self._commit(store, directory, step, tokens, cursor, balance)))
        path, _, size = _unwrap(store.get("committed").decode()).rpartition(" ")
        return Saved(Path(path), int(size), time.monotonic() - started)

    def _write_shard(self, directory: Path, balance: BalanceState) -> ShardReport:
        arrays = {name: _host(chunk) for name, chunk in self.optimizer.arrays().items()}
        entries = [
            Entry(extent.tensor, state, extent.start, extent.stop, array[extent.in_chunk])
            for state, array in arrays.items()
            for extent in self.shards.extents
        ]
        rank = self.world.rank
        buffers = [BufferEntry(f"rng/{rank}", _host(torch.get_rng_state()))]
        if self.world.device.type == "cuda":
            buffers.append(BufferEntry(f"rng_device/{rank}", _host(torch.cuda.get_rng_state(self.world.device))))
        if self.world.is_first:
            buffers += [BufferEntry(f"balance/{name}", _host(value)) for name, value in _tensors(balance).items()]
        return write_shard(directory, rank, self.world.size, entries, buffers)

    def _commit(
        self,
        store: dist.Store,
        directory: Path,
        step: int,
        tokens: int,
        cursor: dict[str, Any],
        balance: BalanceState,
    ) -> str:
        try:
            texts = [store.get(f"shard/{rank}").decode() for rank in range(self.world.size)]
            reports = [ShardReport.from_json(_unwrap(text)) for text in texts]
            dtype = _NUMPY_DTYPE[self.shards.master.dtype]
            manifest = assemble(
                reports,
                step=step,
                tokens=tokens,
                model=self.model.model_dump(mode="json"),
                cursor=cursor,
                state={"optimizer_steps": self.optimizer.steps, "balance_steps": balance.step},
                tensors=[Tensor(row.name, row.shape, dict.fromkeys(STATES, dtype)) for row in self.shards.table],
                buffers=[buffer.name for report in reports for buffer in report.buffers],
            )
            path = commit(self.root, directory, manifest)
        except CheckpointError:
            discard(directory)
            raise
        prune(self.root, self.keep_last)
        return f"{path} {sum(report.size for report in reports)}"

    # ----------------------------------------------------------------- loading

    def load_newest(self, *, starts_elsewhere: bool = False) -> Restored | None:
        """Fill master weights, moments and RNG state from the newest sound checkpoint; None where there is none.

        Imported weights in the run's own directory are no checkpoint to resume from, but a run that does not
        start elsewhere (`starts_elsewhere`) is not to start without them, unasked.

        Raises:
            ConfigError: the checkpoint is of another model.
            TrainError: there are checkpoints, and none of them can be read.
        """
        candidates = self._agree_on_candidates()
        problems = []
        for path in candidates:
            restored, problem = self._try_load(path)
            if restored is not None:
                self._gather_and_compare()
                return restored
            if self.world.is_first:
                print(f"checkpoint {path.name} is passed over: {problem}", flush=True)
            problems.append(problem)
        if any(_NOT_RESUMABLE not in problem for problem in problems) or (problems and not starts_elsewhere):
            raise TrainError(
                f"{self.root}: none of its {len(candidates)} checkpoints can be read (reasons above); "
                "restore one, or submit with --new to start over"
            )
        return None

    def start_from(self, path: Path) -> Started:
        """Fill the master weights of a new run from any checkpoint of its model; moments stay at zero.

        Raises:
            ConfigError: the checkpoint is of another model.
            TrainError: it cannot be read.
        """
        started, problem = None, ""
        try:
            with Checkpoint.open(path, check_files=self.world.is_first) as checkpoint:
                check_same_model(checkpoint.manifest, self.model, self.shards.table)
                started = self._load_weights(checkpoint)
        except CheckpointError as error:
            problem = str(error)
        problem = self._first_problem(problem)
        if problem or started is None:
            raise TrainError(f"checkpoint.start_from: {problem}")
        self._gather_and_compare()
        return started

    def _agree_on_candidates(self) -> list[Path]:
        """Rank 0's list: file systems may show ranks different ones."""
        names: list[Any] = [None]
        if self.world.is_first:
            listings = list_checkpoints(self.root)
            for listing in listings:
                if not listing.complete:
                    print(f"checkpoint {listing.path.name} is passed over: {listing.reason}", flush=True)
            names = [[str(listing.path) for listing in listings if listing.complete]]
        dist.broadcast_object_list(names, src=0)
        return [Path(name) for name in names[0]]

    def _try_load(self, path: Path) -> tuple[Restored | None, str]:
        restored, problem = None, ""
        try:
            with Checkpoint.open(path, check_files=self.world.is_first) as checkpoint:
                check_same_model(checkpoint.manifest, self.model, self.shards.table)
                restored = self._load(checkpoint)
        except CheckpointError as error:
            problem = str(error)
        first = self._first_problem(problem)
        return (None, first) if first else (restored, "")

    def _first_problem(self, problem: str) -> str:
        """The problem of the first rank that has one; all ranks get the same answer."""
        problems: list[Any] = [None] * self.world.size
        dist.all_gather_object(problems, problem)
        return next((text for text in problems if text), "")

    def _load(self, checkpoint: Checkpoint) -> Restored:
        manifest = checkpoint.manifest
        if weights_only(manifest):
            raise Mismatch(_NOT_RESUMABLE)
        for name, chunk in self.optimizer.arrays().items():
            self._read(checkpoint, name, chunk)
        self.optimizer.restore(int(manifest.state["optimizer_steps"]))
        self._load_rng(checkpoint)
        parts = {
            name: torch.from_numpy(checkpoint.read_buffer(f"balance/{name}")).to(self.world.device)
            for name in ("bias", "exp_avg", "exp_avg_sq")
        }
        balance = BalanceState(**parts, step=int(manifest.state["balance_steps"]))
        return Restored(checkpoint.path, manifest.step, manifest.tokens, dict(manifest.cursor), balance)

    def _load_weights(self, checkpoint: Checkpoint) -> Started:
        self._read(checkpoint, "master", self.shards.master)
        initial = BalanceState.initial(self.model, self.world.device)
        bias = torch.from_numpy(checkpoint.read_buffer("balance/bias")).to(self.world.device)
        balance = BalanceState(bias, initial.exp_avg, initial.exp_avg_sq, step=0)
        return Started(balance, tokenizer_of(checkpoint.manifest))

    def _read(self, checkpoint: Checkpoint, state: str, chunk: torch.Tensor) -> None:
        """Fill this rank's chunk of one state."""
        array = _host(chunk)
        for extent in self.shards.extents:
            checkpoint.read(extent.tensor, state, extent.start, extent.stop, array[extent.in_chunk])
        chunk.copy_(torch.from_numpy(array))

    def _load_rng(self, checkpoint: Checkpoint) -> None:
        """Each rank its own state; a rank that the writers did not have keeps its freshly seeded one."""
        rank = self.world.rank
        if f"rng/{rank}" in checkpoint.buffers:
            torch.set_rng_state(torch.from_numpy(checkpoint.read_buffer(f"rng/{rank}")))
        if self.world.device.type == "cuda" and f"rng_device/{rank}" in checkpoint.buffers:
            state = torch.from_numpy(checkpoint.read_buffer(f"rng_device/{rank}"))
            torch.cuda.set_rng_state(state, self.world.device)

    def _gather_and_compare(self) -> None:
        """Rebuild the weights on every rank, and make sure that all ranks got the same ones."""
        self.shards.gather_weights()
        crc = zlib.crc32(_host(self.shards.weights.view(torch.uint8)).data)
        found = torch.tensor([crc, -crc], dtype=torch.int64, device=self.world.device)
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        if found[0] != -found[1]:
            raise TrainError(
                "after loading, ranks hold different weights: a network or memory fault; check the nodes"
            )


def check_same_model(manifest: Manifest, model: ModelConfig, table: tuple[TensorInfo, ...]) -> None:
    """Refuse a checkpoint of another model.

    Raises:
        ConfigError: naming the keys that differ.
    """
    ours = model.model_dump(mode="json")
    # A setting that is newer than the checkpoint was at its default, whatever that was called then.
    theirs = ModelConfig().model_dump(mode="json") | dict(manifest.model)
    differing = [
        f"model.{key} is {ours.get(key)!r}, the checkpoint has {theirs.get(key)!r}"
        for key in ours.keys() | theirs.keys()
        if key != "init_std" and ours.get(key) != theirs.get(key)
    ]
    if differing:
        raise ConfigError(
            f"the checkpoint at step {manifest.step} is of another model: {'; '.join(sorted(differing))}; "
            "set the model back, or submit with --new"
        )
    stored = [(tensor.name, tensor.shape) for tensor in manifest.tensors]
    if stored != [(row.name, row.shape) for row in table]:
        raise ConfigError(f"the checkpoint at step {manifest.step} has other tensors than this version's model")


def _tensors(balance: BalanceState) -> dict[str, torch.Tensor]:
    return {"bias": balance.bias, "exp_avg": balance.exp_avg, "exp_avg_sq": balance.exp_avg_sq}


def _host(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    array: np.ndarray[Any, Any] = tensor.detach().cpu().contiguous().numpy()
    return array


def _try(action: Any) -> str:
    """Run `action`; its answer or its failure as text that travels through the store."""
    try:
        return "ok " + str(action())
    except CheckpointError as error:
        return "failed " + str(error)


def _unwrap(text: str) -> str:
    """The answer in a text from `_try`.

    Raises:
        CheckpointError: it holds a failure.
    """
    kind, _, rest = text.partition(" ")
    if kind != "ok":
        raise CheckpointError(rest)
    return rest
