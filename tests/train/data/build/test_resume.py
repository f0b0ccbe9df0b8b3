"""A build that is started again after a kill skips the bundles that are whole, and ends with the same bytes."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.train.data.corpora import contents, texts_of, write_rows, write_texts
from tests.waiting import wait_for
from zslurm.checkpoint_tools import Holder
from zslurm.train.data.build import source_reader, unfinished
from zslurm.train.data.build.build import BuildProgress, build
from zslurm.train.data.build.tokenizer import train_tokenizer
from zslurm.train.data.build.unfinished import lock_path, unfinished_path, whole_bundles
from zslurm.train.data.bundle import Bundle, Corpus
from zslurm.train.data.manifest import BuildSummary
from zslurm.train.errors import DataError

FORMATS = ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.parquet"]
SMALL = {"bundle_bytes": 300}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    train_tokenizer(["some words of text " * 20], 300).save(str(path))
    return path


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Files of each format, of some bundles in all; each record is a batch of its own."""
    monkeypatch.setattr(source_reader, "BATCH_BYTES", 1)
    numbers = iter(range(100))
    files = [
        write_rows(tmp_path / "in" / name, [{"text": f"document {next(numbers)} " * 3} for _ in range(6)])
        for name in FORMATS
    ]
    return [
        *files[:2],
        write_texts(tmp_path / "in" / "texts", a="one text", b=b"\xff", c="", d="another"),
        *files[2:],
    ]


def left_behind(out: Path) -> list[Path]:
    """Hidden files and directories of builds."""
    return sorted(out.parent.glob(f".{out.name}.*"))


def interrupted(sources: list[Path], out: Path, *, after: int, **options: Any) -> Path:
    """Begin a build and press Ctrl-C when `after` bundles are whole; what it leaves."""

    def interrupt(progress: BuildProgress) -> None:
        if whole_bundles(unfinished_path(out)) >= after:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build(sources, out, report=interrupt, **(SMALL | options))
    assert left_behind(out) == [unfinished_path(out)]
    return unfinished_path(out)


def in_a_fork(action: Callable[[], object]) -> int:
    """Run something in a child that shares nothing with us but the code; how it ended."""
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            action()
            os._exit(0)
        os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_build_killed_at_any_point_of_its_protocol_ends_the_same(
    sources: list[Path], tokenizer: Path, tmp_path: Path
) -> None:
    """Each thing that is made durable is followed by a kill, one after the other, until none is left."""
    build(sources, tmp_path / "whole" / "out", tokenizer=tokenizer, **SMALL)
    expected = contents(tmp_path / "whole" / "out")
    assert len(expected) > 6
    sync = os.fsync

    def killed_at(point: int) -> Callable[[], object]:
        remaining = iter(range(point, -1, -1))

        def sync_or_die(descriptor: int) -> None:
            sync(descriptor)
            if next(remaining) == 0:
                os.kill(os.getpid(), signal.SIGKILL)

        def action() -> BuildSummary:
            os.fsync = sync_or_die
            return build(sources, tmp_path / f"{point}" / "out", tokenizer=tokenizer, **SMALL)

        return action

    point = 0
    while in_a_fork(killed_at(point)) == -signal.SIGKILL:
        out = tmp_path / f"{point}" / "out"
        build(sources, out, tokenizer=tokenizer, **SMALL)
        assert contents(out) == expected, f"killed after {point} fsyncs"
        point += 1
    assert point > 20
    assert contents(tmp_path / f"{point}" / "out") == expected


def test_one_killed_again_and_again_gets_done(sources: list[Path], tokenizer: Path, tmp_path: Path) -> None:
    """Each attempt gets one bundle further: nothing that is whole is built twice."""
    expected = build(sources, tmp_path / "whole", tokenizer=tokenizer, **SMALL)
    notes: list[str] = []
    for whole in range(1, expected.bundles):
        interrupted(sources, tmp_path / "out", tokenizer=tokenizer, after=whole, note=notes.append)
    summary = build(sources, tmp_path / "out", tokenizer=tokenizer, note=notes.append, **SMALL)
    assert summary.continued == expected.bundles - 1
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert left_behind(tmp_path / "out") == []
    kept_in = tmp_path / ".out.unfinished"
    assert notes[0] == f"whole bundles are kept in {kept_in}: 1; the same command continues after them"
    assert notes[1] == "comparing 1 bundle of an unfinished build with the checksums"
    assert notes[2] == "continuing after the whole bundles: 1"


