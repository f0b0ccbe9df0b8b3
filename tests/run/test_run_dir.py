"""The run directory: every path in one place, closed to others, its files replaced whole or not at all."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import pytest

from zslurm.core.errors import ConfigError, NotFound, ZslurmError
from zslurm.core.files import read_json, write_atomically
from zslurm.run.run_dir import AttemptDir, RunDir, open_run


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize(("group_readable", "expected"), [(False, 0o700), (True, 0o750)])
@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_a_run_is_closed_to_others(tmp_path: Path, group_readable: bool, expected: int, umask: int) -> None:
    before = os.umask(umask)
    try:
        run = RunDir(tmp_path / "runs" / "r")
        run.create(group_readable=group_readable)
    finally:
        os.umask(before)
    assert mode(run.path) == expected
    assert sorted(path.name for path in run.path.iterdir()) == ["attempts", "checkpoints", "logs", "submitit"]


def test_making_it_again_keeps_what_is_there_and_follows_the_setting(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "r")
    run.create(group_readable=False)
    (run.checkpoints / "step-1").mkdir()
    run.create(group_readable=True)
    assert mode(run.path) == 0o750
    assert (run.checkpoints / "step-1").is_dir()


def test_a_place_that_cannot_hold_runs_says_what_to_set(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file" / "r", tmp_path / "file", Path("/proc/runs/r")):
        with pytest.raises(ConfigError, match=r"the run directory is not writable; set run\.runs_dir to"):
            RunDir(path).create(group_readable=False)


def test_a_run_exists_with_its_configuration_and_is_submitted_with_its_first_job(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "r")
    run.create(group_readable=False)
    assert (run.exists, run.submitted) == (False, False)
    with pytest.raises(NotFound, match=r"r: not a run directory \(it has no config\.json\)"):
        open_run(run.path)
    run.write_text(run.config, "{}")
    assert (run.exists, run.submitted) == (True, False)
    assert open_run(run.path) == run
    run.submissions.touch()
    assert run.submitted


def test_attempts_are_in_order_of_their_numbers(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "r")
    assert run.attempt_dirs() == []
    for number in (2, 10, 1_000_000, 1):
        run.attempt(number).path.mkdir(parents=True)
    (run.attempts / "not-a-number").mkdir()
    assert [attempt.number for attempt in run.attempt_dirs()] == [1, 2, 10, 1_000_000]


def test_no_two_names_share_a_path(tmp_path: Path) -> None:
    """Two writers of one file would be a bug that nothing else shows."""
    for holder in (RunDir(tmp_path / "r"), AttemptDir(tmp_path / "r" / "attempts" / "000001")):
        names = [name for name in dir(holder) if not name.startswith("_")]
        paths = [value for name in names if isinstance(value := getattr(holder, name), Path)]
        assert len(paths) >= 7
        assert len(set(paths)) == len(paths)
        assert all(path.is_relative_to(holder.path) for path in paths)


def test_readers_see_the_old_text_or_the_new_one(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    texts = ['{"a": "' + character * 200_000 + '"}' for character in "xy"]
    write_atomically(path, texts[0])
    stop = threading.Event()

    def write() -> None:
        while not stop.is_set():
            for text in texts:
                write_atomically(path, text)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        seen = {path.read_text() for _ in range(200)}
    finally:
        stop.set()
        writer.join()
    assert seen <= set(texts)
    assert [entry.name for entry in tmp_path.iterdir()] == ["file.json"]


def test_a_write_that_fails_keeps_the_old_file_and_leaves_nothing(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "r")
    run.create(group_readable=False)
    with pytest.raises(ZslurmError, match="nonesuch/x: cannot be written: No such file"):
        run.write_text(run.path / "nonesuch" / "x", "text")
    run.write_text(run.script, "old")
    with pytest.raises(UnicodeEncodeError):
        run.write_text(run.script, "\ud800")
    assert run.script.read_text() == "old"
    assert not list(run.path.glob(".*"))


def test_json_that_is_not_an_object_is_none(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    assert read_json(path) is None
    for text in ("", "{", "[]", "5", "null"):
        path.write_text(text)
        assert read_json(path) is None
    path.write_bytes(b"\xff")
    assert read_json(path) is None
    path.write_text('{"a": 1}')
    assert read_json(path) == {"a": 1}


def test_a_directory_of_somebody_elses_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir(mode=0o755)
    (tmp_path / "thesis" / "chapter1.tex").touch()
    with pytest.raises(ConfigError, match="holds files that are no run's"):
        RunDir(tmp_path / "thesis").create(group_readable=False)
    assert (tmp_path / "thesis").stat().st_mode & 0o777 == 0o755
