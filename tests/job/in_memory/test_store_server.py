from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from torch.distributed import HashStore, PrefixStore, Store, TCPStore

from tests.job.in_memory import counted_look_ups
from tests.own_network import WHY_NOT, can_run_alone, run_alone
from tests.waiting import DEADLINE_S, wait_for
from zslurm.core.files import read_json
from zslurm.core.processes import DetachedProcess, ProcessRecord
from zslurm.job.in_memory.store_client import StoreClient
from zslurm.job.in_memory.store_server import Requests, Step, StoreServer
from zslurm.job.stop_request import add_to_key, stop_key
from zslurm.run.run_dir import AttemptDir
from zslurm.train.recovery.copies.agreement import check_in
from zslurm.train.recovery.generation import (
    NEWEST,
    OFF,
    SECRET_VARIABLE,
    WARM,
    Generation,
    failed,
    generation_key,
    here_key,
    recovered,
    result_key,
    warm_key,
)
from zslurm.train.recovery.membership import report_off

MEMBERS = ("n0/0", "n1/w0")


class Server:
    """A store server, what it has reported, and a rank's connection to it."""

    def __init__(self, path: Path) -> None:
        path.mkdir()
        self.attempt = AttemptDir(path)
        ProcessRecord.of(os.getpid()).write(self.attempt.step_process)  # the step: it trains on
        self.client = StoreClient.start([sys.executable], host="127.0.0.1", attempt=self.attempt)
        assert self.client.wait_until_listening(120)
        assert self.client.port is not None
        self.store = self.connect()
        self.events: list[dict[str, Any]] = []

    def connect(self) -> Store:
        """A connection of a process that knows the secret."""
        assert self.client.port is not None
        store = TCPStore("127.0.0.1", self.client.port, is_master=False, wait_for_workers=False)
        return PrefixStore(self.secret, store)

    @property
    def secret(self) -> str:
        return str((read_json(self.attempt.rendezvous) or {})["secret"])

    def event(self, kind: str) -> dict[str, Any]:
        """The next event of a kind, once it is there."""
        found: list[dict[str, Any]] = []

        def look() -> bool:
            self.events += self.client.poll()
            found.extend(event for event in self.events if event["event"] == kind)
            return bool(found)

        wait_for(look, f"the event {kind}")
        self.events.remove(found[0])
        return found[0]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    found = Server(tmp_path_factory.mktemp("attempt") / "000001")
    yield found
    found.client.stop()
    assert not found.client.has_ended, "it was stopped"


def test_the_whole_exchange(server: Server) -> None:
    address = read_json(server.attempt.rendezvous)
    assert address is not None
    assert (address["port"], address["takes_stop"]) == (server.client.port, True)
    assert add_to_key("127.0.0.1", address["port"], stop_key(server.secret)), (
        "the supervisor's request to stop reaches this store"
    )

    server.store.set(warm_key(server.store.add(WARM, 1)), "n1/w0")
    assert server.event("warm") == {"event": "warm", "member": "n1/w0"}

    assert server.client.generation(Generation(1, MEMBERS, lost=(1,)))
    server.store.wait([NEWEST])
    published = Generation.of_json(server.store.get(generation_key(int(server.store.get(NEWEST)))))
    assert published == Generation(1, MEMBERS, lost=(1,))
    assert (published.rank_of("n1/w0"), published.rank_of("n1/0")) == (1, None)

    answer = recovered(1, step=41, rolled_back=1, seconds=0.25)
    server.store.compare_set(result_key(1), "", json.dumps(answer))
    server.store.compare_set(result_key(1), "", json.dumps({"event": "failed"}))
    assert server.event("recovered") == answer, "the first answer counts"


def test_ranks_that_do_not_come_are_named_at_the_deadline(server: Server) -> None:
    server.client.generation(Generation(2, MEMBERS, deadline_s=0.01))
    found = server.event("failed")
    assert found["number"] == 2
    assert "2 ranks (0, 1) did not leave the old generation within 0.01 s" in found["reason"]
    server.store.set(here_key(3, 0), "")
    server.client.generation(Generation(3, MEMBERS, deadline_s=0.05))
    found = server.event("failed")
    assert (found["rank"], found["reason"]) == (1, "1 rank (1) did not leave the old generation within 0.05 s")


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("no JSON", "Expecting value"),
        ("[]", "expected op"),
        ('{"op": "generation", "number": 9, "members": []}', "members must be names"),
        ('{"op": "generation", "number": 9, "members": ["a", "a"]}', "each once"),
        ('{"op": "generation", "number": 9, "members": ["a"], "lost": [1]}', "lost must be ranks below 1"),
        ('{"op": "generation", "number": 0, "members": ["a"]}', "is not after"),
    ],
)
def test_a_line_that_is_no_request_is_refused_and_the_next_one_is_served(
    server: Server, line: str, reason: str
) -> None:
    stdin = server.client._requests
    stdin.write(line + "\n")
    stdin.flush()
    assert reason in server.event("refused")["reason"]


