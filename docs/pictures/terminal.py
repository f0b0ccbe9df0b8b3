"""Pictures of the terminal: commands that really run, on runs and machines that are simulated in a directory."""

from __future__ import annotations

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
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from fcntl import ioctl
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

from tests.fake_sysfs import mi300x_pollara
from tests.report.runs import TimedStory
from tests.run.stories import Holder

NOW = 1_780_003_600.0
"""What the commands take for the present, so that their pictures do not change with the day."""

_FONT_FACES = re.compile(r"@font-face \{\{.*?\}\}\s*", re.DOTALL)
_CONTROLS = re.compile(r"\x1b\[\?\d+[hl]|\x1b\][^\x07]*\x07|\x1b\[[HJ]|\x1b\[2J")
_REDRAW = re.compile(r"\r?\x1b\[2K|\x1b\[\d*A|\x1b\[H")
_PROGRAM = f"""
import sys, time
strftime, time.time = time.strftime, lambda: {NOW}
time.strftime = lambda form, when=time.gmtime({NOW}): strftime(form, when)
from zslurm.cli.main import main
sys.argv[0] = "zslurm"
main()
"""


def status() -> str:
    """Four runs, one of which has failed."""
    with _runs() as environment:
        return as_svg("zslurm status", _output(["status"], environment, width=100), 100)


def watch() -> str:
    """One active run, as `zslurm watch RUN` shows it."""
    with _runs() as environment:
        return as_svg("zslurm watch zaya1-8b", _output(["watch", "zaya1-8b"], environment, width=100), 100)


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
    """Yield the environment of a user with four runs: active, complete, failed and waiting."""
    from zslurm.run import index
    from zslurm.run.index import new_entry

    with tempfile.TemporaryDirectory() as name, Holder() as holder:
        directory = Path(name)
        environment = _environment(directory)
        os.environ["XDG_STATE_HOME"] = environment["XDG_STATE_HOME"]
        runs = directory / "runs"
        runs.mkdir()
        cause = {
            "message": "RuntimeError: HIP error: an illegal memory access was encountered",
            "rank": 11, "node": "gpu-0017", "exit_code": 1, "step": 12,
        }  # fmt: skip
        stories = {
            name: TimedStory(runs / name) for name in ("zaya1-8b", "fine-tune-math", "ablation-lr3", "smoke")
        }
        for number, (name, story) in enumerate(stories.items(), start=101):
            process = holder.pid if name == "zaya1-8b" else None
            story.submitted_at(NOW - 3000, f"local-{number}", process=process)
            index.record(new_entry(story.job_id, story.run, "local", "local"))
            story.started()
        stories["zaya1-8b"].steps(range(1, 31)).saved(30)
        stories["fine-tune-math"].steps(range(1, 41)).evaluated(40, 3.1).ended("completed", 0)
        failed = stories["ablation-lr3"].steps(range(1, 13)).saved(10)
        failed.event("attempt_ended", attempt=1, outcome="failed", exit_code=1, cause=cause)
        failed.event("run_ended", outcome="failed", exit_code=93, cause=cause)
        stories["smoke"].steps(range(1, 4)).saved(3).ended("interrupted", 75)
        yield environment


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
