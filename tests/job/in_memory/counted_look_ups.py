"""Count the DNS queries of stores to which clients connect; tests/own_network.py runs it.

zslurm's store server and, as the control, a plain TCPStore in another process get CLIENTS clients each.
Printed is how many queries came for each, as JSON.
"""

from __future__ import annotations

import json
import multiprocessing
import subprocess
import sys
from multiprocessing.connection import Connection
from pathlib import Path

from torch.distributed import TCPStore

from tests.own_network import Dns, set_up
from zslurm.job.in_memory.store_server import look_up_no_names

CLIENTS = 3


def connect(port: int) -> None:
    """Connect the clients; each is answered, so the store has accepted it."""
    look_up_no_names()  # here: torch looks up the server's name as well
    for number in range(CLIENTS):
        store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
        store.set(str(number), "here")
        assert store.get(str(number)) == b"here"


def with_store_server() -> None:
    """Start zslurm's, connect to it, end it."""
    server = [sys.executable, "-m", "zslurm.job.in_memory.store_server", "--host", "127.0.0.1"]
    with subprocess.Popen(server, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        connect(json.loads(process.stdout.readline())["port"])
        process.stdin.close()  # it ends with its standard input


def with_plain_store() -> None:
    """The same with a store of torch alone."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    process = context.Process(target=_serve, args=(there,))
    process.start()
    connect(here.recv())
    here.send(None)
    process.join()


def _serve(pipe: Connection) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipe.send(store.port)
    pipe.recv()


def main() -> None:
    """Print the counts."""
    set_up(Path(sys.argv[1]))
    dns, found = Dns(), {}
    for name, use in (("plain", with_plain_store), ("store_server", with_store_server)):
        before = dns.queries
        use()
        found[name] = dns.queries - before
    print(json.dumps(found))


if __name__ == "__main__":
    main()
