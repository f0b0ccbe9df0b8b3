"""Read the files from which RCCL and NCCL take variables behind the environment.

NCCL reads $NCCL_CONF_FILE, or else ~/.nccl.conf, and then /etc/nccl.conf; RCCL reads .rccl.conf and rccl.conf in
the same places (src/misc/param.cc of both). What the environment or an earlier file sets is not set again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from zslurm.cluster.rccl.rules import vendor_of
from zslurm.config.spec import ClusterSection
from zslurm.core.files import read_text

_NAMES = {"amd": ("rccl",), "nvidia": ("nccl",), None: ("rccl", "nccl")}


@dataclass(frozen=True)
class ConfSetting:
    """A variable that a file sets.

    Attributes:
        name: as it is written: a blank before the `=` is part of it, for the libraries too.
        place: `/etc/rccl.conf:3`.
    """

    name: str
    value: str
    place: str


@dataclass(frozen=True)
class Conf:
    """What the files hold.

    Attributes:
        settings: those that take effect, the first of each name.
        unreadable: NCCL_CONF_FILE if it names no file that can be read here.
    """

    settings: tuple[ConfSetting, ...] = ()
    unreadable: str | None = None


NO_FILES = Conf()


def read_conf(given: Mapping[str, str], cluster: ClusterSection, root: Path = Path("/")) -> Conf:
    """Read the files that RCCL or NCCL will read on a machine like this one, with /etc below `root`.

    What the environment of the job (`given`) sets, no file does.
    """
    named_file = given.get("NCCL_CONF_FILE")
    names = _NAMES[vendor_of(cluster)]
    home = given.get("HOME")
    files = [Path(named_file)] if named_file else [Path(home) / f".{name}.conf" for name in names] if home else []
    files += [root / "etc" / f"{name}.conf" for name in names]
    by_name: dict[str, ConfSetting] = {}
    for path in files:
        shown = str(path) if path in files[: len(files) - len(names)] else f"/etc/{path.name}"
        for number, line in enumerate((read_text(path) or "").splitlines(), 1):
            name, separator, value = line.partition("=")
            if separator and not line.startswith("#") and name not in given and name not in by_name:
                by_name[name] = ConfSetting(name, value, f"{shown}:{number}")
    return Conf(
        tuple(by_name.values()), named_file if named_file and read_text(Path(named_file)) is None else None
    )
