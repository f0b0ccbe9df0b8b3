"""A directory that appears complete or not at all, and whose making can be gone on with.

It is filled as .NAME.building-HOST-PID/corpus beside its final place and renamed when all its files are on stable
storage. What lies beside `corpus` is for the build that continues it. A failure or an interruption removes it, or
renames it to .NAME.unfinished where it holds something worth keeping; after a kill it stays as it is. Whoever
wants the same NAME next takes it over by renaming it to its own HOST-PID, which only one can.

A directory belongs to a living process: on this host one of that PID, on another host one that still gives signs
of life, a new modification time every BEAT seconds. Where the last one is not STALE seconds old yet, the next is
waited for, until it comes or the last is. Ages are measured against a file made just now in the same place, so
that clocks need not agree; STALE allows for the caching of attributes by network file systems.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from zslurm.checkpoint_tools.durable import sync
from zslurm.train.errors import DataError

BEAT = 10.0  # seconds
STALE = 180.0  # seconds
CORPUS = "corpus"


@contextmanager
def staging_directory(
    final: Path, worth_keeping: Callable[[Path], bool], note: Callable[[str], None]
) -> Iterator[Path]:
    """Yield a directory to fill, with a subdirectory CORPUS, new or taken over from one that was killed.

    CORPUS becomes `final` at the end of the body. On an exception the directory becomes `unfinished_path(final)`
    if it is worth keeping, and vanishes otherwise. The body sees to the durability of its files; the renames are
    made durable here. `note` is called when another host is waited for.

    Raises:
        DataError: another process, or this one, is filling one for `final`, or `final` was filled meanwhile.
    """
    prefix = f".{final.name}.building-"
    final.parent.mkdir(parents=True, exist_ok=True)
    staging = final.parent / f"{prefix}{socket.gethostname()}-{os.getpid()}"
    _take_over(final, prefix, staging, note)
    (staging / CORPUS).mkdir(exist_ok=True)
    ended = threading.Event()
    beat = threading.Thread(target=_give_signs_of_life, args=(staging, ended), daemon=True)
    beat.start()
    try:
        yield staging
        sync(staging / CORPUS)
        _publish(staging / CORPUS, final)
    except BaseException:
        if worth_keeping(staging):
            staging.rename(unfinished_path(final))
        raise
    finally:
        ended.set()
        beat.join()
        shutil.rmtree(staging, ignore_errors=True)


def unfinished_path(final: Path) -> Path:
    """Return where what is worth keeping waits to be gone on with."""
    return final.with_name(f".{final.name}.unfinished")


def remnants(final: Path) -> list[Path]:
    """Directories in which `final` is or was being built, sorted."""
    if not final.parent.is_dir():
        return []
    pattern = re.compile(rf"\.{re.escape(final.name)}\.(unfinished|building-.+-\d+)")
    return sorted(path for path in final.parent.iterdir() if pattern.fullmatch(path.name) and path.is_dir())


def _publish(corpus: Path, final: Path) -> None:
    """Rename, which succeeds only where `final` is absent or an empty directory."""
    try:
        corpus.rename(final)
    except OSError as error:
        if final.exists():
            raise DataError(f"{final}: was written by someone else meanwhile; nothing was changed") from error
        raise
    sync(final.parent)


def _take_over(final: Path, prefix: str, ours: Path, note: Callable[[str], None]) -> None:
    """Make `ours` of what a process that is gone left behind, or a new one; several leave one, the first."""
    found = remnants(final)
    for path in found:
        if path == unfinished_path(final):
            continue
        host, _, process = path.name.removeprefix(prefix).rpartition("-")
        if path == ours:
            raise DataError(f"{final}: is being built by this very process")
        if _is_alive(path, host, int(process), note):
            raise DataError(
                f"{final}: is being built by process {process} on {host}; wait for it to finish, or remove {path} "
                "if it does something else"
            )
    for path in found:
        if ours.exists():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with suppress(FileNotFoundError):  # somebody else was first
                path.rename(ours)
    ours.mkdir(exist_ok=True)


def _is_alive(staging: Path, host: str, process: int, note: Callable[[str], None]) -> bool:
    """Return whether the process that fills the directory still does, as far as this host can find out."""
    if host != socket.gethostname():
        return _gives_signs_of_life(staging, f"process {process} on {host}", note)
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _gives_signs_of_life(staging: Path, who: str, note: Callable[[str], None]) -> bool:
    """Watch a directory until it is touched again or has not been for STALE seconds."""
    told = False
    try:
        last = staging.stat().st_mtime
        while _age(staging) < STALE:
            if staging.stat().st_mtime != last:
                return True
            if not told:
                note(f"waiting up to {STALE:.0f} s for a sign of life of {who}, which was building this")
                told = True
            time.sleep(min(1.0, BEAT))
    except FileNotFoundError:  # it has just got done
        return True
    return False


def _age(path: Path) -> float:
    """Return the seconds since the last change, by the clock of the file system that it lies on."""
    probe = path.with_name(f"{path.name}-{os.getpid()}.now")
    probe.touch()
    try:
        return probe.stat().st_mtime - path.stat().st_mtime
    finally:
        probe.unlink()


def _give_signs_of_life(staging: Path, ended: threading.Event) -> None:
    """Touch the directory until the end, or until it cannot be found."""
    while not ended.wait(BEAT):
        try:
            os.utime(staging)
        except OSError:
            return
