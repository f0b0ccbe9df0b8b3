"""One rank's part in a recovery in memory: from the copies of its state to the first step of a new generation.

    while training     after each step (or every k-th) the state is copied, see copies.py
    a rank is lost     the supervisor publishes a generation with another process in its place (generation.py);
                       the watcher aborts this process's collectives (abort.py), and the trainer's thread raises
    regroup            leave the old groups; wait until every member has left; make new ones
    agree              the newest step that all can have again; a rank without it gets it from its buddy
    go back            every rank restores that step from host memory, the weights are gathered from the masters
    compare            a CRC32 of weights and shared state over all ranks, before the first new step
    answer             rank 0 reports the step to the supervisor, and training continues from there

The process that takes a rank's place (zslurm/job/warm_rank.py) has made its model before, and enters at `agree`.
What goes wrong on the way is reported with its reason; the rank then ends as it would have without a recovery, and
the supervisor restarts the run. A further rank that is lost meanwhile makes a further generation, and everything
begins again with it: the copies are not touched before the next step.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zslurm.checkpoint_tools.quantities import counted, show_bytes
from zslurm.train.checkpointing.snapshot import Snapshot, available_memory, snapshot_bytes
from zslurm.train.config import TrainConfig
from zslurm.train.errors import ConfigError, TrainError
from zslurm.train.parallel.world import World, choose_device, regroup
from zslurm.train.plan.memory import copies_bytes
from zslurm.train.recovery.abort import NCCL_VARIABLES, Abort, leave_groups, why_not
from zslurm.train.recovery.agreement import (
    PAUSE_S,
    buddy_of,
    check_in,
    is_intact,
    shared_crc,
    ward_of,
    whole_step,
    why_none,
)
from zslurm.train.recovery.copies import ChangedInMemory, Copies
from zslurm.train.recovery.facts import Facts
from zslurm.train.recovery.generation import (
    FACTS,
    MEMBER_VARIABLE,
    RECOVERY_VARIABLE,
    Generation,
    failed,
    member_name,
    recovered,
    result_key,
)
from zslurm.train.recovery.moves import PlannedMoves, leave_if_moved
from zslurm.train.recovery.no_recovery import NoRecovery, RecoveryFailed, Trainer
from zslurm.train.recovery.staging import Slot, Staging
from zslurm.train.recovery.watcher import Watcher

_LOG = logging.getLogger(__name__)
_LOST_PEER = ("gloo", "NCCL", "Connection", "Broken pipe")
"""Words by which an error of a collective is known."""
_BROKEN = (RuntimeError, ValueError)
"""What collectives raise when they are aborted; ValueError where torch has dropped the group already."""


def open_recovery(config: TrainConfig, generation: Generation | None = None) -> NoRecovery:
    """Return the recovery of this process: one that does nothing unless a store server was started for it.

    `generation` is the one that this process joins, where it takes a rank's place.

    Raises:
        ConfigError: the device does not exist.
    """
    if os.environ.get(RECOVERY_VARIABLE) != "memory" or "MASTER_ADDR" not in os.environ:
        return NoRecovery()
    device = choose_device(config.parallel.device, int(os.environ.get("LOCAL_RANK", "0")))
    if why := why_not(device, amd=config.recovery.amd):
        if os.environ.get("RANK") == "0":
            _LOG.warning("recovery: off, faults restart the ranks: %s", why)
        return NoRecovery()
    return Recovery(config, device, generation)


class Recovery(NoRecovery):
    """The recovery of one rank."""

    enabled = True

    def __init__(self, config: TrainConfig, device: torch.device, generation: Generation | None) -> None:
        """Begin to watch for generations after this one, by default after the start."""
        if device.type == "cuda":
            for name, value in NCCL_VARIABLES.items():
                os.environ.setdefault(name, value)
        self._config, self._device = config, device
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        self._rank, self._size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self._local_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        self._member = own_name()
        self._store = _connect(host, port)
        self._listen_at = _address_towards(host, port)
        self._number = generation.number if generation is not None else 0
        self._joins = generation
        self._copies: Copies | None = None
        self._abort = Abort(device, other_ports={port})
        self._trains = False
        self._leaving = threading.Lock()  # the collectives of a generation
        self._give_up_save: Callable[[], None] = lambda: None
        self._whole = -1  # a step that is whole everywhere
        self._taken: Slot | None = None
        self._may_copy = True
        self._done = 0
        self._save = False  # one was due, or in progress, when a rank was lost
        if generation is not None:
            self.facts = Facts.of_json(self._store.get(FACTS))
            self.facts.adopt()
        self._watcher = Watcher(_connect(host, port), self._member, self._size, self._on_generation, generation)
        self._moves = PlannedMoves(self._store, self._watcher, self._member, self._size)

    # --------------------------------------------------------------------------------------------- while training

    @contextmanager
    def making_groups(self) -> Iterator[None]:
        """Note the groups that are made in the block.

        Raises:
            RuntimeError: a later generation was there before them, and no peer waits for them any more.
        """
        with self._abort.making_groups():
            if self._watcher.number > self._number:
                raise RuntimeError("a further rank was lost")
            yield

    def prepare(
        self, trainer: Trainer, live: Mapping[str, Tensor], facts: Facts, *, saves: bool
    ) -> Callable[[Callable[[], bool]], Snapshot] | None:
        """Get ready to copy `live`, the masters and the optimizer's state; with `saves` checkpoints come from it.

        All ranks call it together, but for one that joins. What the ranks agreed on is left for these.

        Raises:
            ConfigError: the copies do not fit into this node's memory, or into recovery.memory_gb.
        """
        world, own = trainer.world, snapshot_bytes(live)
        need = (copies_bytes(own, world.size) + (own if saves else 0)) * world.local_size
        problem, limit = "", self._config.recovery.memory_gb
        if limit is not None and need > limit * 2**30:
            problem = f"recovery.memory_gb: {limit:g} GiB"
        elif need > (free := available_memory()):
            problem = f"aegis.recovery: {show_bytes(free)} are free"
        if problem := self._first(problem, world):
            raise ConfigError(
                f"{problem}, but copies of the state for recovery in memory take {show_bytes(need)} on a node; "
                "use more nodes, raise the limit, or set aegis.recovery: restart"
            )
        self._staging = Staging(live, 3 if saves else 2)
        self._copies = Copies(self._staging, self._listen_at)
        self._abort.add_port(self._copies.port)
        if world.is_first and not world.joined:
            self._store.set(FACTS, facts.to_json())
        if not world.joined:
            self._connect_copies(world, self._exchange(trainer))
            _LOG.info("recovery: %s", self._described(world, need))
        if not saves:
            return None
        return lambda saving: self._staging.for_saves(saving, lambda: self._whole)

    def busy(self) -> float:
        """Return this rank's number in the sums of a step: 1 while its last copy is not whole."""
        return float(self._copies is not None and self._copies.busy)

    def moving(self) -> float:
        """Return this rank's number in the sums of a step: 1 where it knows of a planned move."""
        return self._moves.signal()

    def agree(self, busy: float, moving: float) -> None:
        """Take the sums of these numbers: of `busy` at 0 the last copy is whole everywhere, the next may begin."""
        self._may_copy = busy == 0
        if self._may_copy and self._taken is not None:
            self._whole, self._taken = self._taken.step, None
        self._moves.agree(moving, may_copy=self._may_copy)

    def copy(self, trainer: Trainer) -> None:
        """Begin a copy at a step's boundary, where one is due, and the last one is whole everywhere."""
        self._done = trainer.step
        every = self._config.recovery.every_steps
        if not self._may_copy or (trainer.step % every and self._whole >= 0 and not self._moves.due):
            return
        if self._whole == trainer.step:
            return
        assert self._copies is not None
        cursor, extras = trainer.capture()
        self._taken = self._staging.take(trainer.step, cursor, extras, self._whole)
        self._may_copy = False
        self._copies.send(self._taken)
        if self._moves.due:
            taken = self._taken
            if self._moves.hold(trainer.step, lambda: taken.whole):
                raise RuntimeError(f"ranks move to another node after step {trainer.step}")

    def wait_for_copy(self) -> float:
        """Wait, before the optimizer changes the state, until the copy has it; returns the seconds waited."""
        return self._staging.wait()

    def fence(self) -> None:
        """Return only in a process that has not been replaced."""
        self._watcher.fence()

    def close(self) -> None:
        """Watch no longer."""
        self._trains = False
        self._watcher.close()
        if self._copies is not None:
            self._copies.close()

    # ------------------------------------------------------------------------------------------------ a fault

    def _on_generation(self, generation: Generation) -> None:
        """In the watcher's thread: get the trainer's thread out of whatever it waits in."""
        if not self._trains and self._joins is None:
            self._report(failed(generation.number, self._rank, f"rank {self._rank} was still being set up"))
            return
        with self._leaving:
            # The trainer's thread may have seen the generation before this one could act: then it has aborted by
            # itself, and what is open now are the groups of the new generation.
            if generation.number > self._number:
                self._end_waits()

    def _adopt(self, number: int) -> None:
        """Make a generation the present one; whatever waits in an older one is aborted when this returns."""
        with self._leaving:
            self._number = number
            self._end_waits()

    def _end_waits(self) -> None:
        self._give_up_save()
        self._abort()
        if self._copies is not None:
            self._copies.stop_returning()

    def begin(self, trainer: Trainer) -> None:
        """Begin to train, and to recover from faults. A process that joins goes back with the others first."""
        self._trains = True
        if self._joins is None:
            return
        joins, self._joins = self._joins, None
        if self._watcher.number > joins.number:
            self.recover(trainer)
            return
        try:
            self._restore(trainer, joins, started=time.monotonic())
        except _BROKEN as error:
            self._check(error, joins)
        except TrainError as error:
            self._report(failed(joins.number, self._rank, str(error)))
            raise
        else:
            return
        self.recover(trainer)

    def may_recover(self, error: BaseException) -> bool:
        """Return whether a new generation follows on an error; waits for it where peers may be gone."""
        if isinstance(error, torch.OutOfMemoryError) or (
            not isinstance(error, _BROKEN) and type(error) is not TrainError
        ):
            return False
        if self._watcher.number > self._number:
            return True
        if not _is_lost_peer(error):
            return False
        return self._watcher.wait_after(self._number, self._config.recovery.wait_s) is not None

    def recover(self, trainer: Trainer) -> None:
        """Regroup and go back, as often as further ranks are lost meanwhile.

        Raises:
            RecoveryFailed: that is not possible.
        """
        started = time.monotonic()
        while True:
            generation = self._watcher.newest
            assert generation is not None
            leave_if_moved(generation, self._member)
            self._adopt(generation.number)
            try:
                self._regroup(trainer, generation)
                self._restore(trainer, generation, started=started)
                return
            except _BROKEN as error:
                self._check(error, generation)
            except TrainError as error:
                self._report(failed(generation.number, self._rank, str(error)))
                raise

    def _check(self, error: Exception, generation: Generation) -> None:
        """Wait for the generation after one in which something broke.

        Raises:
            RecoveryFailed: there is none.
        """
        limit = min(generation.deadline_s, self._config.recovery.wait_s)
        if self._watcher.wait_after(generation.number, limit) is None:
            reason = str(error).partition("\n")[0]
            self._report(failed(generation.number, self._rank, f"rank {self._rank}: {reason}"))
            raise RecoveryFailed(f"recovery: generation {generation.number} broke: {reason}") from None

    def _regroup(self, trainer: Trainer, generation: Generation) -> None:
        """Leave the old groups, and make that of all ranks anew once every member has left."""
        if generation.rank_of(self._member) != self._rank or len(generation.members) != self._size:
            raise RecoveryFailed(
                f"generation {generation.number} has {counted(len(generation.members), 'rank')} and this process "
                f"at {generation.rank_of(self._member)}; in memory a rank stays what it is, rank {self._rank} "
                f"of {self._size}"
            )
        assert self._copies is not None
        self._copies.disconnect()
        self._staging.settle()
        self._done = max(self._done, trainer.step)
        self._save = trainer.leave() or self._save
        leave_groups()
        self._check_in(generation)
        regroup(
            trainer.world,
            self._config.parallel,
            generation.number,
            lambda: self._connecting(generation),
            self._abort.making_groups,
        )
        trainer.rejoin()
        self._abort.made()

    @contextmanager
    def _connecting(self, generation: Generation) -> Iterator[None]:
        """Let the connection of the block be cut by a later generation; raise where there is one already."""
        with self._abort.connecting():
            yield
        if self._watcher.number > generation.number:
            raise RuntimeError("a further rank was lost")

    def enter(self) -> int:
        """In a process that joins: meet the other members, and return the number of their generation.

        Raises:
            RecoveryFailed: they do not come.
        """
        while True:
            if self._joins is None:
                return 0
            try:
                self._check_in(self._joins)
                return self._joins.number
            except RuntimeError as error:
                self._check(error, self._joins)
            self._joins = self._watcher.newest
            assert self._joins is not None
            self._adopt(self._joins.number)

    def _check_in(self, generation: Generation) -> None:
        check_in(self._store, generation, self._rank, lambda: self._watcher.number > generation.number)

    def _restore(self, trainer: Trainer, generation: Generation, *, started: float) -> None:
        """Agree on a step, and go back to it."""
        assert self._copies is not None
        world, copies = trainer.world, self._copies
        infos = self._exchange(trainer)
        buddies = [buddy_of(rank, world.size, world.local_size) for rank in range(world.size)]
        own = [info["own"] for info in infos]
        # What a process holds is of the ward that it had: none yet, where it has just come.
        held = [
            info["held"] if info["ward"] == ward_of(rank, world.size, world.local_size) else []
            for rank, info in enumerate(infos)
        ]
        step = whole_step(own, held, buddies)
        if step < 0:
            raise RecoveryFailed(f"recovery: {why_none(own, held, buddies)}")
        self._connect_copies(world, infos)
        slot = self._slot_of(step, infos, generation)
        if not is_intact(slot):
            raise RecoveryFailed(
                f"recovery: rank {self._rank}'s copy of step {step} has changed in memory: its CRC32 differs"
            )
        trainer.go_back(slot, save=any(info["save"] for info in infos))
        trainer.compare(shared_crc(slot))
        self._staging.forget_after(step)
        copies.forget_after(step)
        self._save = False
        self._whole, self._taken, self._may_copy = step, None, False
        slot.whole = True
        buddy = buddies[world.rank]
        if buddy is not None and step not in held[buddy]:
            copies.send(slot)
        rolled_back = max(info["done"] for info in infos) - step
        seconds = time.monotonic() - started
        if world.is_first:
            self._report(recovered(generation.number, step, rolled_back, seconds))
        _LOG.info(
            "recovery: generation %d trains on from step %d (%s back) after %.3f s; %s replaced",
            generation.number, step, counted(rolled_back, "step"), seconds,
            "ranks " + ", ".join(map(str, generation.lost)) if generation.lost else "no rank",
        )  # fmt: skip

    def _slot_of(self, step: int, infos: list[dict[str, Any]], generation: Generation) -> Slot:
        """Return this rank's copy of a step, which its buddy sends where it has none; send the ward's likewise."""
        assert self._copies is not None
        slot = self._staging.of_step(step)
        if slot is None:
            slot = self._staging.to_fill()
            self._copies.expect(slot)
        ward = self._copies.ward
        if ward is not None and step not in infos[ward]["own"]:
            try:
                self._copies.return_to(tuple(infos[ward]["address"]), step)
            except ChangedInMemory as error:
                raise RecoveryFailed(f"recovery: rank {ward} did not get its state back: {error}") from error
            except OSError as error:  # it may be lost as well, and replaced by a further generation
                raise RuntimeError(f"rank {ward} did not get its state back: {error}") from error
        if slot.step != step:
            deadline = time.monotonic() + generation.deadline_s
            while not self._copies.received(PAUSE_S[1]):
                if self._watcher.number > generation.number:
                    raise RuntimeError("a further rank was lost")
                if time.monotonic() > deadline:
                    raise RecoveryFailed(f"recovery: rank {self._rank}'s buddy did not send its state")
        return slot

    def _exchange(self, trainer: Trainer) -> list[dict[str, Any]]:
        """Tell all ranks what this one has; return what each of them has."""
        assert self._copies is not None
        mine = {
            "own": sorted(slot.step for slot in self._staging.slots if slot.step >= 0),
            "ward": self._copies.ward,
            "held": self._copies.held_steps,
            "address": self._copies.address,
            "bytes": self._staging.slots[0].snapshot.nbytes,
            "done": self._done,
            "save": self._save,
        }
        infos: list[Any] = [None] * trainer.world.size
        dist.all_gather_object(infos, mine, group=trainer.world.group)
        return infos

    def _connect_copies(self, world: World, infos: list[dict[str, Any]]) -> None:
        assert self._copies is not None
        buddy = buddy_of(world.rank, world.size, world.local_size)
        ward = ward_of(world.rank, world.size, world.local_size)
        address = None if buddy is None else tuple(infos[buddy]["address"])
        ward_bytes = 0 if ward is None else int(infos[ward]["bytes"])
        self._copies.connect(world.generation, address, ward, ward_bytes)

    def _described(self, world: World, need: int) -> str:
        every = self._config.recovery.every_steps
        often = "every step" if every == 1 else f"every {counted(every, 'step')}"
        size = f"{show_bytes(need)} of host memory on each node"
        if world.size == 1:
            return f"one rank has no buddy: a copy of the state {often} ({size}) helps nothing if it is lost"
        if world.local_size >= world.size:
            return (
                f"one node, so no rank has a buddy on another: copies {often} ({size}) are with the next rank, "
                "and survive a killed rank, not a dead node"
            )
        return f"a copy of each rank's state {often}, with the rank {world.local_size} after it as well ({size})"

    def _first(self, problem: str, world: World) -> str:
        if world.joined:
            return problem
        problems: list[Any] = [None] * world.size
        dist.all_gather_object(problems, problem, group=world.group)
        return next((text for text in problems if text), "")

    def _report(self, event: dict[str, Any]) -> None:
        try:
            self._store.compare_set(result_key(event["number"]), "", json.dumps(event))
        except RuntimeError:  # the store is gone: so is who would read it
            _LOG.warning("recovery: %s", event.get("reason", "the store is out of reach"))

    def save_with(self, give_up: Callable[[], None]) -> None:
        """Call `give_up` where ranks are lost, so that no save waits for them."""
        self._give_up_save = give_up


def own_name() -> str:
    """Return the name of this process among the members."""
    node = os.environ.get("SLURMD_NODENAME", socket.gethostname())
    return os.environ.get(MEMBER_VARIABLE) or member_name(node, os.environ.get("LOCAL_RANK", "0"))


def _is_lost_peer(error: BaseException) -> bool:
    return isinstance(error, dist.DistError) or any(word in str(error) for word in _LOST_PEER)


def _connect(host: str, port: int) -> dist.Store:
    return dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=60))


def _address_towards(host: str, port: int) -> str:
    """Return this node's address on the way to the store, or on the interface that gloo is to use."""
    if interface := os.environ.get("ZSLURM_INTERFACE") or os.environ.get("GLOO_SOCKET_IFNAME"):
        import psutil

        for address in psutil.net_if_addrs().get(interface.split(",")[0], []):
            if address.family == socket.AF_INET:
                return str(address.address)
    with socket.create_connection((host, port), 60) as connection:
        name: str = connection.getsockname()[0]
    return name.removeprefix("::ffff:")
