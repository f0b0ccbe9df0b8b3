"""What is read from a file of plain data, and what is refused before it can do harm."""

from __future__ import annotations

import collections
import datetime
import json
import os
import pickle
import random
from pathlib import Path
from typing import Any

import pytest

from zslurm.core.plain_pickle import NotPlain, load_plain, loads_plain

PLAIN: dict[str, Any] = {
    "version": "2.10",
    "entries": [{"id": 1, "sizes": [[4, 5]], "at": None, "ok": True}],
    "x": 1.5,
}


class Harmful:
    """Touches a file when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_plain_data_comes_back(tmp_path: Path, protocol: int) -> None:
    (tmp_path / "file").write_bytes(pickle.dumps(PLAIN | {"pair": ("a", "b")}, protocol))
    assert load_plain(tmp_path / "file") == PLAIN | {"pair": ("a", "b")}


def test_so_does_json(tmp_path: Path) -> None:
    (tmp_path / "file").write_text(json.dumps(PLAIN))
    assert load_plain(tmp_path / "file") == PLAIN


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_nothing_is_called(tmp_path: Path, protocol: int) -> None:
    trap = tmp_path / "touched"
    with pytest.raises(NotPlain, match="which is no plain data"):
        loads_plain(pickle.dumps({"entries": [Harmful(trap)]}, protocol))
    assert not trap.exists()


@pytest.mark.parametrize(
    "value",
    [os.system, datetime.datetime(2026, 1, 1), collections.OrderedDict(a=1), b"bytes", {1, 2}, 1j, Path("x")],
)
def test_what_is_no_plain_data_is_refused(value: object) -> None:
    with pytest.raises(NotPlain):
        loads_plain(pickle.dumps([value]))


def test_a_list_that_holds_itself_is_refused() -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(NotPlain, match="nested too deep"):
        loads_plain(pickle.dumps(endless))


def test_damaged_files_are_refused() -> None:
    draw, whole = random.Random(7), pickle.dumps(PLAIN)
    for _ in range(500):
        data = bytearray(whole[: draw.randrange(1, len(whole))])
        data[draw.randrange(len(data))] = draw.randrange(256)
        try:
            loads_plain(bytes(data))
        except NotPlain:
            continue
    with pytest.raises(NotPlain):
        loads_plain(b"")
    with pytest.raises(NotPlain, match="it is damaged"):
        loads_plain(b'{"entries": [')


def test_files_of_others_links_and_pipes_are_not_read(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(pickle.dumps(PLAIN))
    path.chmod(0o666)
    with pytest.raises(NotPlain, match="it is not yours, or everybody may write it"):
        load_plain(path)
    path.chmod(0o600)
    (tmp_path / "link").symlink_to(path)
    with pytest.raises(OSError, match="symbolic links"):
        load_plain(tmp_path / "link")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(NotPlain, match="not a regular file"):
        load_plain(tmp_path / "pipe")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_the_file_of_another_user_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(pickle.dumps(PLAIN))
    os.chown(path, 65534, 65534)
    with pytest.raises(NotPlain, match="pickles of others are not loaded"):
        load_plain(path)
