"""Save and load a run's state: what is saved, and how ranks agree on saving and loading.

The format belongs to `checkpoint_tools`; here is the trainer's side. Each rank writes its chunk of the master
weights and of the optimizer's state (8 bytes a parameter of Muon's matrices, 12 of the rest, each byte written
once), rank 0 also the balancing state; each rank its RNG state. bf16 weights are the rounded masters and are not
written.

A save costs training the copy of the state into host memory (snapshot.py), which runs during the next forward and
backward pass; a thread of each rank writes, and rank 0's commits (writer.py). If `checkpoint.local_dir` is set,
each rank's newest shard also stays on its node, and a restart in place reads it from there. One run writes into a
directory: rank 0 holds its lock.

Loading takes the newest checkpoint that every rank could read and check; a damaged one is named and passed over
by all ranks together. Any world size can load: a rank reads the extents that it owns now, and every block it reads
is compared with the checksum in the manifest. Then the weights are gathered, and all ranks compare what they hold.

A run without a checkpoint may start from other weights (`init`, see init_weights.py). An imported checkpoint holds
nothing but weights and is never taken for one to resume from.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from zslurm.checkpoint_tools import (
    BufferEntry,
    Checkpoint,
    CheckpointError,
    Entry,
    Lock,
    Manifest,
    Mismatch,
    NoSpace,
    ShardReport,
    Tensor,
    acquire,
    assemble,
    forget_copies,
    keep_copy,
    list_checkpoints,
    local_tier,
    prune,
)
from zslurm.checkpoint_tools.checksum import crc32
from zslurm.checkpoint_tools.quantities import counted, show_bytes
from zslurm.train.checkpointing import chain
from zslurm.train.checkpointing.init_weights import open_init
from zslurm.train.checkpointing.load_weights import load_extents
from zslurm.train.checkpointing.same_run import check_same_model, check_same_optimizer
from zslurm.train.checkpointing.snapshot import (
    DirectSnapshot,
    HostSnapshot,
    Snapshot,
    available_memory,
    snapshot_bytes,
)
from zslurm.train.checkpointing.writer import NEEDS, CheckpointWriter, Hooks, SaveRequest
from zslurm.train.config import RESUMED_FROM, TrainConfig
from zslurm.train.errors import ConfigError, HubIOError, TrainError
from zslurm.train.hub import balancing_bias, weights_only
from zslurm.train.optim.balance import BALANCE_TENSORS, BalanceState
from zslurm.train.optim.sharded import OwnedState, ShardedOptimizer, states_of
from zslurm.train.parallel.world import World
from zslurm.train.parallel.zero import ZeroShards
from zslurm.train.slurm_job import own_job_id

_LOG = logging.getLogger(__name__)
_HASHED_BYTES = 64 << 20  # of the weights, brought to the host and hashed at a time
_NUMPY_DTYPE = {torch.float32: "F32", torch.float64: "F64"}
_NOT_RESUMABLE = "it holds weights only, no optimizer state: `init: ckpt:DIR` starts a run from it"


@dataclass(frozen=True)
class Restored:
    """What a checkpoint holds besides its tensors."""

    path: Path
    step: int
    cursor: dict[str, Any]
    balance: BalanceState


class Checkpointer(Hooks):
    """Saves and loads one run's state on all ranks; as the writer's hooks, decides which files stay."""

    def __init__(
        self,
        root: Path,
        world: World,
        config: TrainConfig,
        shards: ZeroShards,
        optimizer: ShardedOptimizer,
        *,
        attempt: int,
    ) -> None:
        """Make this run the only one that writes into `root`, its `checkpoints` directory.

        The number of the attempt makes temporary names unique within the run.

        Raises:
            TrainError: another run writes there.
        """
        self.root, self.world, self.model = root, world, config.model
        self.shards, self.optimizer, self.config = shards, optimizer, config.checkpoint
        self.nonce = f"attempt{attempt}-{os.getpid():x}"
        self._timeout_s = config.parallel.timeout_s
        local_dir = self.config.local_dir
        self._tier = local_tier(Path(local_dir), root) if local_dir is not None else None
        self._writer: CheckpointWriter | None = None
        self._given_up: list[CheckpointWriter] = []
        self._alone = world.joined  # the other ranks train already
        self._takes_over = world.joined or world.resized  # the lock of a rank 0 that is gone, perhaps
        self._copy: Path | None = None  # this rank's newest shard on its node
        self._previous: str | None = None  # the link before the next one, on rank 0
        self._previous_step: int | None = None  # its step; None: that link is not known yet
        self._link: dict[str, Any] = {}
        self._unrecorded: list[dict[str, Any]] = []  # links whose lines could not be written yet
        self._lock = self._acquire_lock()

    def _acquire_lock(self) -> Lock | None:
        lock, problem = None, ""
        if self.world.is_first:
            try:
                lock = acquire(self.root, job=own_job_id(), take_over=self._takes_over)
            except NoSpace as error:
                state = snapshot_bytes(
                    {optimizer_state.name: optimizer_state.values for optimizer_state in self.optimizer.states}
                )
                problem = f"{error}; {NEEDS} {show_bytes(self.world.size * state)}"
            except CheckpointError as error:
                problem = str(error)
        if problem := self._first_problem(problem):
            raise TrainError(f"checkpoint: {problem}")
        return lock

    # ------------------------------------------------------------------ saving

    def prepare(self, staging: Callable[[], Snapshot] | None = None) -> str:
        """Get ready to save, once everything is loaded; returns a line on it for the user.

        With `staging`, saves are written from copies that are made anyway, and take no further memory.

        Raises:
            ConfigError: the copy of the state does not fit into this node's memory.
        """
        live = {state.name: state.values for state in self.optimizer.states}
        size, problem = snapshot_bytes(live), ""
        on_node = size * self.world.local_size
        if staging is None and self.config.background and on_node > (free := available_memory()):
            problem = (
                f"checkpoint.background: a copy of the state takes {show_bytes(on_node)} on a node, "
                f"{show_bytes(free)} are free; use more nodes, or set checkpoint.background: false"
            )
        if problem := self._first_problem(problem):
            raise ConfigError(problem)
        self._snapshot: Snapshot
        if not self.config.background:
            self._snapshot = DirectSnapshot(live)
        else:
            self._snapshot = HostSnapshot(live) if staging is None else staging()
        self._open_writer()
        if not self.config.background:
            return "checkpoints: training waits for every save (checkpoint.background: false)"
        if staging is not None:
            return "checkpoints: written in the background from the copies for recovery"
        return (
            f"checkpoints: {show_bytes(size)} of host memory on each rank, {show_bytes(on_node)} on each "
            "node, to save from in the background"
        )

    def _open_writer(self) -> None:
        rescue = None
        if self.config.rescue_dir is not None:
            rescue = Path(self.config.rescue_dir) / self.root.absolute().parent.name / "checkpoints"
        generation = f"-g{self.world.generation}" if self.world.generation else ""
        self._writer = CheckpointWriter(
            self.root,
            self.world.second_store(),
            self.world.rank,
            self.world.size,
            self._snapshot,
            self._entries,
            self._manifest,
            nonce=self.nonce + generation,
            timeout_s=self._timeout_s,
            hooks=self,
            rescue=rescue,
            fence=self.world.fence,
        )

    @property
    def saving(self) -> bool:
        """Return whether a save reads from its snapshot, be it one that was given up."""
        self._given_up = [writer for writer in self._given_up if writer.busy]
        return bool(self._given_up) or self.writer.busy

    def finish(self) -> float:
        """Wait until no save is in progress, be it one that was given up; returns the seconds waited.

        The next one removes what it finds half-written: a thread that was still at it could commit the rest.
        """
        return sum(writer.finish() for writer in (*self._given_up, self.writer))

    def hand_over(self) -> list[CheckpointWriter]:
        """Give up the save in progress and the lock; return the writers that may still be at work.

        Another object saves the run from now on, over another number of ranks.
        """
        self.writer.cancel()
        if self._lock is not None:
            self._lock.release()
        return [*self._given_up, self.writer]

    def wait_for(self, writers: Sequence[CheckpointWriter]) -> None:
        """Begin no save before these writers, which were given up, have ended."""
        self._given_up += writers

    def give_up_save(self) -> None:
        """Give up the save in progress, for a rank is gone; from any thread."""
        self.writer.cancel()

    def regroup(self) -> None:
        """Save with the ranks of a new generation from now on; what the old writer was at is given up."""
        self.writer.cancel()
        self._given_up.append(self.writer)
        self._open_writer()
        self._alone = False

    @property
    def writer(self) -> CheckpointWriter:
        """Return what writes, once `prepare` was called."""
        assert self._writer is not None
        return self._writer

    def request(
        self, step: int, tokens: int, cursor: Mapping[str, Any], balance: BalanceState, keep: Collection[int] = ()
    ) -> SaveRequest:
        """Return the request of a save after `step`, with copies of the small state as it is now.

        `cursor` is what a resumed run needs besides tensors; checkpoints of the steps in `keep` stay.
        """
        state = {"optimizer_steps": self.optimizer.steps, "balance_steps": balance.step}
        return SaveRequest(step, tokens, cursor, state, self._buffers(balance), keep)

    def _manifest(self, request: SaveRequest, reports: list[ShardReport]) -> Manifest:
        dtype = _NUMPY_DTYPE[self.shards.master.dtype]
        previous = self._previous
        if self._previous_step is None or self._previous_step >= request.step:  # it went back, with newer saves
            previous = chain.newest_before(self.root, request.step)
        self._link = {**request.cursor.get(chain.CHAIN, {}), "step": request.step, "previous": previous}
        return assemble(
            reports,
            step=request.step,
            tokens=request.tokens,
            model=self.model.model_dump(mode="json"),
            cursor={**request.cursor, chain.CHAIN: self._link},
            state=request.state,
            tensors=[
                Tensor(row.name, row.shape, dict.fromkeys(states_of(row), dtype), row.whole)
                for row in self.shards.table
            ],
            buffers=[buffer.name for report in reports for buffer in report.buffers],
        )

    def written(self, request: SaveRequest, report: ShardReport) -> None:
        """Keep a copy of this rank's shard on its node."""
        if self._tier is not None:
            try:
                self._copy = keep_copy(self._tier, request.step, report, self._entries(), request.buffers)
            except CheckpointError as error:  # it is only a copy
                _LOG.warning("note: checkpoint.local_dir: %s", error)

    def retain(self, request: SaveRequest) -> None:
        """Add the new checkpoint to the chain, and remove those that need not stay."""
        config = self.config
        self._previous, self._previous_step = chain.name_of(self._link), request.step
        self._unrecorded.append(self._link)
        try:
            while self._unrecorded:
                chain.append(self.root, self._unrecorded[0])
                del self._unrecorded[0]
        except OSError as error:  # the link is in the checkpoint as well, and the next save tries again
            _LOG.warning("note: the chain of checkpoints lacks a line until the next save: %s", error)
        try:
            prune(self.root, config.keep_last, keep_every=config.keep_every, keep=request.keep)
        except CheckpointError as error:  # the new one is there
            _LOG.warning("note: old checkpoints stay: %s", error)

    def committed(self, request: SaveRequest) -> None:
        """Remove the node's older copies."""
        if self._tier is not None:
            forget_copies(self._tier, self.world.rank, but=self._copy)

    def close(self) -> None:
        """Wait for the save in progress, and let others write into the directory."""
        if self._writer is not None:
            self._writer.close()
        if self._lock is not None:
            self._lock.release()

    def forget_copies(self) -> None:
        """Remove what this node keeps of the run: it is complete, and will not be restarted here."""
        if self._tier is not None:
            forget_copies(self._tier, self.world.rank)

    def _entries(self) -> list[Entry]:
        arrays = self._snapshot.arrays
        return [
            Entry(extent.tensor, state.name, extent.start, extent.stop, arrays[state.name][state.where(extent)])
            for state in self.optimizer.states
            for extent in self.shards.extents
            if state.covers(extent)
        ]

    def _buffers(self, balance: BalanceState) -> list[BufferEntry]:
        """Return copies of what this rank has besides its share; the originals may change after that."""
        rank = self.world.rank
        buffers = [BufferEntry(f"rng/{rank}", _host(torch.get_rng_state()))]
        if self.world.device.type == "cuda":
            state = torch.cuda.get_rng_state(self.world.device)
            buffers.append(BufferEntry(f"rng_device/{rank}", _host(state)))
        if self.world.is_first:
            buffers += [
                BufferEntry(f"balance/{name}", _host(getattr(balance, name)).copy()) for name in BALANCE_TENSORS
            ]
        return buffers

    # ----------------------------------------------------------------- loading

    def load_newest(self, *, starts_elsewhere: bool = False) -> Restored | None:
        """Fill master weights, moments and RNG state from the newest sound checkpoint; None if there is none.

        Imported weights in the run's own directory are no checkpoint to resume from, but a run that does not
        start elsewhere (`starts_elsewhere`) is not to start without them, unasked.

        With `checkpoint.resume_from` it is that checkpoint or, once the run has saved after it, the newest sound
        one of these; never another. The checkpoints of later steps, which the run abandons, are renamed.

        Raises:
            ConfigError: the checkpoint is of another model.
            TrainError: there are checkpoints, and none of them can be read; or the one asked for cannot.
        """
        asked = self.config.resume_from
        candidates = self._agree_on_candidates()
        problems = []
        for path in candidates:
            restored, problem = self._try_load(path)
            if restored is not None:
                self.gather_and_compare()
                link = restored.cursor.get(chain.CHAIN)
                self._previous = chain.UNLINKED if link is None else chain.name_of(link)
                self._previous_step = restored.step
                if self.world.is_first and link is not None and path.parent == self.root:
                    chain.repair(self.root, link)
                if asked is not None and path == Path(asked) and self.world.is_first:
                    self.abandon_after(restored.step)
                return restored
            _LOG.info("checkpoint %s is passed over: %s", path.name, problem)
            problems.append(problem)
        if asked is not None:
            raise TrainError(f"checkpoint.resume_from: {problems[-1]}; no other checkpoint is taken for it")
        if any(_NOT_RESUMABLE not in problem for problem in problems) or (problems and not starts_elsewhere):
            raise TrainError(
                f"{self.root}: none of its {counted(len(candidates), 'checkpoint')} can be read (reasons above); "
                "restore one, or submit with --new to start over"
            )
        return None

    def start_from(self, init: str, tokenizer_sha256: str) -> BalanceState:
        """Fill the master weights of a new run from `init`, hf:DIR or ckpt:DIR; moments stay at zero.

        Returns the balancing state: their biases, and no steps. `tokenizer_sha256` is of the run's data.

        Raises:
            ConfigError: the weights cannot be read, or are of another model or tokenizer.
        """
        balance, problem = BalanceState.initial(self.model, self.world.device), ""
        try:
            with open_init(init, self.model, tokenizer_sha256) as weights:
                load_extents(weights, self.shards.extents, self.shards.master)
                bias_LC = torch.from_numpy(balancing_bias(weights)).to(self.world.device)
                balance = replace(balance, bias=bias_LC)
        except (ConfigError, HubIOError, CheckpointError) as error:
            problem = str(error)
        if problem := self._first_problem(problem):
            raise ConfigError(problem)
        self.gather_and_compare()
        return balance

    def _agree_on_candidates(self) -> list[Path]:
        """Rank 0's list: file systems may show ranks different ones."""
        names: list[Any] = [None]
        if self.world.is_first:
            listings = list_checkpoints(self.root)
            for listing in listings:
                if not listing.complete:
                    _LOG.info("checkpoint %s is passed over: %s", listing.path.name, listing.reason)
            paths = [str(listing.path) for listing in listings if listing.complete]
            asked = self.config.resume_from
            names = [
                paths if asked is None else [*(path for path in paths if self._comes_from(path, asked)), asked]
            ]
        dist.broadcast_object_list(names, src=0)
        return [Path(name) for name in names[0]]

    def _comes_from(self, path: str, asked: str) -> bool:
        """Return whether a checkpoint was made by a run that resumed from the one asked for."""
        try:
            with Checkpoint.open(Path(path), check_files=False) as checkpoint:
                return checkpoint.manifest.cursor.get(RESUMED_FROM) == asked
        except CheckpointError:
            return False

    def abandon_after(self, step: int) -> int:
        """Rename the checkpoints of later steps: the run will train these steps again.

        Returns:
            The step of the newest complete checkpoint that is left; 0 if there is none.
        """
        if self._writer is not None:
            self.finish()
        newest = 0
        for listing in list_checkpoints(self.root):
            if listing.step <= step:
                newest = max(newest, listing.step if listing.complete else 0)
            else:
                aside = self.root / f"abandoned-{self.nonce}-{listing.path.name}"
                listing.path.rename(aside)
                _LOG.info(
                    "note: %s is now %s: the run continues from step %d", listing.path.name, aside.name, step
                )
        return newest

    def saved_steps(self) -> list[int]:
        """Return the steps of the complete checkpoints on rank 0, which alone decides which of them stay."""
        if not self.world.is_first:
            return []
        try:
            return [listing.step for listing in list_checkpoints(self.root) if listing.complete]
        except CheckpointError as error:  # the save that asks reports its own failure
            _LOG.warning("note: the checkpoints cannot be listed: %s", error)
            return []

    def _try_load(self, path: Path) -> tuple[Restored | None, str]:
        restored, problem = None, ""
        try:
            with Checkpoint.open(path, check_files=self.world.is_first, local=self._tier) as checkpoint:
                check_same_model(checkpoint.manifest, self.model, self.shards.table)
                restored = self._load(checkpoint)
        except CheckpointError as error:
            problem = str(error)
        first = self._first_problem(problem)
        return (None, first) if first else (restored, "")

    def _first_problem(self, problem: str) -> str:
        """Return the problem of the first rank that has one; all ranks get the same answer."""
        if self._alone:
            return problem
        problems: list[Any] = [None] * self.world.size
        dist.all_gather_object(problems, problem)
        return next((text for text in problems if text), "")

    def _load(self, checkpoint: Checkpoint) -> Restored:
        manifest = checkpoint.manifest
        if weights_only(manifest):
            raise Mismatch(_NOT_RESUMABLE)
        check_same_optimizer(manifest, self.shards.table, _NUMPY_DTYPE[self.shards.master.dtype])
        for state in self.optimizer.states:
            self._read(checkpoint, state)
        self.optimizer.steps = int(manifest.state["optimizer_steps"])
        self._load_rng(checkpoint)
        parts = {
            name: torch.from_numpy(checkpoint.read_buffer(f"balance/{name}")).to(self.world.device)
            for name in BALANCE_TENSORS
        }
        balance = BalanceState(**parts, step=int(manifest.state["balance_steps"]))
        return Restored(checkpoint.path, manifest.step, dict(manifest.cursor), balance)

    def _read(self, checkpoint: Checkpoint, state: OwnedState) -> None:
        """Fill one state of this rank's chunk; every block that is read is compared with its checksum."""
        array = _host(state.values)
        for extent in filter(state.covers, self.shards.extents):
            checkpoint.read(extent.tensor, state.name, extent.start, extent.stop, array[state.where(extent)])
        state.values.copy_(torch.from_numpy(array))

    def _load_rng(self, checkpoint: Checkpoint) -> None:
        """Each rank its own state; a rank that the writers did not have keeps its freshly seeded one."""
        rank = self.world.rank
        if f"rng/{rank}" in checkpoint.buffers:
            torch.set_rng_state(torch.from_numpy(checkpoint.read_buffer(f"rng/{rank}")))
        if self.world.device.type == "cuda" and f"rng_device/{rank}" in checkpoint.buffers:
            state = torch.from_numpy(checkpoint.read_buffer(f"rng_device/{rank}"))
            torch.cuda.set_rng_state(state, self.world.device)

    def gather_and_compare(self, crc: int = 0) -> None:
        """Rebuild the weights on every rank, and make sure that all ranks got the same ones.

        `crc` is a CRC32 of what else must be the same on all ranks.

        Raises:
            TrainError: they did not.
        """
        self.shards.gather_weights()
        for part in self.shards.weights.view(torch.uint8).split(_HASHED_BYTES):
            crc = crc32(_host(part).data, crc)
        checksums = torch.tensor([crc, -crc], dtype=torch.int64, device=self.world.device)
        dist.all_reduce(checksums, op=dist.ReduceOp.MAX)
        if checksums[0] != -checksums[1]:
            raise TrainError(
                "ranks hold different weights after loading: a network or memory fault; check the nodes"
            )


def _host(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    array: np.ndarray[Any, Any] = tensor.detach().cpu().contiguous().numpy()
    return array