KILLED = """
import sys; from pathlib import Path
from zslurm.train.data.build import source_reader
from zslurm.train.data.build.build import build
source_reader.BATCH_BYTES = 1 << 12
build([Path(sys.argv[1])], Path(sys.argv[2]), vocab_size=400, bundle_bytes=1_500, workers=2)
"""


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.soak) for n in range(1, 30))])
def test_a_real_kill_at_a_random_time(tmp_path: Path, seed: int) -> None:
    """With several processes, of which none survives: once at any time, then soon after a bundle is finished."""
    generator = random.Random(seed)
    text = Path(os.__file__).read_text()[:16_000]
    rows = [{"text": text[start : start + 700]} for start in range(0, len(text), 500)]
    source, out = write_rows(tmp_path / generator.choice(FORMATS), rows), tmp_path / "out"
    command = [sys.executable, "-c", KILLED, str(source), str(out)]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        time.sleep(generator.uniform(0.2, 2))
        kill(process)
    while not out.exists():
        wanted = whole_bundles(unfinished_path(out)) + generator.randint(1, 12)
        with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
            wait_for(
                lambda: process.poll() is not None or whole_bundles(unfinished_path(out)) >= wanted,  # noqa: B023
                "bundles that are whole",
            )
            time.sleep(generator.uniform(0, 0.05))
            kill(process)
        assert process.returncode in (0, -signal.SIGKILL)
    build([source], tmp_path / "whole", vocab_size=400, bundle_bytes=1_500)
    assert contents(out) == contents(tmp_path / "whole")


def kill(process: subprocess.Popen[bytes]) -> None:
    """kill -9, with which its workers end too."""
    with contextlib.suppress(psutil.NoSuchProcess):
        children = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        wait_for(lambda: not any(map(lives, children)), "the workers to end")