def test_the_store_outlives_its_supervisor_and_serves_the_next_until_the_step_is_over(tmp_path: Path) -> None:
    server = Server(tmp_path / "000001")
    process = server.client._process
    assert process is not None
    server.store.set(warm_key(server.store.add(WARM, 1)), "n1/w0")
    assert server.event("warm")
    for number in (1, 2):
        assert server.client.generation(Generation(number, MEMBERS, lost=(1,), deadline_s=300))
        answer = recovered(number, step=40 + number, rolled_back=1, seconds=0.25)
        server.store.compare_set(result_key(number), "", json.dumps(answer))
        assert server.event("recovered") == answer
    third = Generation(3, MEMBERS, lost=(0,), deadline_s=300)
    assert server.client.generation(third)
    assert process.stdin is not None
    process.stdin.close()
    server.store.set(warm_key(server.store.add(WARM, 1)), "n0/w1")
    assert server.attempt.store_control.stat().st_mode & 0o077 == 0

    server.client = StoreClient.adopt(server.attempt)
    found = wait_for(lambda: server.client.taken_over(1), "what happened before")
    assert Generation.of(found["newest"]) == third
    assert Generation.of(found["before"]) == Generation(2, MEMBERS, lost=(1,), deadline_s=300)
    assert (found["outcome"], found["move"], found["unmoved"]) == (None, None, 0)
    known = found["warm"]
    assert (known if len(known) == 2 else [*known, server.event("warm")["member"]]) == ["n1/w0", "n0/w1"]
    answer = recovered(3, step=44, rolled_back=0, seconds=0.25)
    server.store.compare_set(result_key(3), "", json.dumps(answer))
    assert server.event("recovered") == answer

    server.client._requests.close()  # this one is killed as well
    server.client = StoreClient.adopt(server.attempt)
    found = wait_for(lambda: server.client.taken_over(1), "what happened before")
    assert found["outcome"] == answer, "which was reported before, and perhaps not recorded"
    server.client.stop()
    assert process.wait(DEADLINE_S) == 0
    assert not server.client.has_ended, "it was stopped"
    with pytest.raises(OSError, match=r"refused"):
        StoreClient.adopt(server.attempt)


def test_a_store_without_a_supervisor_ends_some_time_after_its_step(tmp_path: Path) -> None:
    """Ranks may be left in the steps of warm processes, and the next supervisor still come."""
    requests, server, asked = Requests(), StoreServer(HashStore()), iter((False, False))
    requests.lines.put(None)
    server.serve(requests, lambda: next(asked, True), adopted_s=0.01)
    assert next(asked, None) is None, "it has served until the step was over"


def _sleeping(process: DetachedProcess) -> list[psutil.Process]:
    """The command: before it is executed, the shell's child traps signals as the shell does."""
    return [each for each in psutil.Process(process.record.pid).children() if each.name() == "sleep"]


@pytest.mark.parametrize("end", ["in order", "killed", "before it began"])
def test_a_step_is_over_however_it_ended(end: str, tmp_path: Path) -> None:
    """A step that is killed leaves no exit code: a store without a supervisor would serve forever."""
    attempt = AttemptDir(tmp_path)
    step = Step(attempt.step_process, attempt.step_exit)
    if end == "before it began":
        assert step.is_over()
        return
    files = {"record_file": attempt.step_process, "exit_file": attempt.step_exit, "log": tmp_path / "log"}
    process = DetachedProcess.start(["sleep", "600"], env=os.environ, **files)
    assert not step.is_over()
    if end == "killed":
        process.signal_group(signal.SIGKILL)
    else:
        (command,) = wait_for(lambda: _sleeping(process), "the command")
        command.terminate()
    wait_for(lambda: [process.reap(), step.is_over()][1], "the end of the step")
    assert attempt.step_exit.exists() == (end == "in order")


