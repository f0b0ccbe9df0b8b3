"""A separate network and mount namespace, in which the test's DNS server is the only one.

`run_alone` starts a module of the tests in such namespaces; there the module calls `set_up` and starts `Dns`.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import socket
import struct
import subprocess
import threading
from pathlib import Path
from typing import Any

from tests import forked
from tests.checkout import ROOT
from tests.waiting import DEADLINE_S

_UNSHARE = ["unshare", "--mount", "--net"]
_CLONE_NEWNS, _CLONE_NEWNET = 0x20000, 0x40000000  # linux/sched.h
_SIOCSIFFLAGS, _IFF_UP = 0x8914, 0x1  # linux/sockios.h, linux/if.h
_NO_SUCH_NAME = 0x8183
WHY_NOT = "unshare --mount --net is refused here; it takes root"


def can_run_alone() -> bool:
    """Return whether this user may make such namespaces."""
    try:
        return subprocess.run([*_UNSHARE, "true"], capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def run_alone(module: str, *arguments: str, torch: bool = False) -> Any:
    """Run a module in new namespaces, forked from a process with its imports; returns what it printed, as JSON.

    Args:
        module: of the tests; it calls `set_up`.
        arguments: its arguments.
        torch: whether it needs torch.
    """
    server = forked.server(torch=torch)
    done = server.run(arguments, module=module, env=dict(os.environ), cwd=ROOT, timeout=DEADLINE_S)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def set_up(folder: Path) -> None:
    """Enter namespaces with a loopback interface, an empty /etc/hosts, and names from a DNS server there.

    Args:
        folder: empty; gets the files that are mounted over those of /etc.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNS | _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "unshare")
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sh", b"lo", _IFF_UP))
    files = {"hosts": "", "resolv.conf": "nameserver 127.0.0.1\n", "nsswitch.conf": "hosts: files dns\n"}
    for name, text in files.items():
        file = folder / name
        file.write_text(text)
        subprocess.run(["mount", "--bind", str(file), f"/etc/{name}"], check=True)


class Dns:
    """A name server that counts what it is asked, and knows no name.

    Attributes:
        queries: how many came.
        answers: whether it answers; else clients wait until they give up.
    """

    def __init__(self) -> None:
        """Listen."""
        self.queries, self.answers = 0, True
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind(("127.0.0.1", 53))
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            query, sender = self._socket.recvfrom(4096)
            self.queries += 1
            if self.answers:
                self._socket.sendto(query[:2] + struct.pack("!H", _NO_SUCH_NAME) + query[4:], sender)
