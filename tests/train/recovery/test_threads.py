"""Copies, generations and their threads, without ranks: orders of events that a whole run shows only by chance."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from dataclasses import asdict
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from tests.train.ranks import in_group
from tests.waiting import wait_for
from zslurm.job.in_memory.store_server import StoreServer
from zslurm.train.parallel.store_connections import StoreConnections
from zslurm.train.recovery import moves as moves_module
from zslurm.train.recovery import waits as waits_module
from zslurm.train.recovery import watcher as watcher_module
from zslurm.train.recovery.abort import Abort
from zslurm.train.recovery.copies.buddy_copies import Copies
from zslurm.train.recovery.copies.staging import Staging
from zslurm.train.recovery.generation import Generation, generation_key, unmoved_key
from zslurm.train.recovery.membership import Membership
from zslurm.train.recovery.moves import PlannedMoves
from zslurm.train.recovery.waits import WAITS, Waits
from zslurm.train.recovery.watcher import GenerationWatcher


def taken(staging: Staging, step: int, keep: int = -1) -> Any:
    """The slot with a copy of a step, which is complete."""
    slot = staging.take(step, {"step": step}, {}, keep)
    slot.snapshot.copied()
    return slot


def test_a_step_that_is_skipped_leaves_the_copy_before_it_whole() -> None:
    """Its tensors are those of the step before, whose copy is the only one that all ranks have."""
    staging = Staging({"w": torch.ones(4)}, 2)
    first = taken(staging, 7)
    second = taken(staging, 8, keep=7)  # the optimizer did not run, so nothing waited for the copy
    assert (first.step, second.step) == (7, 8)
    assert second is not first


def test_a_save_and_a_copy_of_the_same_step_share_a_slot() -> None:
    staging = Staging({"w": torch.ones(4)}, 3)
    slot = staging.pin(-1)
    assert taken(staging, 8, keep=7) is slot


def test_what_a_buddy_returns_is_not_written_over_a_save_that_was_given_up() -> None:
    staging = Staging({"w": torch.ones(4)}, 3)
    staging.for_saves(lambda: True, lambda: -1)
    saved = staging.pin(-1)
    staging.wait()
    assert saved is staging.slots[0]
    assert staging.to_fill() is not saved


class Asked:
    """A store that answers when the test has it answer."""

    def __init__(self) -> None:
        self.keys: dict[str, str] = {}
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.is_asked = threading.Event()
        self.is_gone = False

    def check(self, keys: list[str]) -> bool:
        answer = all(key in self.keys for key in keys)
        self.is_asked.set()
        self.may_answer.wait()
        if self.is_gone:
            raise dist.DistNetworkError("Connection reset by peer")
        return answer

    def get(self, key: str) -> bytes:
        return self.keys[key].encode()


def test_an_answer_that_was_frozen_on_its_way_is_no_sign_of_membership(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is frozen while it asks wakes up with an old answer and asks again before it continues."""
    left = threading.Event()
    monkeypatch.setattr(watcher_module, "_leave", lambda *_: left.set())
    clock = [time.monotonic()]
    monkeypatch.setattr(watcher_module, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(watcher_module, "POLL_S", 3600.0)  # the thread does not look
    store = Asked()
    watcher = GenerationWatcher(cast(dist.Store, store), "n0/0", 2, lambda _: None)
    store.may_answer.clear()
    looks = threading.Thread(target=watcher._look)
    looks.start()
    store.is_asked.wait()
    clock[0] += 60  # frozen
    store.keys[generation_key(1)] = Generation(1, ("n1/w0", "n1/0")).to_json()
    store.may_answer.set()
    looks.join()
    assert not left.is_set(), "it was asked before there was another one"
    watcher.fence()
    assert left.is_set()
    watcher.close()


def test_a_process_that_was_frozen_does_not_continue_where_the_store_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It may have been replaced, and the attempt may be over by now; one that has just looked was a member."""
    left: list[str] = []
    monkeypatch.setattr(watcher_module, "_leave", left.append)
    clock = [time.monotonic()]
    monkeypatch.setattr(watcher_module, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    store = Asked()
    store.may_answer.clear()
    watcher = GenerationWatcher(cast(dist.Store, store), "n0/0", 2, lambda _: None)
    store.is_asked.wait()
    store.is_gone = True
    store.may_answer.set()
    assert watcher.wait_after(0, 60) is None, "it watches no longer"
    watcher.fence()
    assert left == [], "nobody is replaced without a store"
    monkeypatch.setattr(watcher_module, "POLL_S", 3600.0)  # the thread does not look
    frozen = GenerationWatcher(cast(dist.Store, store), "n0/1", 2, lambda _: None)
    clock[0] += 60
    frozen.fence()
    assert left == [
        "n0/1 may have been replaced: the store is gone, and this process has not looked at it for 60 s"
    ]
    frozen.close()


def test_a_late_abort_spares_the_groups_of_the_new_generation() -> None:
    """The trainer's thread may be faster than the one that brought the news."""
    membership, aborts = cast(Any, object.__new__(Membership)), []
    membership._leaving, membership.number, membership.trains = threading.Lock(), 0, True
    membership.joins, membership._end_other_waits = None, lambda: None
    membership._abort = lambda: aborts.append(membership.number)
    membership.adopt(Generation(1, ("n0/0",)))
    membership.on_generation(Generation(1, ("n0/0",)))
    assert aborts == [1], "once, by the trainer's thread"
    membership.on_generation(Generation(2, ("n0/0",)))
    assert aborts == [1, 1]


def _leave_mid_message(_: Any) -> list[str]:
    """Rank 1 freezes while rank 0 sends it more than the connection holds; both are aborted. What they raise."""
    abort = Abort(torch.device("cpu"), other_ports=set())
    with abort.making_groups():
        group = dist.new_group()
    pids: list[Any] = [None, None]
    dist.all_gather_object(pids, os.getpid())
    rank, raised = dist.get_rank(), []
    if rank == 1:
        work = dist.broadcast(torch.zeros(1 << 24), 0, group=group, async_op=True)
        dist.barrier()
    else:
        dist.barrier()
        os.kill(pids[1], signal.SIGSTOP)
        work = dist.broadcast(torch.ones(1 << 24), 0, group=group, async_op=True)
        threading.Timer(0.2, abort).start()
    for again in range(2):
        if rank == 1 and not again:
            abort()
        try:
            work.wait()
        except RuntimeError as error:
            raised.append(str(error))
    if rank == 0:
        os.kill(pids[1], signal.SIGCONT)
    WAITS.resume()  # the barriers are of another group, which nothing has aborted
    dist.distributed_c10d._world.pg_map.pop(group)
    return raised


def test_a_collective_is_left_in_the_middle_of_a_message() -> None:
    sender, _ = in_group(_leave_mid_message, 2)
    assert len(sender) == 2, "also where it is waited for once more"
    assert all("gloo" in reason for reason in sender)


def test_a_group_that_was_left_is_dropped_by_no_thread_that_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever thread drops it last waits for what hangs in it; writers of checkpoints hold it for some time."""
    monkeypatch.setattr(waits_module, "_HELD_S", 0.01)
    dropped_by: list[str] = []

    class Group:
        def __del__(self) -> None:
            dropped_by.append(threading.current_thread().name)

    waits, held = Waits(), [Group(), Group()]
    waits._left = cast(list[dist.ProcessGroup], list(held))
    waits.drop_groups()
    del held[1]
    wait_for(lambda: dropped_by, "the group that nothing else holds", every_s=0.01)
    assert len(dropped_by) == 1, "the other one is held"
    held.clear()
    wait_for(lambda: len(dropped_by) == 2, "the other group", every_s=0.01)
    assert set(dropped_by) == {"groups left"}


def test_connections_to_the_store_are_cut_until_all_groups_are_made() -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    abort = Abort(torch.device("cpu"), other_ports={server.port})
    with abort.making_groups(), abort.connecting():
        used = dist.TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False)
    abort()
    with pytest.raises(RuntimeError):
        used.get("what nobody sets")
    with abort.making_groups(), abort.connecting():
        kept = dist.TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False)
    abort.made()
    abort()
    kept.set("key", "value")
    assert kept.get("key") == b"value"


def pair() -> tuple[Copies, Copies, Staging]:
    """Two ranks of which the second keeps the copies of the first."""
    staging = Staging({"w": torch.arange(4.0)}, 2)
    first, second = Copies(staging, "127.0.0.1"), Copies(Staging({"w": torch.zeros(4)}, 2), "127.0.0.1")
    second.connect(0, None, 0, staging.slots[0].snapshot.nbytes)
    return first, second, staging


def test_a_copy_arrives_and_only_with_the_token() -> None:
    first, second, staging = pair()
    host, port, token = second.address
    first.connect(0, (host, port, "0" * len(token)), None, 0)
    first.send(taken(staging, 3))
    time.sleep(0.2)
    assert second.held_steps == []
    first.connect(0, second.address, None, 0)
    wait_for(lambda: second.held_steps == [3], "the copy")
    first.close()
    second.close()


def test_a_copy_of_a_generation_that_is_over_is_not_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its slot may be another copy's by now, which would count as whole, and have the wrong CRC32."""
    staging, others = Staging({"w": torch.arange(4.0)}, 2), set(threading.enumerate())
    copies = Copies(staging, "127.0.0.1")
    (sender,) = (one for one in set(threading.enumerate()) - others if one.name == "copies out")
    slot, sends, may_send = taken(staging, 3), threading.Event(), threading.Event()

    def copied() -> None:
        sends.set()
        may_send.wait()

    monkeypatch.setattr(slot.snapshot, "copied", copied)
    copies.send(slot)
    sends.wait()
    copies.disconnect()
    may_send.set()
    copies.close()
    sender.join(60)
    assert not sender.is_alive()
    assert (slot.crc, slot.whole) == (None, False)


def returning() -> tuple[Copies, Copies, Any]:
    """A buddy that holds a rank's copy of step 3, and the process that takes its place, with a slot to fill."""
    first, second, staging = pair()
    first.connect(0, second.address, None, 0)
    first.send(taken(staging, 3))
    wait_for(lambda: second.held_steps == [3], "the copy")
    first.close()
    again = Staging({"w": torch.zeros(4)}, 2)
    new = Copies(again, "127.0.0.1")
    return second, new, again.to_fill()


def test_a_state_comes_back_in_its_generation_and_only_the_step_that_was_agreed_on() -> None:
    buddy, new, slot = returning()
    new.connect(1, None, None, 0)
    for generation, step in ((0, 3), (1, 2)):
        buddy.connect(generation, None, 0, slot.snapshot.nbytes)
        new.expect(slot, step)
        with pytest.raises(OSError, match=r"closed|reset|Broken pipe"):
            buddy.return_to(new.address, 3, lambda: False)
        assert (slot.step, slot.snapshot.arrays["w"].tolist()) == (-1, [0.0] * 4)
    new.expect(slot, 3)
    buddy.return_to(new.address, 3, lambda: False)
    assert new.received(60)
    assert (slot.step, slot.snapshot.arrays["w"].tolist()) == (3, [0.0, 1.0, 2.0, 3.0])
    buddy.close()
    new.close()


def test_a_state_is_not_sent_where_a_further_rank_was_lost_before_there_was_a_connection() -> None:
    """The other end may be frozen: nothing would cut that connection any more."""
    buddy, new, _ = returning()
    buddy.stop_returning()
    with pytest.raises(OSError, match="a further rank was lost"):
        buddy.return_to(new.address, 3, lambda: True)
    buddy.close()
    new.close()


def test_connections_are_ready_before_they_are_needed_and_one_that_was_cut_is_not_used() -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    connections, timeout = StoreConnections(), timedelta(seconds=60)
    connections.keep("127.0.0.1", server.port, 2)
    wait_for(lambda: len(connections._ready) == 2, "connections")
    cut, kept = (dict(sockets) for _, sockets in reversed(connections._ready))
    for descriptor in cut:
        socket.socket(fileno=os.dup(descriptor)).shutdown(socket.SHUT_RDWR)
    with connections.noting() as taken:
        store = connections.take("127.0.0.1", server.port, timeout)
        store.set("key", "value")
    assert (taken, len(connections._ready)) == (kept, 0), "the other one"
    assert connections.take("127.0.0.1", server.port, timeout).get("key") == b"value", "opened now"
    connections.refill()
    wait_for(lambda: len(connections._ready) == 2, "connections")


def _planned_moves(store: dist.Store, newest: Generation | None, planned: int = 0) -> PlannedMoves:
    """The planned moves of a process that knows of this generation."""
    number = newest.number if newest is not None else 0
    seen = SimpleNamespace(newest=newest, number=number, planned=planned)
    return PlannedMoves(store, cast(GenerationWatcher, seen), "n0/0")


def test_a_generation_that_came_before_the_boundary_is_not_waited_for() -> None:
    """A fault's, in place of that of the move: the next one never comes."""
    moves = _planned_moves(dist.HashStore(), Generation(1, ("n0/0", "n1/w1"), (1,)))
    assert moves.hold(7, 0, lambda: True)


def test_ranks_that_held_for_a_move_in_vain_do_not_hold_for_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moves_module, "_HOLD_S", 0.0)
    store, members = dist.HashStore(), ("n0/0", "n2/w1")
    server, events = StoreServer(store), list[dict[str, Any]]()
    monkeypatch.setattr(server, "emit", events.append)
    assert server.take(json.dumps({"op": "move", **asdict(Generation(1, members, (1,), left=("n1",)))}))
    moves = _planned_moves(store, None, planned=1)
    assert moves.signal() == 1.0
    assert not moves.hold(7, 0, lambda: False)
    assert moves.signal() == 0.0
    assert store.check([unmoved_key(1)])
    server.look()
    assert events == [{"event": "unmoved", "number": 1}]
    server.look()
    assert len(events) == 1, "it is reported once"