def test_nobody_without_the_token_is_heard(server: Server) -> None:
    found = read_json(server.attempt.store_control)
    assert found is not None
    with socket.create_connection(("127.0.0.1", found["port"]), 60) as stranger:
        stranger.sendall(b"guessed\n" + json.dumps({"op": "stop"}).encode() + b"\n")
        assert stranger.recv(1) == b""
    assert not server.client.has_ended


def test_ranks_that_cannot_be_recovered_in_memory_are_reported_with_the_reason(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when their NCCL is one that crashes when it is aborted."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(server.client.port))
    monkeypatch.setenv(SECRET_VARIABLE, server.secret)
    report_off("NCCL 2.28.5 crashes when it is aborted")
    assert server.event("off") == {"event": "off", "reason": "NCCL 2.28.5 crashes when it is aborted"}


def test_a_server_that_left_no_address_is_not_adopted(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="left no address"):
        StoreClient.adopt(AttemptDir(tmp_path))


def test_a_server_that_fails_at_once_is_distinguished_from_one_that_was_stopped_early(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks would wait for the address of the first for a quarter of an hour."""
    monkeypatch.setattr("zslurm.job.in_memory.store_client._ENDS_S", 0.1)
    failed = StoreClient.start(["false"], host="127.0.0.1", attempt=AttemptDir(tmp_path))
    wait_for(lambda: failed.never_listened, "the end of the server")
    failed.stop()
    assert failed.never_listened
    stopped = StoreClient.start(["sh", "-c", "exec sleep 60"], host="127.0.0.1", attempt=AttemptDir(tmp_path))
    stopped.stop()
    assert not stopped.never_listened


def test_who_does_not_know_the_secret_changes_nothing(server: Server) -> None:
    """The keys of a recovery without the secret are others: no process reads them."""
    assert server.client.port is not None
    stranger = TCPStore("127.0.0.1", server.client.port, is_master=False, wait_for_workers=False)
    stranger.set(OFF, "anybody")
    stranger.set(warm_key(stranger.add(WARM, 1)), "n9/w9")
    time.sleep(0.5)  # the server looks every 0.1 s
    server.events += server.client.poll()
    assert not [
        event for event in server.events if event.get("reason") == "anybody" or event.get("member") == "n9/w9"
    ]
    assert server.attempt.rendezvous.stat().st_mode & 0o777 == 0o600


class Waiting:
    """A member that waits for the others of its generation, over its own connection."""

    def __init__(self, server: Server, generation: Generation) -> None:
        self.ended_with: BaseException | None = None
        store = server.connect()
        self._thread = threading.Thread(target=self._wait, args=(store, generation), daemon=True)
        self._thread.start()

    def _wait(self, store: Store, generation: Generation) -> None:
        try:
            check_in(store, generation, 0, over=lambda: False)
        except RuntimeError as error:
            self.ended_with = error

    def ends(self) -> str:
        """Return why it waits no longer; empty if all members are there."""
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive()
        return "" if self.ended_with is None else str(self.ended_with)


def test_members_wait_for_each_other_until_a_further_generation_or_the_deadline(server: Server) -> None:
    """They ask once; the server ends the wait of those that wait for a process that will not come."""
    first, second, third, fourth = (Generation(number, MEMBERS, deadline_s=300) for number in (21, 22, 23, 24))
    assert server.client.generation(first)
    waits = Waiting(server, first)
    assert server.client.generation(second)
    assert waits.ends() == "a further rank was lost"

    waits = Waiting(server, second)
    server.store.compare_set(result_key(22), "", json.dumps(failed(22, 1, "rank 1: no whole step")))
    assert waits.ends() == "rank 1: no whole step"
    server.event("failed")

    assert server.client.generation(third)
    waits = Waiting(server, third)
    check_in(server.store, third, 1, over=lambda: False)
    assert waits.ends() == ""

    short = replace(fourth, deadline_s=0.05)
    waits = Waiting(server, fourth)
    assert server.client.generation(short)
    assert "did not leave the old generation within 0.05 s" in waits.ends()
    server.event("failed")


@pytest.mark.skipif(not can_run_alone(), reason=WHY_NOT)
def test_ranks_that_connect_cost_the_server_no_dns_query(tmp_path: Path) -> None:
    queries = run_alone(counted_look_ups.__name__, str(tmp_path), torch=True)
    assert queries["plain"] > counted_look_ups.CLIENTS, "torch looks each of them up: else this test shows nothing"
    assert queries["store_server"] == 0
