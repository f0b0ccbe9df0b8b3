"""What people do to a run: rows of submissions.jsonl, whose kinds are the classes of events/people.py."""

from __future__ import annotations

import getpass
import time
from typing import Any

from zslurm.core.errors import ZslurmError
from zslurm.run.run_dir import RunDir
from zslurm.train.jsonl import JsonLinesWriter


def record_by_user(run: RunDir, action: str, **fields: Any) -> None:
    """Append what the user of this process did to submissions.jsonl.

    Raises:
        ZslurmError: the file cannot be written.
    """
    try:
        with JsonLinesWriter(run.submissions) as lines:
            lines.append({"time": time.time(), "action": action, "user": getpass.getuser(), **fields})
    except OSError as error:
        raise ZslurmError(f"{run.submissions}: cannot be written: {error.strerror}") from error
