"""The collective library's RAS service, played by a server that speaks its protocol."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.aegis.contexts import context
from zslurm.aegis.agent.ras import RasAnswer, answer_of, ask_ras, query
from zslurm.aegis.agent.sensor import NodeContext


def rank(number: int, calls: int, pid: int) -> dict[str, Any]:
    counts = {"Broadcast": 2, "AllReduce": calls}
    return {"rank": number, "host": "10.0.0.1", "pid": pid, "collective_counts": counts}


def job(*ranks: dict[str, Any], missing: tuple[dict[str, Any], ...] = ()) -> dict[str, Any]:
    """The state of a job as NCCL 2.28 describes it; a communicator of two ranks comes first."""
    small = {"size": 2, "ranks": [rank(0, 1, 10), rank(1, 900, 11)], "missing_ranks": []}
    whole = {"size": len(ranks) + len(missing), "ranks": list(ranks), "missing_ranks": list(missing)}
    return {"nccl_version": "2.28.9", "communicators_count": 2, "communicators": [small, whole]}


TEXT = """
Job summary
===========

  Nodes  Processes         GPUs  Processes     GPUs
      1          2            1          2        2

Errors
======

Warnings
========

#0-0 (27a079b828ff1a75) MISMATCH
  Communicator ranks have different collective operation counts
  1 rank has launched up to operation 7
  Rank 1 -- GPU 1 managed by process 11 on node 10.0.0.1
"""


class Service:
    """Listens, and answers one client after the other."""

    def __init__(self, status: str, *, json_known: bool = True, greeting: str = "SERVER PROTOCOL 2") -> None:
        self.asked: list[str] = []
        self._status, self._json_known, self._greeting = status, json_known, greeting
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            with connection, connection.makefile("rwb") as lines:
                for line in lines:
                    request = line.decode().strip()
                    self.asked.append(request)
                    if request.startswith("CLIENT"):
                        answer = self._greeting
                    elif request.startswith("SET FORMAT") and not self._json_known:
                        answer = f"ERROR: Unknown command {request}"
                    elif request == "VERBOSE STATUS":
                        lines.write(self._status.encode())
                        break
                    else:
                        answer = "OK"
                    lines.write(f"{answer}\n".encode())
                    lines.flush()

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


@pytest.fixture
def services() -> Iterator[list[Service]]:
    made: list[Service] = []
    yield made
    for service in made:
        service.close()


@pytest.fixture
def node(tmp_path: Path) -> NodeContext:
    return context(tmp_path / "root")


def ask(node: NodeContext, port: int) -> RasAnswer:
    node.environ["NCCL_RAS_ADDR"] = f"127.0.0.1:{port}"  # type: ignore[index]
    return ask_ras(node, node.run.attempt(3))


def test_the_ranks_that_are_behind_are_named(services: list[Service], node: NodeContext) -> None:
    gone = {"rank": 3, "host": "10.0.0.2", "pid": 13, "status": {"unresponsive": True, "considered_dead": False}}
    state = job(rank(0, 40, 10), rank(1, 37, 11), rank(2, 40, 12), missing=(gone,))
    services.append(Service(json.dumps(state)))
    answer = ask(node, services[0].port)
    assert (answer.there, answer.version, answer.behind) == (True, "2.28.9", (1, 3))
    assert answer.found == (
        "rank 3 does not answer (process 13 on 10.0.0.2)",
        "rank 1 has called 3 AllReduces fewer than others",
    )
    assert services[0].asked == ["CLIENT PROTOCOL 2", "TIMEOUT 4", "SET FORMAT json", "VERBOSE STATUS"]


def test_a_job_in_which_no_rank_is_behind_names_none(services: list[Service], node: NodeContext) -> None:
    services.append(Service(json.dumps(job(rank(0, 40, 10), rank(1, 40, 11), rank(2, 40, 12)))))
    assert ask(node, services[0].port) == RasAnswer(there=True, version="2.28.9")


def test_the_complaints_of_a_version_that_knows_no_json_are_passed_on(
    services: list[Service], node: NodeContext
) -> None:
    services.append(Service(TEXT, json_known=False))
    answer = ask(node, services[0].port)
    assert (answer.there, answer.behind) == (True, ())
    assert answer.found[0] == "#0-0 (27a079b828ff1a75) MISMATCH"
    assert answer.found[-1] == "Rank 1 -- GPU 1 managed by process 11 on node 10.0.0.1"


def test_where_nothing_listens_or_something_else_does_there_is_no_answer(
    services: list[Service], node: NodeContext
) -> None:
    services.append(Service("", greeting="220 mail.example.com"))
    assert ask(node, services[0].port) == RasAnswer()
    with pytest.raises(ValueError, match="no RAS service"):
        query("127.0.0.1", services[0].port)
    free = socket.create_server(("127.0.0.1", 0))
    port = free.getsockname()[1]
    free.close()
    assert ask(node, port) == RasAnswer()
    node.environ["NCCL_RAS_ADDR"] = "nonsense"  # type: ignore[index]
    assert ask_ras(node, node.run.attempt(3)) == RasAnswer()


def test_a_service_of_another_job_is_not_believed() -> None:
    state = json.dumps(job(rank(0, 40, 10), rank(1, 37, 11), rank(2, 40, 12)))
    assert answer_of(state, {10, 11, 12}).behind == (1,)
    assert answer_of(state, {77}) == RasAnswer()


@pytest.mark.parametrize("text", ["", "  ", "[]", "{}", '{"communicators": []}', '{"communicators": [3]}'])
def test_answers_without_sense_are_none(text: str) -> None:
    assert answer_of(text, set()) in (RasAnswer(), RasAnswer(there=True))
