"""Count the DNS queries that stores make while clients connect: a program for a network and mount namespace of its own.

`unshare -m -n python counted_look_ups.py FOLDER` answers DNS on the loopback interface there (that no name is known),
starts zslurm's store server and, as the control, a plain TCPStore in a process of its own, connects CLIENTS clients
to each, and prints how many queries came for each as JSON. FOLDER is empty, for files of the test.
"""

from __future__ import annotations

import fcntl
import json
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

CLIENTS = 3
_SIOCSIFFLAGS, _IFF_UP = 0x8914, 0x1  # linux/sockios.h, linux/if.h
_NO_SUCH_NAME = 0x8183
_PLAIN_STORE = """
import sys
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""


class Dns:
    """A name server that knows no name, and counts what it is asked."""

    def __init__(self) -> None:
        """Listen where `resolv.conf` has it."""
        self.queries = 0
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind(("127.0.0.1", 53))
        threading.Thread(target=self._answer, daemon=True).start()

    def _answer(self) -> None:
        while True:
            query, sender = self._socket.recvfrom(4096)
            self.queries += 1
            self._socket.sendto(query[:2] + struct.pack("!H", _NO_SUCH_NAME) + query[4:], sender)


def own_network(folder: Path) -> None:
    """Have a loopback interface, and names from the DNS server on it alone."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sh", b"lo", _IFF_UP))
    files = {"hosts": "", "resolv.conf": "nameserver 127.0.0.1\n", "nsswitch.conf": "hosts: files dns\n"}
    for name, text in files.items():
        file = folder / name
        file.write_text(text)
        subprocess.run(["mount", "--bind", str(file), f"/etc/{name}"], check=True)


def connect(port: int) -> None:
    """Connect the clients; each is answered, so the store has accepted it."""
    from torch.distributed import TCPStore

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
    own_network(Path(sys.argv[1]))
    from zslurm.job.store_server import look_up_no_names

    look_up_no_names()  # for the clients here: torch looks up the server's name as well
    dns = Dns()
    ours = [sys.executable, "-m", "zslurm.job.store_server", "--host", "127.0.0.1"]
    found = {
        "store_server": counted(dns, ours, lambda line: json.loads(line)["port"]),
        "plain": counted(dns, [sys.executable, "-c", _PLAIN_STORE], int),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