def lives(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.status() != psutil.STATUS_ZOMBIE
    return False


def test_what_is_built_is_no_source(tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if it is among the sources: not what an earlier attempt left, and not the result."""
    monkeypatch.setattr(source_reader, "BATCH_BYTES", 1)
    write_rows(tmp_path / "a.jsonl", [{"text": f"document {number} " * 4} for number in range(12)])
    interrupted([tmp_path], tmp_path / "out", tokenizer=tokenizer, after=1)
    summary = build([tmp_path], tmp_path / "out", tokenizer=tokenizer, **SMALL)
    assert (summary.continued, summary.documents) == (1, 12)
    assert build([tmp_path], tmp_path / "out", tokenizer=tokenizer, **SMALL).reused


def test_the_lock_of_a_killed_build_is_no_source(
    tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_reader, "BATCH_BYTES", 1)
    write_texts(tmp_path, **{f"text{number}": f"document {number} " * 4 for number in range(12)})

    def die(progress: BuildProgress) -> None:
        if whole_bundles(unfinished_path(tmp_path / "out")) >= 1:
            os.kill(os.getpid(), signal.SIGKILL)

    assert in_a_fork(lambda: build([tmp_path], tmp_path / "out", tokenizer=tokenizer, report=die, **SMALL)) < 0
    assert lock_path(tmp_path / "out").exists()
    summary = build([tmp_path], tmp_path / "out", tokenizer=tokenizer, **SMALL)
    assert summary.continued >= 1
    assert summary.documents == 12


def test_a_killed_build_is_no_corpus(sources: list[Path], tokenizer: Path, tmp_path: Path) -> None:
    left = interrupted(sources, tmp_path / "out", tokenizer=tokenizer, after=1)
    assert left == tmp_path / ".out.unfinished"
    with pytest.raises(DataError, match="no such file"):
        Corpus.open(tmp_path / "out")


def test_a_faulty_line_can_be_corrected(tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bundles of the files before it are kept, and those made of its own file are made again."""
    monkeypatch.setattr(source_reader, "BATCH_BYTES", 1)
    rows = [{"text": f"document {number} " * 4} for number in range(12)]
    good, bad = (write_rows(tmp_path / f"{name}.jsonl", rows) for name in "ab")
    whole = bad.read_text()
    bad.write_text(whole + "{\n")
    notes: list[str] = []
    with pytest.raises(DataError, match=r"b\.jsonl:13: is not JSON"):
        build([good, bad], tmp_path / "out", tokenizer=tokenizer, note=notes.append, **SMALL)
    kept = int(notes[0].split(": ")[1].split(";")[0])
    bad.write_text(whole + json.dumps({"text": "corrected"}) + "\n")
    summary = build([good, bad], tmp_path / "out", tokenizer=tokenizer, **SMALL)
    assert 0 < summary.continued < kept
    build([good, bad], tmp_path / "whole", tokenizer=tokenizer, **SMALL)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert texts_of(Corpus.open(tmp_path / "out"))[-1] == "corrected"


def test_bundles_of_other_settings_are_not_thrown_away_unasked(
    sources: list[Path], tokenizer: Path, tmp_path: Path
) -> None:
    left = interrupted(sources, tmp_path / "out", tokenizer=tokenizer, after=2)
    before = {path: path.stat().st_mtime_ns for path in left.rglob("*")}
    with pytest.raises(DataError, match=r"\.out\.unfinished: .* with other bundle_bytes, end_token; give the"):
        build(sources, tmp_path / "out", tokenizer=tokenizer, bundle_bytes=400, end_token="<bos>")
    assert {path: path.stat().st_mtime_ns for path in left.rglob("*")} == before
    shutil.rmtree(left)
    assert build(sources, tmp_path / "out", tokenizer=tokenizer, **SMALL).continued == 0


def test_bundles_of_sources_that_have_changed_are_built_anew(
    sources: list[Path], tokenizer: Path, tmp_path: Path
) -> None:
    interrupted(sources, tmp_path / "out", tokenizer=tokenizer, after=2)
    write_rows(sources[0], [{"text": "another document"}])
    assert build(sources, tmp_path / "out", tokenizer=tokenizer, **SMALL).continued == 0
    assert texts_of(Corpus.open(tmp_path / "out"))[0] == "another document"


def test_the_file_that_ended_a_bundle_counts_among_its_sources(tokenizer: Path, tmp_path: Path) -> None:
    """Had its record been as small before, the bundle would have held it, too."""
    source = write_texts(tmp_path / "in", a="x1 " * 40, b="y2 " * 4000, c="z3 " * 4000)
    settings = {"tokenizer": tokenizer, "bundle_bytes": 3000}
    interrupted([source], tmp_path / "out", after=1, **settings)
    write_texts(tmp_path / "in", b="y2 " * 20)
    build([source], tmp_path / "out", **settings)
    build([source], tmp_path / "whole", **settings)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


@pytest.mark.parametrize("damage", ["truncated", "flipped", "gone", "tokenizer", "no tokenizer", "record"])
def test_a_damaged_bundle_and_those_after_it_are_built_anew(
    sources: list[Path], tokenizer: Path, tmp_path: Path, damage: str
) -> None:
    """A machine that lost power may have lost the end of a file; a disk may have flipped a bit."""
    left = interrupted(sources, tmp_path / "out", tokenizer=tokenizer, after=3)
    bundle, kept = left / "corpus" / "part-00001.h5", 1
    if damage == "truncated":
        os.truncate(bundle, bundle.stat().st_size - 1)
    elif damage == "flipped":
        content = bytearray(bundle.read_bytes())
        content[Bundle.open(bundle).ranges["tokens"].offset] ^= 1
        bundle.write_bytes(content)
    elif damage == "gone":
        bundle.unlink()
    elif damage == "tokenizer":
        (left / "corpus" / "tokenizer.json").write_text("{}")
        kept = 0
    elif damage == "no tokenizer":
        (left / "corpus" / "tokenizer.json").unlink()
        kept = 0
    else:
        os.truncate(left / "part-00001.json", 5)
    assert build(sources, tmp_path / "out", tokenizer=tokenizer, **SMALL).continued == kept
    build(sources, tmp_path / "whole", tokenizer=tokenizer, **SMALL)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert left_behind(tmp_path / "out") == []


def test_a_trained_tokenizer_is_kept_too(sources: list[Path], tmp_path: Path) -> None:
    interrupted(sources, tmp_path / "out", vocab_size=300, after=1)
    stages: list[str] = []
    build(sources, tmp_path / "out", vocab_size=300, report=lambda p: stages.append(p.stage), **SMALL)
    assert set(stages) == {"tokens"}
    build(sources, tmp_path / "whole", vocab_size=300, **SMALL)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


ELSEWHERE = Holder("elsewhere", 17, 1, "", 0.0, "n")


def locked_elsewhere(out: Path) -> Path:
    lock = out.with_name(f".{out.name}.building")
    lock.write_text(json.dumps(asdict(ELSEWHERE)))
    return lock


def test_another_host_continues_when_the_first_gives_no_sign_of_life(
    sources: list[Path], tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unfinished, "BEAT", 0.01)
    monkeypatch.setattr(unfinished, "STALE", 1.0)
    interrupted(sources, tmp_path / "out", tokenizer=tokenizer, after=2)
    locked_elsewhere(tmp_path / "out")
    notes: list[str] = []
    assert build(sources, tmp_path / "out", tokenizer=tokenizer, note=notes.append, **SMALL).continued == 2
    assert notes[0].startswith("waiting up to 1 s for a sign of life of process 17 on elsewhere, since ")
    assert left_behind(tmp_path / "out") == []


def test_a_build_that_lives_on_another_host_is_left_alone(
    sources: list[Path], tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unfinished, "BEAT", 0.01)
    left = interrupted(sources, tmp_path / "out", tokenizer=tokenizer, after=2)
    lock = locked_elsewhere(tmp_path / "out")

    def live(note: str) -> None:
        os.utime(lock, (time.time() + 5, time.time() + 5))

    with pytest.raises(DataError, match=r"out is in use by process 17 on elsewhere.*remove .*\.out\.building"):
        build(sources, tmp_path / "out", tokenizer=tokenizer, note=live, **SMALL)
    assert left_behind(tmp_path / "out") == [lock, left]


def test_a_process_that_is_replacing_a_dead_lock_is_alive(
    sources: list[Path], tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its second lock is fresh, however old the lock is that it replaces."""
    monkeypatch.setattr(unfinished, "BEAT", 0.01)
    lock = locked_elsewhere(tmp_path / "out")
    os.utime(lock, (0, 0))
    other = replace(ELSEWHERE, host="third", nonce="another")
    second = lock.with_name(f"{lock.name}.over-{ELSEWHERE.nonce}")
    second.write_text(json.dumps(asdict(other)))

    def live(note: str) -> None:
        if "third" in note:
            os.utime(second, (time.time() + 5, time.time() + 5))

    with pytest.raises(DataError, match="in use by process 17 on third"):
        build(sources, tmp_path / "out", tokenizer=tokenizer, note=live, **SMALL)


def test_a_build_gives_signs_of_life(
    sources: list[Path], tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unfinished, "BEAT", 0.01)
    lock = tmp_path / ".out.building"

    def wait_for_a_beat(progress: BuildProgress) -> None:
        os.utime(lock, (0, 0))
        wait_for(lambda: lock.stat().st_mtime > 0, "a sign of life")

    build(sources, tmp_path / "out", tokenizer=tokenizer, report=wait_for_a_beat)


def test_a_living_process_keeps_its_unfinished_build(sources: list[Path], tokenizer: Path, tmp_path: Path) -> None:
    refused = []

    def build_beside(progress: BuildProgress) -> None:
        with pytest.raises(DataError, match=f"out is in use by process {os.getpid()} on "):
            build(sources, tmp_path / "out", tokenizer=tokenizer)
        refused.append(progress)

    build(sources, tmp_path / "out", tokenizer=tokenizer, report=build_beside)
    assert refused
    assert left_behind(tmp_path / "out") == []


LIMITED = """
import resource, sys; from pathlib import Path
from zslurm.train.data.build.build import build
from zslurm.train.errors import BuildFailed
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[4]), resource.RLIM_INFINITY))
try:
    build([Path(sys.argv[1])], Path(sys.argv[2]), tokenizer=Path(sys.argv[3]))
except BuildFailed as error:
    sys.exit(str(error))
"""


@pytest.mark.parametrize("limit", [90_000, 20_000])
def test_no_room_is_one_line_and_leaves_nothing(tmp_path: Path, tokenizer: Path, limit: int) -> None:
    """A file that may not grow further acts as a full disk: in the spool, and in the HDF5 file."""
    (tmp_path / "a.txt").write_text("ab" * 22_000)
    command = [sys.executable, "-c", LIMITED, tmp_path / "a.txt", tmp_path / "out", tokenizer, str(limit)]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    assert done.stderr.startswith(f"{tmp_path}/out: cannot be written: ")
    assert "File too large" in done.stderr
    assert done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == [tmp_path / "a.txt"]
