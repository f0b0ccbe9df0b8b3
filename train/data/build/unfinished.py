"""A build that is not finished: the directory that it fills, and its bundles that are whole.

    .NAME.building                a lock: which process builds
    .NAME.unfinished/             renamed or removed when the build ends
      corpus/                     becomes NAME, by one rename, when all its files are on stable storage
        tokenizer.json
        part-00000.h5             a bundle, called so until it is known how many there are
      part-00000.json             marks this bundle as whole: what it was built of, and the start of the next

A failure or a kill leaves the directory if a bundle in it is whole. The next build of the same NAME keeps the
bundles from the first on that are whole, were built with its settings of files that are unchanged, and agree with
their checksums; it builds the others again.

The process that builds touches its lock every BEAT seconds. One on this host is known by its number and start; one
on another host counts as dead STALE seconds after its last touch. Ages are measured against a file made just now
in the same place, so that clocks need not agree; STALE allows for the caching of attributes by network file
systems.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Any

from zslurm.checkpoint_tools import Holder, InUse, Lock
from zslurm.checkpoint_tools.durable import replace_durably, sync
from zslurm.checkpoint_tools.plain import load_json
from zslurm.train.data.build.bundle_writer import part_path
from zslurm.train.data.build.encode import Tally
from zslurm.train.data.build.source_reader import START, Cursor
from zslurm.train.data.build.sources import SourceFile
from zslurm.train.data.schema import TOKENIZER_FILE
from zslurm.train.data.verify import verify
from zslurm.train.errors import DataError

BEAT = 10.0  # seconds
STALE = 180.0  # seconds
CORPUS = "corpus"


@dataclass(frozen=True)
class WholeBundle:
    """The content of part-NNNNN.json.

    Attributes:
        settings: of the build.
        files_sha256: of the names, sizes and times of the files that the bundle was built of.
        cursor: the start of the next bundle.
        tally: what was counted up to there.
    """

    settings: dict[str, Any]
    files_sha256: str
    cursor: Cursor
    tally: Tally

    def write(self, staging: Path, part: int) -> None:
        """Record that bundle `part` (from 0) is whole, durably."""
        path = staging / f"part-{part:05d}.json"
        new = path.with_suffix(".new")
        new.write_text(json.dumps(asdict(self)))
        replace_durably(new, path)

    @classmethod
    def read(cls, staging: Path, part: int) -> WholeBundle | None:
        """Return what was recorded of bundle `part`; None if it is not whole."""
        try:
            row = load_json((staging / f"part-{part:05d}.json").read_bytes())
            return cls(row["settings"], row["files_sha256"], Cursor(*row["cursor"]), Tally(**row["tally"]))
        except (OSError, ValueError, KeyError, TypeError):
            return None


@contextmanager
def staging_directory(final: Path, note: Callable[[str], None]) -> Iterator[Path]:
    """Yield a directory to fill, with a subdirectory CORPUS, which becomes `final` at the end of the body.

    It may hold what an earlier build left. The body makes its files durable; the rename is made durable here.
    `note` is called when another host is waited for, and when whole bundles are left behind.

    Raises:
        DataError: another process, or this one, builds `final`, or `final` was filled in between.
        OSError: the file system refused.
    """
    staging, path = unfinished_path(final), lock_path(final)
    final.parent.mkdir(parents=True, exist_ok=True)
    try:
        lock = Lock.acquire(path, str(final), is_gone=lambda holder: _is_silent(path, holder, note))
    except InUse as error:
        raise DataError(str(error)) from error
    with lock, _signs_of_life(path):
        (staging / CORPUS).mkdir(parents=True, exist_ok=True)
        try:
            yield staging
            _publish(staging / CORPUS, final)
        except BaseException:
            if whole_count := whole_bundles(staging):
                note(f"whole bundles are kept in {staging}: {whole_count}; the same command continues after them")
            else:
                shutil.rmtree(staging, ignore_errors=True)
            raise
        shutil.rmtree(staging, ignore_errors=True)


def unfinished_path(final: Path) -> Path:
    """Return the directory in which `final` is built."""
    return final.with_name(f".{final.name}.unfinished")


def lock_path(final: Path) -> Path:
    """Return the lock that the process which builds `final` holds."""
    return final.with_name(f".{final.name}.building")


def whole_bundles(staging: Path) -> int:
    """Return how many bundles are recorded as whole."""
    return next(number for number in count() if WholeBundle.read(staging, number) is None)


def bundles_to_keep(
    staging: Path, settings: dict[str, Any], files: Sequence[SourceFile], workers: int
) -> list[WholeBundle]:
    """Return the first bundles that a build with these settings keeps; their bytes are read, by `workers` threads.

    Raises:
        DataError: there are whole bundles of a build with other settings, which are not thrown away unasked.
    """
    kept: list[WholeBundle] = []
    start = START
    for number in count():
        bundle = WholeBundle.read(staging, number)
        if bundle is None:
            return kept
        if changed := sorted(
            k for k in settings.keys() | bundle.settings if settings.get(k) != bundle.settings.get(k)
        ):
            raise DataError(
                f"{staging}: holds whole bundles ({whole_bundles(staging)}) of an unfinished build with other "
                f"{', '.join(changed)}; give the command that began it to continue, or remove it to begin again"
            )
        path = part_path(staging / CORPUS, number)
        if bundle.files_sha256 != files_sha256(files, start, bundle.cursor):
            return kept
        if not path.exists() or not path.with_name(TOKENIZER_FILE).exists() or verify(path, workers).damages:
            return kept
        kept.append(bundle)
        start = bundle.cursor
    raise AssertionError  # count() does not end


def files_sha256(files: Sequence[SourceFile], start: Cursor, end: Cursor) -> str:
    """Return a hash of the names, sizes and times of the files from one cursor to another, in hex.

    The file at `end` counts too: a bundle ends there because the record there did not fit.
    """
    digest = hashlib.sha256()
    for file in files[start.file : end.file + 1]:
        digest.update(b"%s\0%d %d\n" % (os.fsencode(file.path.absolute()), file.size, file.mtime_ns))
    return digest.hexdigest()


def _publish(corpus: Path, final: Path) -> None:
    """Rename, which succeeds only if `final` is absent or an empty directory."""
    sync(corpus)
    try:
        corpus.rename(final)
    except OSError as error:
        if final.exists():
            raise DataError(f"{final}: another program wrote it meanwhile; nothing was changed") from error
        raise
    sync(final.parent)


@contextmanager
def _signs_of_life(lock: Path) -> Iterator[None]:
    """Touch the lock every BEAT seconds, in a thread."""
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(BEAT):
            with suppress(OSError):
                os.utime(lock)

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _is_silent(lock: Path, holder: Holder, note: Callable[[str], None]) -> bool:
    """Watch the lock of a process on another host until it is touched again or has not been for STALE seconds.

    The process may hold the lock itself, or the second lock, on replacing it (checkpoint_tools/lock.py).
    """
    held = next((path for path in _with_second_locks(lock) if Holder.of_lock(path) == holder), None)
    if held is None:  # it has just ended, or has just replaced the lock
        return False
    lock = held
    try:
        last = lock.stat().st_mtime
        if _age(lock) < STALE:
            note(f"waiting up to {STALE:.0f} s for a sign of life of {holder}, which was building this")
        while _age(lock) < STALE:
            if lock.stat().st_mtime != last:
                return False
            time.sleep(min(1.0, BEAT))
    except FileNotFoundError:  # it has just ended, and the lock is free
        return False
    return True


def _with_second_locks(lock: Path) -> list[Path]:
    names = sorted(path.name for path in lock.parent.iterdir())
    return [lock, *(lock.with_name(name) for name in names if name.startswith(f"{lock.name}.over-"))]


def _age(path: Path) -> float:
    """Return the seconds since the last change, by the clock of the file system."""
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f"{path.name}.") as now:
        return os.fstat(now.fileno()).st_mtime - path.stat().st_mtime
