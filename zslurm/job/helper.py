"""`python -m zslurm.job.helper RUN_DIR JOB SOFTWARE`: holds the nodes of a helper job until its run is over.

A helper job brings nodes into a run that has lost some of its own. This process is its batch script: it reports
the nodes to the run's supervisor, by a file in the run's directory, and does nothing else. The supervisor starts
its agents and ranks in steps of this job, and cancels the job at the end. If the run is over in JOB, or its
supervisor has not renewed its lease for `LOST_S` (its node is gone, say), this job ends by itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import zslurm
from zslurm.checkpoint_tools.checksum import crc32
from zslurm.core.errors import Exit
from zslurm.core.files import write_atomically
from zslurm.run import supervisor_lease
from zslurm.run.run_dir import RunDir
from zslurm.slurm.environment import job_nodes, own_job_id

LOST_S = 60.0
"""Seconds without a renewal of the supervisor's lease after which a helper job ends: a supervisor that died is
started again in a few seconds."""
_LOOK_S = 2.0
_SPOKEN = ("aegis/protocol.py", "train/recovery/generation.py", "job/helper.py")
"""Files, in the package, of what supervisor, agents and ranks say to each other."""


def software() -> str:
    """Return the version of this software with a checksum of its protocols, equal on all nodes of a run."""
    package, crc = Path(zslurm.__file__).parent, 0
    for name in _SPOKEN:
        crc = crc32((package / name).read_bytes(), crc)
    return f"{zslurm.__version__}-{crc:08x}"


def why_over(run: RunDir, job_id: str, renewed_s: float) -> str:
    """Return why a helper job of a run's job has nothing left to do; empty if it has.

    Args:
        run: the run.
        job_id: the job of the run.
        renewed_s: seconds since the supervisor's lease was seen to change.
    """
    if run.job_exit(job_id).exists():
        return f"the run is over in job {job_id}"
    if renewed_s >= LOST_S:
        return f"the run's supervisor cannot be reached for {renewed_s:.0f} s"
    return ""


def hold(
    run: RunDir,
    job_id: str,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> str:
    """Return, once this job has nothing left to do, why."""
    seen, changed = -1, clock()
    while True:
        with contextlib.suppress(OSError):  # the file system does not answer: nothing is renewed
            lease = supervisor_lease.read(run)
            if lease is not None and lease.renewed != seen:
                seen, changed = lease.renewed, clock()
        if why := why_over(run, job_id, clock() - changed):
            return why
        sleep(_LOOK_S)


def main(argv: list[str], environ: Mapping[str, str] = os.environ) -> int:
    """Report this job's nodes, and hold them; returns the exit code."""
    if len(argv) != 3:
        print("usage: python -m zslurm.job.helper RUN_DIR JOB SOFTWARE", file=sys.stderr)
        return Exit.USAGE
    run, job_id, wanted = RunDir(Path(argv[0])), argv[1], argv[2]
    why = why_over(run, job_id, 0.0)
    if not why and software() != wanted:
        why = f"this node has another version of zslurm: {software()}, and the run {wanted}"
    report = {"nodes": job_nodes(environ), "reason": why}
    write_atomically(run.helper_report(own_job_id(environ) or "0"), json.dumps(report) + "\n")
    if not why:
        print(f"helper job of job {job_id}: its nodes are {', '.join(job_nodes(environ))}", flush=True)
        why = hold(run, job_id)
    print(f"helper job of job {job_id}: over: {why}", flush=True)
    return Exit.DONE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
