"""evaluation.command: a command that judges an export of the weights, beside the training and never in its way.

    trainer, rank 0     a checkpoint is committed -> starts one process and goes on; asks after it at every step
    that process        exports the checkpoint from disk to RUN_DIR/exports/step-00000400, runs the user's command,
                        leaves how it went in step-00000400.json; the output of all is in step-00000400.log

The process has no torch and no GPU, a lower priority, a session of its own, and none of the variables by which a
program would think itself a rank of the run. It dies with the trainer: the kernel tells it (PR_SET_PDEATHSIG),
and it takes the user's command along. One runs at a time; one that is due meanwhile is left out. No failure of
it stops the training.

No shell is involved: the command is cut into words as a shell would, {model}, {step} and {run} are replaced
inside of them, and the words are the arguments of one program. For pipes there is `bash -c '...' judge {model}`.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from zslurm.train.niceness import lower_process

_GRACE_S = 5.0
_PR_SET_PDEATHSIG = 1
_RANKS_OWN = re.compile(
    r"RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|GROUP_RANK|MASTER_ADDR|MASTER_PORT|(TORCHELASTIC|ZSLURM)_.*"
)
"""Variables that tell a program that it is a rank of a distributed run."""

Say = Callable[[str], None]
Write = Callable[..., None]


def command_words(command: str, *, model: str, step: int, run: str) -> list[str]:
    """The words of a command, with {model}, {step} and {run} replaced inside of each; other braces stay.

    Raises:
        ValueError: a quotation is not closed.
    """
    values = {"{model}": model, "{step}": str(step), "{run}": run}
    pattern = re.compile("|".join(map(re.escape, values)))
    return [pattern.sub(lambda found: values[found[0]], word) for word in shlex.split(command)]


class ExportPaths:
    """The files of one step's export."""

    def __init__(self, run_dir: Path, step: int) -> None:
        self.root = run_dir / "exports"
        self.model = self.root / f"step-{step:08d}"
        self.log = self.root / f"step-{step:08d}.log"
        self.result = self.root / f"step-{step:08d}.json"


class EvaluationCommand:
    """Rank 0's side: starts the process, asks after it, tells metrics.jsonl how it went."""

    def __init__(self, run_dir: Path, name: str, command: str, *, keep: int, write: Write, say: Say) -> None:
        """Prepare; nothing is started.

        Args:
            run_dir: the run.
            name: what {run} stands for.
            command: the command with its placeholders.
            keep: exports that stay; older ones are removed when a new one is made.
            write: MetricsWriter.write.
            say: prints a line in the run's log.
        """
        self._run_dir, self._name, self._command, self._keep = run_dir.absolute(), name, command, keep
        self._write, self._say = write, say
        self._process: subprocess.Popen[bytes] | None = None
        self._step = -1

    def reads(self) -> frozenset[int]:
        """The step whose checkpoint is being exported, which must not be removed yet."""
        exporting = self.poll() and not ExportPaths(self._run_dir, self._step).model.exists()
        return frozenset({self._step}) if exporting else frozenset()

    def start(self, step: int, checkpoint: Path) -> None:
        """Export a committed checkpoint and judge it, in the background."""
        if self.poll():
            self._say(f"evaluation.command: step {step} is left out: that of step {self._step} still runs")
            self._record(step, "skipped", reason=f"the command of step {self._step} still ran")
            return
        paths = ExportPaths(self._run_dir, step)
        words = command_words(self._command, model=str(paths.model), step=step, run=self._name)
        arguments = [str(self._run_dir), str(step), str(checkpoint.absolute()), str(self._keep), str(os.getpid())]
        try:
            paths.root.mkdir(exist_ok=True)
            paths.result.unlink(missing_ok=True)
            with paths.log.open("wb") as log:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "zslurm.train.evaluation.command", *arguments, *words],
                    env=_without_ranks_own(os.environ) | {"PYTHONSAFEPATH": "1"},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
        except OSError as error:
            self._say(f"evaluation.command: cannot be started at step {step}: {error}")
            self._record(step, "failed", reason=str(error))
            return
        self._step = step

    def poll(self) -> bool:
        """Whether it runs; writes down how it ended once it has."""
        if self._process is None:
            return False
        if self._process.poll() is None:
            return True
        self._ended("failed")
        return False

    def wait(self, give_up: Callable[[], bool]) -> None:
        """Wait for its end, or until `give_up` says so: then it is killed."""
        if self.poll():
            self._say(f"waiting for evaluation.command of step {self._step}")
        while self.poll() and not give_up():
            time.sleep(0.1)
        self.kill()

    def kill(self) -> None:
        """End it now, if it runs."""
        if not self.poll() or self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGTERM)
        try:
            self._process.wait(2 * _GRACE_S)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._ended("killed")

    def _ended(self, otherwise: str) -> None:
        """Write down how it ended; `otherwise` where it left no word."""
        assert self._process is not None
        code, self._process = self._process.returncode, None
        paths = ExportPaths(self._run_dir, self._step)
        try:
            result = json.loads(paths.result.read_text())
        except (OSError, ValueError):
            result = {
                "outcome": otherwise,
                "reason": f"the process that exports ended with {code}; see {paths.log}",
            }
        if result["outcome"] == "failed":
            self._say(f"evaluation.command of step {self._step} failed: {result['reason']}; see {paths.log}")
        elif result["outcome"] == "done":
            self._say(f"evaluation.command of step {self._step} is done in {result['seconds']:.1f} s: {paths.log}")
        self._record(self._step, **result)

    def _record(self, step: int, outcome: str, **fields: Any) -> None:
        paths = ExportPaths(self._run_dir, step)
        row = {"exit_code": None, "seconds": None, "export_seconds": None, "reason": None} | fields
        self._write(
            "evaluation_command", step=step, outcome=outcome, **row, model=str(paths.model), log=str(paths.log)
        )


def _without_ranks_own(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environ.items() if not _RANKS_OWN.fullmatch(name)}


# ------------------------------------------------------------------ the process itself


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
        print(f"evaluation.command: {error}", file=sys.stderr, flush=True)
        result["reason"] = " ".join(f"{type(error).__name__}: {error}".split())
    temporary = paths.result.with_suffix(".tmp")
    temporary.write_text(json.dumps(result) + "\n")
    temporary.rename(paths.result)
    return 0


def _die_with(parent: int) -> None:
    """End, with all that was started here, when the trainer ends, however that may be."""

    def end(_signum: int, _frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.killpg(0, signal.SIGTERM)
        deadline = time.monotonic() + _GRACE_S
        with contextlib.suppress(ChildProcessError):
            while time.monotonic() < deadline:
                os.waitpid(-1, os.WNOHANG)
                time.sleep(0.05)
        os.killpg(0, signal.SIGKILL)

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # the run is asked to save and stop; Slurm tells all processes
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it ended before the kernel was asked
        sys.exit(1)


def _export(checkpoint: Path, paths: ExportPaths) -> None:
    from zslurm.train.errors import HubError
    from zslurm.train.hub import export, open_weights

    # An earlier attempt may have come to this step, or was killed while it exported.
    for left in (paths.model, *paths.root.glob(".step-*.tmp")):
        shutil.rmtree(left, ignore_errors=True)
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
    """Run the user's command; its exit code, negative for a signal."""
    print(f"$ {shlex.join(words)}", flush=True)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    return subprocess.run(words, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
