"""A benchmark that starts a process which detaches itself, and waits."""

from __future__ import annotations

import subprocess
import time


def run() -> None:
    detached = subprocess.Popen(["sleep", "infinity"], start_new_session=True)
    print(detached.pid, flush=True)
    time.sleep(600)
