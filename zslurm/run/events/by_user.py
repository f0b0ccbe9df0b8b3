"""What users and their commands do to a run: rows of submissions.jsonl, most of them of events/people.py."""

from __future__ import annotations

import getpass
import time

from zslurm.core.errors import ZslurmError
from zslurm.run.events.event import Event
from zslurm.run.run_dir import RunDir
from zslurm.train.jsonl import JsonLinesWriter


def record_by_user(run: RunDir, event: Event) -> None:
    """Append what the user of this process did to submissions.jsonl.

    Raises:
        ZslurmError: the file cannot be written.
    """
    try:
        with JsonLinesWriter(run.submissions) as lines:
            lines.append({"time": time.time(), "action": event.NAME, "user": getpass.getuser(), **event.fields()})
    except OSError as error:
        raise ZslurmError(f"{run.submissions}: cannot be written: {error.strerror}") from error
