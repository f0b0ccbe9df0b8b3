"""What went wrong, by the logs of a job: of any program, on any cluster."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from zslurm.aegis.logs import classify as logs
from zslurm.aegis.logs.classify import Diagnosis
from zslurm.aegis.logs.lines import chunks_of
from zslurm.checkpoint_tools.plain import StrPath
from zslurm.core.errors import NotFound


def classify(files: StrPath | Iterable[StrPath]) -> Diagnosis:
    """Find in the logs of one job what went wrong: `root`, `suspect`, `advice`, and all `lines` with a fault.

    Works on the output of ranks and of srun, dmesg, journalctl and other trainers' logs, also packed ones.

    Args:
        files: a log, or several of the same job, the batch script's first if their lines have no times.

    Raises:
        NotFound: there is no such file, or it is a directory.
        OSError: a file cannot be read.
    """
    paths = [files] if isinstance(files, str | os.PathLike) else list(files)
    return logs.classify((str(path), chunks_of(existing(path))) for path in paths)


def existing(path: StrPath) -> Path:
    """Return the path of a log that is there.

    Raises:
        NotFound: there is no such file, or it is a directory.
    """
    if not Path(path).exists():
        raise NotFound(f"{path}: no such file; name log files, or - for standard input")
    if Path(path).is_dir():
        raise NotFound(f"{path}: is a directory; name the files in it")
    return Path(path)
