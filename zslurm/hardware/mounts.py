"""Which mount a directory is on, and which server that mount comes from."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from zslurm.core.files import read_text

_ESCAPE = re.compile(r"\\([0-7]{3})")
_NFS = re.compile(r"(?:\[(?P<v6>[^\]]+)\]|(?P<host>[^:/\[\]]+)):/")
_LUSTRE = re.compile(r"(?P<host>[^@:,/]+)@\w+")
_NETWORKED = frozenset("nfs nfs4 lustre beegfs ceph gpfs cifs smb3 9p glusterfs fuse.glusterfs".split())


@dataclass(frozen=True)
class Mount:
    """A mount as /proc/self/mounts has it."""

    source: str
    place: str
    kind: str

    @property
    def server(self) -> str | None:
        """Name or address of the server; None for a local file system, and if the source names none."""
        if self.kind.startswith(("nfs", "glusterfs", "fuse.glusterfs", "ceph")):
            match = _NFS.match(self.source)
            return (match["v6"] or match["host"]) if match else None
        if self.kind == "lustre":
            match = _LUSTRE.match(self.source)
            return match["host"] if match else None
        if self.kind in ("cifs", "smb3"):
            return self.source.strip("/").partition("/")[0] or None
        return None

    @property
    def is_networked(self) -> bool:
        """Whether files come over a network."""
        return self.kind in _NETWORKED


def mount_of(directory: str, root: Path) -> Mount | None:
    """Return the mount that a directory (absolute, without links) is on; None if unknown."""
    mounts = [
        Mount(_unescape(fields[0]), _unescape(fields[1]), fields[2])
        for line in (read_text(root / "proc/self/mounts") or "").splitlines()
        if len(fields := line.split()) >= 3
    ]
    fitting = [mount for mount in mounts if Path(directory).is_relative_to(mount.place)]
    # Of two mounts on one place the later one hides the other.
    return max(enumerate(fitting), key=lambda entry: (len(entry[1].place), entry[0]), default=(0, None))[1]


def _unescape(text: str) -> str:
    return _ESCAPE.sub(lambda match: chr(int(match[1], 8)), text)
