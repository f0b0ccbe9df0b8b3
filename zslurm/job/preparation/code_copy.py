"""A copy of the code that a run was submitted with, in RUN_DIR/code, so that a requeue runs the same.

code/packages/  zslurm, train and what they import of ours, as this installation has them
code/work/      the git checkout around the working directory: tracked files, and untracked ones within limits

`run.snapshot: copy` asks for both, and the job runs from them. A container that takes the packages from the host
needs the first: its image may have another Python, for which the host's site-packages are not meant.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import zslurm
from zslurm.checkpoint_tools.plain import reason_of
from zslurm.checkpoint_tools.quantities import show_bytes
from zslurm.config.spec import RunSpec
from zslurm.core.errors import ZslurmError
from zslurm.run.run_dir import RunDir

LARGEST_UNTRACKED_FILE = 1 << 20
LARGEST_COPY = 200 << 20
# Untracked files that hold secrets more often than code.
_PRIVATE = (".env", ".netrc", ".pem", ".key", "id_rsa", "id_ed25519")


@dataclass(frozen=True)
class JobCode:
    """The code of a job: `path` for PYTHONPATH, and the directory to change into, if any."""

    path: str
    directory: str | None = None


def packages_dir(run: RunDir) -> Path:
    """Return the location of the copy of our package."""
    return run.code_copy / "packages"


def job_code(spec: RunSpec, run: RunDir) -> JobCode | None:
    """Return the place of the code for the job of a run; None if it runs what is installed at that time."""
    if spec.run.snapshot != "copy":
        return None
    packages, checkout = packages_dir(run), checkout_around(Path.cwd())
    if checkout is None:
        return JobCode(str(packages))
    work = run.code_copy / "work"
    return JobCode(f"{packages}:{work}", str(work / Path.cwd().relative_to(checkout)))


def checkout_around(directory: Path) -> Path | None:
    """Return the root of the git checkout that a directory is in."""
    return next((parent for parent in (directory, *directory.parents) if (parent / ".git").exists()), None)


@contextmanager
def copied_code(spec: RunSpec, run: RunDir) -> Iterator[list[str]]:
    """Make RUN_DIR/code for a submission, which keeps it; if that fails the older copy comes back.

    Yields:
        what was left out of the copy, a line each.

    Raises:
        ZslurmError: the file system refused, or the checkout is too large.
    """
    target, fresh, old = (run.code_copy, *(run.path / f".code-{os.getpid()}.{kind}" for kind in ("tmp", "old")))
    notes = _copy(spec, fresh)
    _move(target, old)
    try:
        _move(fresh, target)
        yield notes
    except BaseException:
        shutil.rmtree(target, ignore_errors=True)
        _move(old, target)
        raise
    finally:
        for leftover in (fresh, old):
            shutil.rmtree(leftover, ignore_errors=True)


def _move(source: Path, target: Path) -> None:
    try:
        if source.exists():
            source.rename(target)
    except OSError as error:
        raise ZslurmError(f"{target}: cannot be made: {error.strerror}") from error


def _copy(spec: RunSpec, fresh: Path) -> list[str]:
    """Copy what the run wants copied to `fresh`; nothing if it wants none."""
    container = spec.cluster.container
    copies_code = spec.run.snapshot == "copy"
    if not copies_code and (container is None or container.packages != "host"):
        return []
    notes: list[str] = []
    try:
        copy_package(fresh / "packages")
        checkout = checkout_around(Path.cwd()) if copies_code else None
        if checkout is not None:
            notes = _copy_checkout(checkout, fresh / "work", Path(spec.run.runs_dir))
            (fresh / "work" / Path.cwd().relative_to(checkout)).mkdir(parents=True, exist_ok=True)
    except (OSError, ZslurmError) as error:
        shutil.rmtree(fresh, ignore_errors=True)
        if isinstance(error, ZslurmError):
            raise
        raise ZslurmError(f"{fresh}: cannot copy the code: {reason_of(error)}") from error
    return notes


def copy_package(target: Path) -> None:
    """Copy our package into a directory, which is made.

    Its byte code goes along, and holds because the times of files are copied as well: else every rank compiles it.

    Raises:
        OSError: the file system refused.
    """
    shutil.copytree(Path(zslurm.__file__).parent, target / "zslurm")


def _copy_checkout(checkout: Path, target: Path, runs: Path) -> list[str]:
    """Copy the files that git knows or would add; returns what was left out."""
    left_out: list[str] = []
    total = 0
    for name, tracked in _files(checkout):
        source = checkout / name
        if runs in source.parents or not (source.is_file() or source.is_symlink()):
            continue
        size = source.lstat().st_size
        if not tracked and (size > LARGEST_UNTRACKED_FILE or name.endswith(_PRIVATE)):
            left_out.append(f"{name} ({show_bytes(size)})")
            continue
        total += size
        if total > LARGEST_COPY:
            raise ZslurmError(
                f"{checkout}: the checkout has more than {show_bytes(LARGEST_COPY)} to copy; "
                "let git ignore what is no code, or set run.snapshot: none"
            )
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, target / name, follow_symlinks=False)
    if not left_out:
        return []
    shown = ", ".join(left_out[:5]) + (f" and {len(left_out) - 5} more" if len(left_out) > 5 else "")
    return [
        f"run.snapshot: untracked files that are large or may hold secrets stay out of the copy: {shown}; "
        "git add those that the job needs"
    ]


def _files(checkout: Path) -> Iterator[tuple[str, bool]]:
    """Yield the files of a checkout, and whether git tracks them."""
    listings = (["--cached", "--recurse-submodules"], True), (["--others", "--exclude-standard"], False)
    for arguments, tracked in listings:
        command = ["git", "-C", str(checkout), "ls-files", "-z", *arguments]
        try:
            done = subprocess.run(command, capture_output=True, check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            reason = getattr(error, "stderr", b"").decode(errors="replace").strip() or reason_of(error)
            raise ZslurmError(f"{checkout}: git cannot list its files: {' '.join(reason.split())}") from error
        for name in done.stdout.split(b"\0"):
            if name:
                yield os.fsdecode(name), tracked
