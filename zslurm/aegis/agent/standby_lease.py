"""The lease under which a standby supervisor acts: one agent at a time, and the next one if its holder died.

It is a file of the run directory that only one agent can create. It holds for one start of the job, so leases of
earlier starts mean nothing. Its holder renews it; if it is not renewed, its holder died as well, and the next
agent makes the next lease.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from zslurm.core.files import read_json
from zslurm.run.run_dir import RunDir

_RENEW_S = 5.0
_STALE_S = 60.0


def acquire(
    run: RunDir,
    job_id: str,
    restart: int,
    node: str,
    *,
    is_needed: Callable[[], bool],
    sleep: Callable[[float], None],
) -> Path | None:
    """Return the first lease that can be had; None if another agent holds one and is alive.

    Args:
        run: the run.
        job_id: of the job.
        restart: how often Slurm has requeued it.
        node: this one.
        is_needed: whether there is still something to do.
        sleep: waits.

    Raises:
        OSError: the run directory cannot be written.
    """
    body = json.dumps({"job_id": job_id, "restart": restart, "node": node, "time": time.time()})
    for number in itertools.count(1):
        lease = run.path / f"deputy-{job_id}-{restart}-{number}.json"
        if lease.exists() and not _is_abandoned(lease, is_needed, sleep):
            return None
        with contextlib.suppress(FileExistsError):
            descriptor = os.open(lease, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(body + "\n")
            return lease
    raise AssertionError("leases do not end")


def _is_abandoned(lease: Path, is_needed: Callable[[], bool], sleep: Callable[[float], None]) -> bool:
    """Return whether no agent renews a lease: watched for a while, as the clocks of two nodes may differ."""
    first = _renewed_at(lease)
    for _ in range(round(_STALE_S / _RENEW_S)):
        if first is None or (read_json(lease) or {}).get("impossible"):
            return False
        sleep(_RENEW_S)
        if _renewed_at(lease) != first or not is_needed():
            return False
    return True


def _renewed_at(lease: Path) -> int | None:
    try:
        return lease.stat().st_mtime_ns
    except OSError:
        return None


@contextlib.contextmanager
def renewed_meanwhile(lease: Path) -> Iterator[None]:
    """Renew the lease while the block runs, however long Slurm takes."""
    over = threading.Event()

    def renew() -> None:
        while not over.wait(_RENEW_S):
            with contextlib.suppress(OSError):
                os.utime(lease)

    thread = threading.Thread(target=renew, daemon=True, name="standby-lease")
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
