"""Read a pickle or a JSON file of plain data: dictionaries, lists, tuples, texts, numbers, booleans and None.

A pickle can run any code when it is loaded. This one refuses every name of a class or function, so nothing is
imported or called; and the file of another user, or one that others may write, is not opened at all.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import stat
from pathlib import Path
from typing import Any

from zslurm.checkpoint_tools.quantities import show_bytes
from zslurm.core.errors import ZslurmError

LARGEST = 256 << 20
"""Bytes; a larger file is refused: a pickle grows when it is loaded."""

_DEEPEST = 32


class NotPlain(ZslurmError):
    """A file holds something else than plain data, is damaged, or is not the user's own."""


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str) -> Any:
        raise NotPlain(f"it names `{module_name}.{global_name}`, which is no plain data")

    def persistent_load(self, _pid: Any) -> Any:
        raise NotPlain("it refers to data outside of the file")


def loads_plain(data: bytes) -> Any:
    """Return the value in a JSON document or a pickle.

    Raises:
        NotPlain: it holds something else, or is damaged.
    """
    try:
        is_json = data.lstrip()[:1] in (b"{", b"[")
        value = json.loads(data) if is_json else _PlainUnpickler(io.BytesIO(data)).load()
    except NotPlain:
        raise
    except Exception as error:  # unpickling damaged data can raise nearly anything
        raise NotPlain(f"it is damaged: {type(error).__name__}") from error
    _check(value, 0)
    return value


def load_plain(path: Path) -> Any:
    """Return the value in a file of JSON or a pickle that belongs to this user.

    Raises:
        NotPlain: it is another user's, others may write it, it is too large, or its content is not plain data.
        OSError: it cannot be read.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        about = os.fstat(file.fileno())
        if not stat.S_ISREG(about.st_mode):
            raise NotPlain(f"{path}: it is not a regular file")
        if about.st_uid != os.geteuid() or about.st_mode & stat.S_IWOTH:
            raise NotPlain(f"{path}: it is not yours, or everybody may write it: pickles of others are not loaded")
        if about.st_size > LARGEST:
            raise NotPlain(f"{path}: it has {show_bytes(about.st_size)}, more than {show_bytes(LARGEST)}")
        data = file.read(LARGEST + 1)
    try:
        return loads_plain(data)
    except NotPlain as error:
        raise NotPlain(f"{path}: {error}") from error


def _check(value: Any, depth: int) -> None:
    """Refuse what an unpickler can make without a name: bytes, sets, and containers that hold themselves."""
    if depth > _DEEPEST:
        raise NotPlain("it is nested too deep")
    if isinstance(value, dict):
        for key, inner in value.items():
            _check(key, depth + 1)
            _check(inner, depth + 1)
    elif isinstance(value, list | tuple):
        for inner in value:
            _check(inner, depth + 1)
    elif value is not None and not isinstance(value, str | int | float):
        raise NotPlain(f"it holds {type(value).__name__}")
