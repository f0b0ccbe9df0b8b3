"""Copy the Python environment to the nodes' own disks, so that a thousand ranks do not import from one NFS server.

One archive of the environment is in the run directory; sbcast hands it from node to node, and one task on each
node unpacks it. The copy carries the job's id, and goes with the job. A virtual environment still needs its base
Python if it was; a conda environment is copied whole.

`python -m zslurm.job.preparation.staged_environment unpack|remove DIRECTORY MARK` is what runs on the nodes.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from zslurm.core.errors import ZslurmError
from zslurm.run.run_dir import RunDir
from zslurm.slurm.client import SlurmClient
from zslurm.slurm.hostlist import by_reason
from zslurm.slurm.on_nodes.run_on_nodes import answer, run_on_nodes

_TIMEOUT_S = 3600.0


def stage(place: str, run: RunDir, job_id: str, nodes: Sequence[str], environ: Mapping[str, str]) -> str:
    """Put the environment of this Python on these nodes of a job; returns its location there.

    Raises:
        ZslurmError: it cannot be packed, sent or unpacked; each node that failed is named.
    """
    archive = environment_archive(run)
    target = _target(place, job_id)
    undelivered: ZslurmError | None = None
    try:
        SlurmClient(environ, timeout_s=_TIMEOUT_S).broadcast(job_id, str(archive), f"{target}.tar")
    except ZslurmError as error:  # perhaps only to a node of the job that is not wanted any more
        undelivered = error
    try:
        _on_nodes(nodes, "unpack", target, archive.stem, job_id, environ)
    except ZslurmError:
        if undelivered is None:
            raise
        raise ZslurmError(
            f"cluster.stage_env: cannot copy the Python environment to {target}.tar: {undelivered}"
        ) from undelivered
    return staged_environment(place, job_id)


def staged_environment(place: str, job_id: str) -> str:
    """Return the path of this Python's environment on the nodes, once `stage` has copied it."""
    return f"{_target(place, job_id)}/{Path(sys.prefix).name}"


def unstage(place: str, job_id: str, nodes: Sequence[str], environ: Mapping[str, str]) -> None:
    """Remove it from these nodes of a job.

    Raises:
        ZslurmError: a node could not.
    """
    _on_nodes(nodes, "remove", _target(place, job_id), "-", job_id, environ)


def _target(place: str, job_id: str) -> str:
    return f"{place}/zslurm-env-{os.getuid()}-{job_id}"


def _on_nodes(
    nodes: Sequence[str], action: str, target: str, mark: str, job_id: str, environ: Mapping[str, str]
) -> None:
    answers = run_on_nodes(
        "zslurm.job.preparation.staged_environment", action, target, mark, nodes=nodes, job_id=job_id,
        timeout_s=_TIMEOUT_S, environ=environ,
    )  # fmt: skip
    faults = by_reason((str(fault), node) for node, a in answers.items() if (fault := a.error or a.value))
    if faults:
        listed = "; ".join(f"{reason} (on {names})" for reason, names in faults.items())
        raise ZslurmError(f"cluster.stage_env: cannot {action} the Python environment in {target}: {listed}")


def environment_archive(run: RunDir) -> Path:
    """Return the archive of this environment; made if there is none yet, or packages were installed since."""
    prefix = Path(sys.prefix)
    archive = run.path / f"env-{_fingerprint(prefix)}.tar"
    if archive.exists():
        return archive
    temporary = archive.with_name(f".{archive.name}.{os.getpid()}.tmp")
    command = ["tar", "--create", f"--file={temporary}", f"--directory={prefix.parent}", prefix.name]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
        for old in run.path.glob("env-*.tar"):
            old.unlink(missing_ok=True)
        temporary.replace(archive)
    except (OSError, subprocess.CalledProcessError) as error:
        temporary.unlink(missing_ok=True)
        raise ZslurmError(f"{archive}: cannot pack {prefix}: {_reason(error)}") from error
    return archive


def _fingerprint(prefix: Path) -> str:
    """Return what changes when a package comes, goes or is replaced; without a look at each of its files."""
    digest = hashlib.sha256(str(prefix).encode())
    for folder in sorted(prefix.glob("lib/python*/site-packages")):
        for entry in sorted(folder.iterdir()):
            digest.update(f"{entry.name} {entry.stat().st_mtime_ns}\n".encode())
    return digest.hexdigest()[:16]


def unpack(target: Path, mark: str) -> None:
    """Unpack TARGET.tar into TARGET, once per node.

    Raises:
        OSError: the disk is not writable.
        subprocess.CalledProcessError: tar failed: the disk is full, or the archive damaged.
    """
    archive = target.with_name(target.name + ".tar")
    done = target / f".{mark}"
    with target.with_name(target.name + ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if done.exists():
            return
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(mode=0o700)
        command = ["tar", "--extract", f"--file={archive}", f"--directory={target}"]
        subprocess.run(command, check=True, capture_output=True, text=True)
        done.touch()
        archive.unlink()


def remove(target: Path) -> None:
    """Remove all that `unpack` left, and what it did not come to."""
    shutil.rmtree(target, ignore_errors=True)
    for suffix in (".tar", ".lock"):
        with contextlib.suppress(OSError):
            target.with_name(target.name + suffix).unlink(missing_ok=True)


def _reason(error: OSError | subprocess.CalledProcessError) -> str:
    """Return what tar printed, or the error of the system, in one line."""
    return " ".join(str(getattr(error, "stderr", None) or error).split())


def main(argv: list[str]) -> None:
    """Answer `run_on_nodes`: nothing if it went well, else what went wrong."""
    action, target, mark = argv
    try:
        remove(Path(target)) if action == "remove" else unpack(Path(target), mark)
    except (OSError, subprocess.CalledProcessError) as error:
        answer(_reason(error))
    else:
        answer("")


if __name__ == "__main__":
    main(sys.argv[1:])
