"""Node names in /etc/hosts, added and taken away without touching anyone else's line.

Rendezvous libraries look a node's name up and retry for minutes if it does not resolve. The file is written
in place, never renamed over: in a container it is a mount. Its lock also serialises the other things that clusters
of one machine share (see `machine_lock`).
"""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator, Sequence
from pathlib import Path

HOSTS = Path("/etc/hosts")
_MARKER = "# zslurm test cluster"
_NO_FINAL_NEWLINE = "(the line before had no end)"


@contextlib.contextmanager
def machine_lock() -> Iterator[None]:
    """Held while what all clusters of this machine share is changed: /etc/hosts and the ordinary user."""
    with HOSTS.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def add(instance_id: str, names: Sequence[str], hosts: Path = HOSTS, *, address: str = "127.0.0.1") -> None:
    """Let every name resolve to this machine. Call it under `machine_lock`."""
    text = hosts.read_text(encoding="utf-8")
    unfinished = bool(text) and not text.endswith("\n")
    marker = f"{_MARKER} {instance_id}" + (f" {_NO_FINAL_NEWLINE}" if unfinished else "")
    lines = [f"{address} {name} {marker}\n" for name in names]
    hosts.write_text(text + "\n" * unfinished + "".join(lines), encoding="utf-8")


def remove(instance_id: str, hosts: Path = HOSTS) -> None:
    """Take away exactly what `add` added. Call it under `machine_lock`."""
    text = hosts.read_text(encoding="utf-8")
    kept, unfinished = [], False
    for line in text.splitlines(keepends=True):
        _, found, rest = line.partition(_MARKER)
        if found and rest.split()[:1] == [instance_id]:
            unfinished |= _NO_FINAL_NEWLINE in rest
        else:
            kept.append(line)
    restored = "".join(kept)
    if restored != text:
        hosts.write_text(restored.removesuffix("\n") if unfinished else restored, encoding="utf-8")
