"""Count the DNS queries of stores to which clients connect; tests/own_network.py runs it.

zslurm's store server and, as the control, a plain TCPStore in another process get CLIENTS clients each.
Printed is how many queries came for each, as JSON.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from torch.distributed import TCPStore

from tests.own_network import Dns, set_up
from zslurm.job.in_memory.store_server import look_up_no_names

CLIENTS = 3
_PLAIN_STORE = """
import sys
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""


def connect(port: int) -> None:
    """Connect the clients; each is answered, so the store has accepted it."""
    for number in range(CLIENTS):
        store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
        store.set(str(number), "here")
        assert store.get(str(number)) == b"here"


def counted(dns: Dns, server: list[str], port_of: Callable[[str], int]) -> int:
    """Start a server, connect to it, end it; return how many queries came meanwhile."""
    before = dns.queries
    with subprocess.Popen(server, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        connect(port_of(process.stdout.readline()))
        process.stdin.close()  # both end with their standard input
    return dns.queries - before


def main() -> None:
    """Print the counts."""
    set_up(Path(sys.argv[1]))
    look_up_no_names()  # for the clients here: torch looks up the server's name as well
    dns = Dns()
    ours = [sys.executable, "-m", "zslurm.job.in_memory.store_server", "--host", "127.0.0.1"]
    found = {
        "store_server": counted(dns, ours, lambda line: json.loads(line)["port"]),
        "plain": counted(dns, [sys.executable, "-c", _PLAIN_STORE], int),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
