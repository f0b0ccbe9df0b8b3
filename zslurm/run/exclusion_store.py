"""The nodes that the runs of a group do not use: a directory that all of them read and write.

Each run writes one file for a node, which no other run replaces: two runs that write at once lose nothing. The
files say who excluded the node, when, why, and until when. `cluster.exclusions` names the directory.
"""

from __future__ import annotations

import contextlib
import getpass
import hashlib
import os
import re
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from zslurm.core.files import write_atomically
from zslurm.run.shared_exclusions import SharedExclusion

_NODE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_SUFFIX = ".excluded.json"
_KEPT_S = 7 * 86400.0
"""Seconds after the end of an exclusion for which its file is kept, for people who look at what happened."""
_MODE = 0o664
"""The group reads and removes what its members write, whatever their umask."""


@dataclass(frozen=True)
class StoreContents:
    """What a store holds.

    Attributes:
        exclusions: of this cluster, expired ones among them.
        problems: files that cannot be used, one line each.
    """

    exclusions: tuple[SharedExclusion, ...] = ()
    problems: tuple[str, ...] = ()


class ExclusionStore:
    """A directory of shared exclusions, as the runs of one cluster use it."""

    def __init__(self, directory: Path, cluster: str) -> None:
        """Use a directory; `cluster` is Slurm's name of the cluster."""
        self.directory, self.cluster = directory, cluster

    def read(self) -> StoreContents:
        """Return the exclusions of this cluster; damaged files and those of other clusters are named.

        Raises:
            OSError: the directory is missing, or cannot be read.
        """
        exclusions: list[SharedExclusion] = []
        problems: list[str] = []
        elsewhere: dict[str, int] = {}
        for path in sorted(self.directory.iterdir()):
            if not path.name.endswith(_SUFFIX) or path.name.startswith("."):
                continue
            if (exclusion := _exclusion_in(path)) is None:
                if path.exists():  # else another run has just removed it
                    problems.append(f"{path}: not an exclusion, or damaged: remove the file")
            elif exclusion.cluster != self.cluster:
                elsewhere[exclusion.cluster] = elsewhere.get(exclusion.cluster, 0) + 1
            else:
                exclusions.append(exclusion)
        for cluster, count in elsewhere.items():
            what = "1 exclusion is" if count == 1 else f"{count} exclusions are"
            problems.append(f"{self.directory}: {what} of cluster {cluster}, not of {self.cluster}, and not used")
        return StoreContents(tuple(exclusions), tuple(problems))

    def write(self, run: Path, nodes: Iterable[str], reason: str, since: float, expires: float) -> None:
        """Share that a run does not use some nodes, from `since` until `expires` (UNIX seconds).

        Raises:
            OSError: the directory is missing, or cannot be written.
        """
        for node in nodes:
            exclusion = SharedExclusion(node, self.cluster, _user(), str(run.absolute()), reason, since, expires)
            path = self.directory / _file_name(node, run)
            write_atomically(path, msgspec.json.encode(exclusion).decode() + "\n")
            with contextlib.suppress(OSError):
                path.chmod(_MODE)
        self._remove_old()

    def remove(self, nodes: Collection[str], run: Path | None = None) -> list[str]:
        """Let the group use nodes again: remove what one run wrote of them, or what every run did.

        Returns:
            The nodes of which something was removed.

        Raises:
            OSError: the directory cannot be read, or a file cannot be removed.
        """
        removed = []
        for exclusion in self.read().exclusions:
            if exclusion.node in nodes and (run is None or exclusion.run == str(run.absolute())):
                (self.directory / _file_name(exclusion.node, Path(exclusion.run))).unlink(missing_ok=True)
                removed.append(exclusion.node)
        return list(dict.fromkeys(removed))

    def _remove_old(self) -> None:
        """Remove files of exclusions that ended long ago, as far as this user may."""
        now = time.time()
        with contextlib.suppress(OSError):
            for exclusion in self.read().exclusions:
                if exclusion.expires + _KEPT_S < now:
                    (self.directory / _file_name(exclusion.node, Path(exclusion.run))).unlink(missing_ok=True)


def _user() -> str:
    """Return the name of this process's user, or the number of one that no account has."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


def _file_name(node: str, run: Path) -> str:
    """Return the name of the file that a run writes about a node."""
    identity = hashlib.blake2b(str(run.absolute()).encode(), digest_size=6).hexdigest()
    return f"{node}.{identity}{_SUFFIX}"


def _exclusion_in(path: Path) -> SharedExclusion | None:
    """Return the exclusion of a file; None if it holds none, or cannot be read."""
    try:
        exclusion = msgspec.json.decode(path.read_bytes(), type=SharedExclusion)
    except (OSError, msgspec.MsgspecError):
        return None
    return exclusion if _NODE.fullmatch(exclusion.node) else None
