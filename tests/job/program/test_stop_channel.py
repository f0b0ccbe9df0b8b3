"""A request to stop reaches every rank of a program over TCP, whenever it comes and wherever from."""

from __future__ import annotations

import socket
import threading

import pytest

from tests.waiting import wait_for
from zslurm.job.program.stop_channel import StopServer, join, pass_on
from zslurm.job.stop_request import KEY, add_to_key, stop_key

SECRET = "5ec2e7"


@pytest.fixture
def address() -> dict[str, object]:
    return {"host": "127.0.0.1", "stop_port": StopServer(4, SECRET, lambda: 4242).port, "secret": SECRET}


def listener(address: dict[str, object]) -> threading.Event:
    asked = threading.Event()
    join(address, asked.set)
    return asked


def test_all_ranks_that_have_joined_and_all_that_come_later_are_asked(address: dict[str, object]) -> None:
    early = [listener(address) for _ in range(3)]
    assert not any(asked.wait(0.05) for asked in early)
    assert add_to_key("127.0.0.1", int(str(address["stop_port"])), stop_key(SECRET))
    wait_for(lambda: all(asked.is_set() for asked in early), "the ranks to be asked")
    assert listener(address).wait(60.0)


def test_a_rank_that_got_a_signal_itself_asks_the_others(address: dict[str, object]) -> None:
    other = listener(address)
    assert pass_on(address)
    assert other.wait(60.0)


@pytest.mark.parametrize("sent", [b"GET / HTTP/1.1\r\n\r\n", b"\x00" * 5000, b"\x02", b""])
def test_what_is_no_request_changes_nothing(address: dict[str, object], sent: bytes) -> None:
    """A port scan, say. The server serves on."""
    port = int(str(address["stop_port"]))
    asked = listener(address)
    with socket.create_connection(("127.0.0.1", port)) as stranger:
        stranger.sendall(sent)
    for guess in ("another/key", KEY, stop_key(""), stop_key("5ec2e8")):
        assert not add_to_key("127.0.0.1", port, guess), "whoever does not know the secret of the run"
    assert not asked.wait(0.2)
    assert pass_on(address)
    assert asked.wait(60.0)


def test_without_rank_0_no_request_comes_and_nothing_fails() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    nowhere: dict[str, object] = {"host": "127.0.0.1", "stop_port": port, "secret": SECRET}
    assert not listener(nowhere).wait(0.1)
    assert not pass_on(nowhere)
