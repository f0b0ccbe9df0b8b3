"""Directories into which compilers build kernels while ranks run, and lock files that nobody holds there.

The rules of a cluster (cluster/rccl/rules.yaml) name a directory on each node for them: on a file system that
nodes share, every rank waits for the lock of one, and a rank that was killed while it compiled leaves it behind.
"""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from pathlib import Path

from zslurm.kernels.prepared import is_own

DEFAULTS = {
    "TRITON_CACHE_DIR": "~/.triton/cache",
    "AITER_JIT_DIR": "~/.aiter/jit",
    "TORCH_EXTENSIONS_DIR": "~/.cache/torch_extensions",
    "TORCHINDUCTOR_CACHE_DIR": None,
    "MIOPEN_USER_DB_PATH": "~/.config/miopen",
    "MIOPEN_CUSTOM_CACHE_DIR": "~/.cache/miopen",
}
"""The variables that name the directories, and where they are without these; torch's Inductor takes /tmp."""

OLD_S = 60.0
_LOCKS = ("lock", "lock_*", "*/lock", "*/lock_*", "*/*/lock")
"""As torch's FileBaton and AITER call them: there as long as one process compiles, which has them open."""


def node_directory(base: str | None = None) -> str:
    """Return this user's directory of built kernels on each node."""
    return f"{base or '/tmp'}/zslurm-kernels-{os.getuid()}"


def directories(environ: Mapping[str, str]) -> dict[str, Path]:
    """Return the directory of each compiler, by its variable."""
    named = {name: environ.get(name) or default for name, default in DEFAULTS.items()}
    return {
        name: Path(value.replace("~", environ.get("HOME", "~"), 1))
        for name, value in named.items()
        if value is not None
    }


def stale_locks(environ: Mapping[str, str], proc: Path = Path("/proc")) -> list[Path]:
    """Return locks of more than a minute that no process of this user on this node has open."""
    locks = {
        lock
        for directory in directories(environ).values()
        for pattern in _LOCKS
        for lock in directory.glob(pattern)
        if _age_s(lock) > OLD_S
    }
    held = _open_files(proc) if locks else set()
    return sorted(lock for lock in locks if str(lock.resolve()) not in held)


def has_built_kernels() -> bool:
    """Return whether this Python has an AITER that was installed with built kernels, without importing it."""
    spec = importlib.util.find_spec("aiter")
    if spec is None or spec.origin is None:
        return False
    return any((Path(spec.origin).parent / "jit").glob("*.so"))


def _is_by_rule(environ: Mapping[str, str], name: str) -> bool:
    return Path(environ.get(name, "")).parent.name == Path(node_directory()).name


def _age_s(path: Path) -> float:
    try:
        return time.time() - path.stat().st_mtime
    except OSError:  # it was released
        return 0.0


def _open_files(proc: Path) -> set[str]:
    held = set()
    for directory in proc.glob("[0-9]*/fd"):
        with suppress(OSError):
            for descriptor in directory.iterdir():
                with suppress(OSError):
                    held.add(str(descriptor.readlink()))
    return held


def ready(environ: MutableMapping[str, str]) -> list[str]:
    """Make the node's directory that the rules name, and remove stale locks there; returns notes for the user.

    If the directory belongs to somebody else, whose code would run, the compilers keep their own places. So does
    an AITER that was installed with built kernels: with `AITER_JIT_DIR` it would not find them.
    """
    if _is_by_rule(environ, "AITER_JIT_DIR") and has_built_kernels():
        del environ["AITER_JIT_DIR"]
    by_rule = [name for name in DEFAULTS if _is_by_rule(environ, name)]
    notes = []
    for parent in {Path(environ[name]).parent for name in by_rule}:
        with suppress(OSError):
            parent.mkdir(mode=0o700, exist_ok=True)
        if not is_own(parent):
            notes.append(f"{parent} cannot be used, or others may write to it: kernels are built elsewhere")
            for name in [name for name in by_rule if Path(environ[name]).parent == parent]:
                del environ[name]
    if environ.get("LOCAL_RANK") == "0":
        of_node = {name: environ[name] if name in by_rule and name in environ else os.devnull for name in DEFAULTS}
        for lock in stale_locks(of_node):
            lock.unlink(missing_ok=True)
            notes.append(f"removed {lock}: a process that compiled left it, and nobody holds it")
    return notes
