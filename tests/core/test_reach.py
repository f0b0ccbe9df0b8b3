"""What a port of another machine shows."""

from __future__ import annotations

import socket

from zslurm.core.reach import reach, reach_of


def test_a_port_that_answers_or_refuses() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert reach("127.0.0.1", port, 5.0) == "answers"
    assert reach("127.0.0.1", port, 5.0) == "refuses"


def test_a_host_from_which_nothing_comes_back() -> None:
    """A listener whose queue is full drops further requests, as a lost machine does."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        waiting = [socket.socket() for _ in range(4)]
        try:
            for client in waiting:
                client.setblocking(False)
                client.connect_ex(server.getsockname())
            assert reach(*server.getsockname(), 0.2) == "nothing"
        finally:
            for client in waiting:
                client.close()


def test_what_cannot_be_asked_is_unknown() -> None:
    assert reach("no.such.host.invalid", 1, 5.0) == "unknown"
    assert [reach_of(word) for word in ("answers", "nothing", "yes", None)] == [
        "answers", "nothing", "unknown", "unknown",
    ]  # fmt: skip
