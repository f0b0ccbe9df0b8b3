"""Export a checkpoint and run the user's evaluation.command on it: a process next to the training.

It leaves the export in RUN_DIR/exports/step-00000400, how it went in step-00000400.json, and the output of all in
step-00000400.log. It ends with the trainer (the kernel signals it: PR_SET_PDEATHSIG), and ends the user's command
with it. No torch here; `train.telemetry.evaluation_command` starts it.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

from zslurm.checkpoint_tools.durable import replace_durably
from zslurm.checkpoint_tools.plain import reason_of
from zslurm.train.niceness import lower_process

GRACE_S = 5.0
"""Seconds that the user's command has to end after SIGTERM."""
_PR_SET_PDEATHSIG = 1


class ExportPaths:
    """The files of one step's export."""

    def __init__(self, run_dir: Path, step: int) -> None:
        """Name them; nothing is made."""
        self.root = run_dir / "exports"
        self.model = self.root / f"step-{step:08d}"
        self.log = self.root / f"step-{step:08d}.log"
        self.result = self.root / f"step-{step:08d}.json"


def main(argv: list[str]) -> int:
    """Run as `python -m zslurm.train.evaluation.command RUN_DIR STEP CHECKPOINT KEEP PARENT WORD...`."""
    run_dir, step, checkpoint, keep, parent, *words = argv
    paths = ExportPaths(Path(run_dir), int(step))
    _die_with(int(parent))
    lower_process()
    result: dict[str, Any] = {"outcome": "failed"}
    started = time.monotonic()
    try:
        _export(Path(checkpoint), paths)
        _remove_older(paths, int(keep))
        result["export_seconds"] = time.monotonic() - started
        started = time.monotonic()
        code = _run(words)
        result["seconds"] = time.monotonic() - started
        result["exit_code"] = code
        if code == 0:
            result["outcome"] = "done"
        else:
            result["reason"] = f"exit code {code}" if code > 0 else f"killed by signal {-code}"
    except Exception as error:
        result["reason"] = reason_of(error)
        print(f"evaluation.command: {result['reason']}", file=sys.stderr, flush=True)
    temporary = paths.result.with_suffix(".tmp")
    temporary.write_text(json.dumps(result) + "\n")
    replace_durably(temporary, paths.result)
    return 0


def _die_with(parent: int) -> None:
    """End, with all that was started here, when the trainer ends, however it ends."""

    def end(_signum: int, _frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.killpg(0, signal.SIGTERM)
        deadline = time.monotonic() + GRACE_S
        with contextlib.suppress(ChildProcessError):
            while time.monotonic() < deadline:
                os.waitpid(-1, os.WNOHANG)
                time.sleep(0.05)
        os.killpg(0, signal.SIGKILL)

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # the run is asked to save and stop; Slurm signals all processes
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it ended before the kernel was asked
        sys.exit(1)


def _export(checkpoint: Path, paths: ExportPaths) -> None:
    from zslurm.train.errors import HubError
    from zslurm.train.hub import export, open_weights

    # An earlier attempt may have come to this step, or was killed while it exported.
    for leftover in (paths.model, *paths.root.glob(".step-*.tmp")):
        shutil.rmtree(leftover, ignore_errors=True)
    with open_weights(checkpoint) as weights:
        try:
            tokenizer = weights.tokenizer()
        except HubError as error:
            print(f"exported without a tokenizer: {error}", flush=True)
            tokenizer = None
        done = export(weights, paths.model, tokenizer=tokenizer)
    print(f"exported {checkpoint} to {done.path}" + (f"; note: {done.note}" if done.note else ""), flush=True)


def _remove_older(paths: ExportPaths, keep: int) -> None:
    exports = sorted(path for path in paths.root.glob("step-*") if path.is_dir() and path != paths.model)
    for path in exports[: max(0, len(exports) + 1 - keep)]:
        shutil.rmtree(path, ignore_errors=True)


def _run(words: list[str]) -> int:
    """Run the user's command; returns its exit code, negative for a signal."""
    print(f"$ {shlex.join(words)}", flush=True)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    return subprocess.run(words, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
