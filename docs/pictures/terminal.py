"""Pictures of the terminal: real commands on real runs of this machine; the node of `rails` alone is simulated."""

from __future__ import annotations

import functools
import io
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from fcntl import ioctl
from pathlib import Path

import psutil
from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

from tests.fake_sysfs import mi300x_pollara

FOLDER = Path(__file__).parent
_ACTIVE, _SLOW_RANK = "pretrain-small", 2
_RUN = """\
extends: zaya1-tiny
run: {{name: {name}, runs_dir: runs}}
data: {{path: data}}
phases: [{{tokens: {tokens}, context: 128, global_batch: 16, micro_batch: 4, lr: 8e-3, warmup_steps: 10}}]
checkpoint: {{every_steps: 20}}
slurm: {{ranks_per_node: 4}}
"""
_BROKEN = """\
run: {name: ablation-lr3, runs_dir: runs}
trainer: {command: [python3, -c, "raise ValueError('--lr 3 is above the largest rate, 1.0')"]}
"""
_FONT_FACES = re.compile(r"@font-face \{\{.*?\}\}\s*", re.DOTALL)
_CONTROLS = re.compile(r"\x1b\[\?\d+[hl]|\x1b\][^\x07]*\x07|\x1b\[[HJ]|\x1b\[2J")
_REDRAW = re.compile(r"\r?\x1b\[2K|\x1b\[\d*A|\x1b\[H")
_PROGRAM = """
import sys
from zslurm.cli.main import main
sys.argv[0] = "zslurm"
main()
"""


def status() -> str:
    """Four real runs: one trains, one is complete, one has failed, one was interrupted."""
    return as_svg("zslurm status", _of_real_runs()[0], 100)


def watch() -> str:
    """A real run of four ranks, one of which is slowed, as `zslurm watch RUN` shows it."""
    return as_svg(f"zslurm watch {_ACTIVE}", _of_real_runs()[1], 100)


@functools.cache
def _of_real_runs() -> tuple[str, str]:
    """Return the output of `status` and of `watch`: the runs take minutes, and are made once for both."""
    with _runs() as environment:
        return _output(["status"], environment, width=100), _output(["watch", _ACTIVE], environment, width=100)


def rails() -> str:
    """The GPUs and NICs of a node, rail by rail."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        mi300x_pollara(directory / "node0", down={3})
        environment = _environment(directory)
        environment |= {"ZSLURM_SYSROOT": str(directory / "%n"), "SLURMD_NODENAME": "node0"}
        arguments = ["cluster", "rails", "--here", "--cluster", "mi300x-pollara"]
        return as_svg("zslurm cluster rails", _output(arguments, environment, width=100), 100)


PICTURES = (status, watch, rails)


@contextmanager
def _runs() -> Iterator[Mapping[str, str]]:
    """Yield the environment of a user whose four runs really ran on this machine; the first still trains."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        environment = _environment(directory)
        texts = str(FOLDER.parent)

        def zslurm(*arguments: str) -> None:
            command = [sys.executable, "-P", "-m", "zslurm", *arguments]
            subprocess.run(command, env=environment, cwd=directory, capture_output=True, text=True, check=False)

        zslurm("data", "build", texts, "--vocab-size", "512", "--out", "data")
        (directory / "broken.yaml").write_text(_BROKEN)
        for run, tokens in (("fine-tune-math", 20_000), ("smoke", 10_000_000), (_ACTIVE, 10_000_000)):
            (directory / f"{run}.yaml").write_text(_RUN.format(name=run, tokens=tokens))
        zslurm("submit", "fine-tune-math.yaml", "--cluster", "local", "--wait")
        zslurm("submit", "broken.yaml", "--cluster", "local", "--wait")
        zslurm("submit", "smoke.yaml", "--cluster", "local")
        _wait_for_step(directory, "smoke", 5)
        zslurm("cancel", "smoke", "--wait")
        zslurm("submit", f"{_ACTIVE}.yaml", "--cluster", "local")
        _wait_for_step(directory, _ACTIVE, 5)
        try:
            with _slowed(directory / "runs" / _ACTIVE, rank=_SLOW_RANK):
                _wait_for_step(directory, _ACTIVE, 60)
                yield environment
        finally:
            zslurm("cancel", _ACTIVE, "--wait")


def _wait_for_step(directory: Path, run: str, step: int) -> None:
    """Wait until a run has reached a step.

    Raises:
        TimeoutError: it has not, after five minutes.
    """
    metrics = directory / "runs" / run / "metrics.jsonl"
    for _ in range(600):
        if metrics.is_file() and f'"step":{step},' in metrics.read_text().replace(" ", ""):
            return
        time.sleep(0.5)
    raise TimeoutError(f"{run} has not taken step {step}")


@contextmanager
def _slowed(run: Path, rank: int) -> Iterator[None]:
    """Stop a rank's process for most of each tenth of a second, as a throttled GPU would be slower."""
    (process,) = (
        process for process in psutil.process_iter(["cmdline"])
        if "zslurm.job.rank" in (process.info["cmdline"] or []) and str(run) in " ".join(process.info["cmdline"])
        and process.environ().get("RANK") == str(rank)
    )  # fmt: skip
    ended = threading.Event()

    def slow_down() -> None:
        while not ended.wait(0.03):
            process.suspend()
            time.sleep(0.07)
            process.resume()

    thread = threading.Thread(target=slow_down)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _environment(directory: Path) -> dict[str, str]:
    keep = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
    homes = {name: str(directory / name.lower()) for name in ("HOME", "XDG_CONFIG_HOME", "XDG_STATE_HOME")}
    return keep | homes | {"TERM": "xterm-256color", "COLORTERM": "truecolor", "TZ": "UTC", "PYTHONUTF8": "1"}


def _output(arguments: list[str], environment: Mapping[str, str], *, width: int) -> str:
    """Run a command on a terminal; return what stood on it first, with its colours.

    A command that runs until it is interrupted, such as `watch`, is interrupted once it has drawn itself.
    """
    master, slave = pty.openpty()
    ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, width, 0, 0))
    command = [sys.executable, "-c", _PROGRAM, *arguments]
    process = subprocess.Popen(command, env=dict(environment), stdin=slave, stdout=slave, stderr=slave)
    os.close(slave)
    shown = b""
    while True:
        quiet = not select.select([master], [], [], 3.0 if shown else 120.0)[0]
        try:
            block = b"" if quiet else os.read(master, 65_536)
        except OSError:  # the other end is closed
            break
        if not block:
            process.send_signal(signal.SIGINT)
            break
        shown += block
    process.wait(timeout=60)
    os.close(master)
    text = _CONTROLS.sub("", shown.decode())
    frames = [frame for frame in _REDRAW.split(text) if frame.strip()]
    return frames[0].replace("\r", "").rstrip()


def as_svg(command: str, output: str, width: int) -> str:
    """Return a terminal with a command and its output, as rich draws a window, without fonts from the web."""
    console = Console(record=True, width=width, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print(Text.assemble(("$ ", "dim"), (command, "bold")))
    console.print(Text.from_ansi(output))
    name = command.replace(" ", "-")
    svg = console.export_svg(
        title=command, theme=MONOKAI, code_format=_FONT_FACES.sub("", CONSOLE_SVG_FORMAT), unique_id=name
    )
    return svg.replace("Fira Code", "ui-monospace, Menlo, Consolas, DejaVu Sans Mono") + "\n"
