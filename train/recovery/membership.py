"""This process among the members: the store, the newest generation, and how it leaves an older one."""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from zslurm.train.errors import CannotRecover
from zslurm.train.parallel.store_connections import CONNECTIONS
from zslurm.train.recovery.abort import Abort
from zslurm.train.recovery.copies.agreement import check_in
from zslurm.train.recovery.generation import (
    MEMBER_VARIABLE,
    OFF,
    Generation,
    failed,
    member_name,
    result_key,
)
from zslurm.train.recovery.moves import PlannedMoves
from zslurm.train.recovery.warm import with_secret
from zslurm.train.recovery.watcher import GenerationWatcher
from zslurm.train.slurm_job import own_node

_CONNECTIONS = 3
"""Connections to the store that a new generation needs: for its groups, besides them, and for the next save."""

_LOG = logging.getLogger(__name__)
BROKEN = (RuntimeError, ValueError)
"""What collectives raise when they are aborted; ValueError if torch has dropped the group already."""


class Membership:
    """One process, its rank, and the generations that it goes through.

    Attributes:
        rank: of this process.
        size: number of ranks.
        local_size: ranks of this node.
        moves: its part in planned moves.
        member: name of this process among the members.
        number: the present generation.
        joins: the generation that this process joins, until it trains; None in one that began the run.
        trains: whether it may recover: it has begun to train.
        store: the one that the members of an attempt share.
        listen_at: this node's address as other nodes reach it.
    """

    def __init__(
        self, device: torch.device, generation: Generation | None, wait_s: float, end_waits: Callable[[], None]
    ) -> None:
        """Begin to watch for generations after this one, by default after the start.

        Args:
            device: of the collectives.
            generation: the one that this process joins, if it takes a rank's place.
            wait_s: seconds to wait for a generation after something broke.
            end_waits: gets the trainer's thread out of what it waits in besides collectives; any thread calls it.
        """
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.local_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        self.member, self.joins = own_name(), generation
        self.number, self.trains = (generation.number if generation is not None else 0), False
        self.store = _connect(host, port)
        self.listen_at = _address_towards(host, port)
        self._wait_s, self._end_other_waits = wait_s, end_waits
        self._abort = Abort(device, other_ports={port})
        self._leaving = threading.Lock()  # the collectives of a generation
        self._watcher = GenerationWatcher(
            _connect(host, port), self.member, self.size, self.on_generation, generation
        )
        CONNECTIONS.keep(host, port, _CONNECTIONS)
        self.moves = PlannedMoves(self.store, self._watcher, self.member)

    @property
    def newest(self) -> Generation | None:
        """The newest generation that this process knows of; None before the first after the start."""
        return self._watcher.newest

    @property
    def superseded(self) -> bool:
        """Whether there is a later generation than the present one."""
        return self._watcher.number > self.number

    def is_over(self, generation: Generation) -> bool:
        """Return whether there is a later generation than this one."""
        return self._watcher.number > generation.number

    def wait_after(self, number: int, timeout_s: float) -> bool:
        """Return whether there is a generation after `number`, waiting for it within a limit."""
        return self._watcher.wait_after(number, timeout_s) is not None

    def fence(self) -> None:
        """Return only in a process that has not been replaced."""
        self._watcher.fence()

    def close(self) -> None:
        """Watch no longer."""
        self.trains = False
        self._watcher.close()

    # --------------------------------------------------------------------------------------------------- groups

    def leave_alone(self, port: int) -> None:
        """Spare connections to or from this port when collectives are aborted."""
        self._abort.add_port(port)

    @contextmanager
    def making_groups(self) -> Iterator[None]:
        """Note the groups that are made in the block.

        Raises:
            RuntimeError: a later generation was there before them, and no peer waits for them any more.
        """
        with self._abort.making_groups():
            if self.superseded:
                raise RuntimeError("a further rank was lost")
            yield

    def groups_made(self) -> None:
        """Close no connections to the store again: all groups are there."""
        self._abort.made()
        CONNECTIONS.refill()

    @contextmanager
    def connecting(self, generation: Generation) -> Iterator[None]:
        """Let the connection of the block be cut by a later generation; raise if there is one already."""
        with self._abort.connecting():
            yield
        if self.is_over(generation):
            raise RuntimeError("a further rank was lost")

    def on_generation(self, generation: Generation) -> None:
        """In the watcher's thread: get the trainer's thread out of whatever it waits in."""
        if not self.trains and self.joins is None:
            self.report(failed(generation.number, self.rank, f"rank {self.rank} was still being set up"))
            return
        with self._leaving:
            # The trainer's thread may have seen the generation before this one could act: then it has aborted by
            # itself, and what is open now are the groups of the new generation.
            if generation.number > self.number:
                self._end_waits()

    def adopt(self, generation: Generation) -> None:
        """Make a generation the present one; whatever waits in an older one is aborted when this returns."""
        with self._leaving:
            self.number = generation.number
            self._end_waits()

    def _end_waits(self) -> None:
        self._end_other_waits()
        self._abort()

    def take_rank(self, generation: Generation) -> None:
        """Become the rank that this process has in a generation with another number of ranks."""
        rank = generation.rank_of(self.member)
        assert rank is not None
        self.rank, self.size = rank, len(generation.members)
        os.environ["RANK"], os.environ["WORLD_SIZE"] = str(rank), str(self.size)
        os.environ["GROUP_RANK"] = str(rank // self.local_size)

    # --------------------------------------------------------------------------------------- the other members

    def check_in(self, generation: Generation) -> None:
        """Report that this rank is ready for a generation, and wait until all of its members are.

        Raises:
            RuntimeError: a further generation was published, or the members did not come in time.
        """
        check_in(self.store, generation, self.rank, lambda: self.is_over(generation))

    def wait_for_next(self, error: Exception, generation: Generation) -> None:
        """Wait for the generation after one in which something broke.

        Raises:
            CannotRecover: there is none.
        """
        if not self.wait_after(generation.number, min(generation.deadline_s, self._wait_s)):
            reason = str(error).partition("\n")[0]
            self.report(failed(generation.number, self.rank, f"rank {self.rank}: {reason}"))
            raise CannotRecover(f"recovery: generation {generation.number} broke: {reason}") from None

    def report(self, event: dict[str, Any]) -> None:
        """Report how a generation ended to the supervisor; the first answer counts."""
        try:
            self.store.compare_set(result_key(event["number"]), "", json.dumps(event))
        except RuntimeError:  # the store is gone: so is who would read it
            _LOG.warning("recovery: %s", event.get("reason", "the store is out of reach"))


def report_off(why: str) -> None:
    """Report to the supervisor that the ranks of this attempt cannot be recovered in memory."""
    try:
        _connect(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])).set(OFF, why)
    except RuntimeError as error:
        _LOG.warning("recovery: the store is out of reach: %s", str(error).partition("\n")[0])


def own_name() -> str:
    """Return the name of this process among the members."""
    return os.environ.get(MEMBER_VARIABLE) or member_name(own_node(), os.environ.get("LOCAL_RANK", "0"))


def _connect(host: str, port: int) -> dist.Store:
    return with_secret(CONNECTIONS.take(host, port, timedelta(seconds=60)))


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
