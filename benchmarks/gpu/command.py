"""Run the parts on a GPU, most valuable first, and write results/gpu-CARD.json as rows come.

A part is a process: one that hangs, or breaks the GPU's context, loses nothing of the others. It writes each row
when it has it, and no part takes more than its share of the time; when that is up, the rows so far are kept and
marked, and parts that were not begun are named. Nothing is downloaded: a part whose packages are missing fails.
With `--device cpu` everything runs with small sizes on this machine's CPU, to see that it would run.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.common import RESULTS, ROOT, machine
from benchmarks.gpu.parts import PARTS
from benchmarks.gpu.summary import lines_of
from zslurm.train.allocator import DEFAULT, VARIABLES, set_allocator

NO_GPU = 3
"""Exit code where torch finds no GPU."""
SHORTEST_S = 5.0
"""With less time left no part is begun."""
PACKAGES = ("triton", "pydantic", "yamlcore", "h5py", "zlib_ng", "transformers", "pytest", "hypothesis")
"""What the parts import beside torch."""
BETWEEN_WRITES_S = 10.0
"""How often the rows of a part under way are written to the result."""


def main(arguments: Sequence[str]) -> int:
    """Run the parts that are asked for; returns 0, 1 if a part failed, 2 for wrong arguments, 3 without a GPU."""
    options = _parser().parse_args(arguments)
    unknown = [name for name in options.only if name not in PARTS]
    if unknown:
        print(f"no part called {', '.join(unknown)}; there are: {', '.join(PARTS)}", file=sys.stderr)
        return 2
    if options.list:
        for name, part in PARTS.items():
            print(f"{name:12} {part.what}")
        return 0
    about = describe(options.device)
    if about is None:
        print(
            "no GPU: torch finds none on this machine (torch.cuda.is_available() is False); "
            "`python -m benchmarks gpu --device cpu` tries the program without one",
            file=sys.stderr,
        )
        return NO_GPU
    if lacking := [name for name in PACKAGES if find_spec(name) is None]:
        print(
            f"not installed for {sys.executable}: {', '.join(lacking)}; parts that need them fail", file=sys.stderr
        )
    file = options.results / f"gpu-{_slug(about['card'])}.json"
    body = run_parts(options.only or PARTS, options.device, 60 * options.minutes, file, about)
    for line in lines_of(body):
        print(line)
    for name, part in body["parts"].items():
        why = f": {part['log'][-1]}" if part.get("log") else ""
        print(f"{name:12} {part['status']}, {len(part['rows'])} rows, {part['seconds']} s{why}", file=sys.stderr)
    print(f"wrote {file}", file=sys.stderr)
    return 1 if any(part["status"] == "failed" for part in body["parts"].values()) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks gpu", description=__doc__)
    parser.add_argument("--minutes", type=_minutes, default=10.0, help="time for all parts (default: %(default)s)")
    parser.add_argument("--only", action="append", default=[], metavar="PART", help="run this part (repeatable)")
    parser.add_argument("--device", choices=("gpu", "cpu"), default="gpu", help="cpu: small sizes, a rehearsal")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="DIR", help="where the result goes")
    parser.add_argument("--list", action="store_true", help="list the parts, and run none")
    return parser


def _minutes(text: str) -> float:
    value = float(text)
    if not 0 < value < 24 * 60:
        raise argparse.ArgumentTypeError(f"{text}: expected minutes, more than 0")
    return value


def run_parts(
    names: Iterable[str], device: str, budget_s: float, file: Path, about: dict[str, Any]
) -> dict[str, Any]:
    """Run parts until the time is up; write what there is after each, and return it.

    Parts that the file has already, of the same day, card and versions, stay there unless they are run again.
    """
    ends = time.monotonic() + budget_s
    about = {
        "benchmark": "gpu",
        "command": "python -m benchmarks gpu" + (" --device cpu" if device == "cpu" else ""),
        "date": time.strftime("%Y-%m-%d"),
        **about,
        "machine": machine(),
    }
    parts = _parts_of(file, about)
    body = {**about, "parts": parts}
    for name in names:
        left = ends - time.monotonic()
        if left < SHORTEST_S:
            parts.setdefault(name, {"status": "no time", "rows": [], "seconds": 0.0})
        else:
            limit = min(left, PARTS[name].share * budget_s)
            print(f"== {name}: {PARTS[name].what} (up to {limit:.0f} of {left:.0f} s left)", file=sys.stderr)

            def keep(part: dict[str, Any], name: str = name) -> None:
                parts[name] = part
                _write(file, body)

            keep(run_part(name, device, limit, keep))
    _write(file, body)
    return body


def _parts_of(file: Path, about: dict[str, Any]) -> dict[str, Any]:
    """Return the parts of an earlier result; none if it was made otherwise."""
    try:
        before = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    parts: dict[str, Any] = before.pop("parts", {})
    return parts if before == about else {}


def run_part(
    name: str, device: str, limit_s: float, keep: Callable[[dict[str, Any]], None] = lambda part: None
) -> dict[str, Any]:
    """Run one part in a process; returns its status, its rows and, of one that failed, its last lines.

    `keep` gets the same of a part that is still running, every few seconds.
    """
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="zslurm-gpu-") as folder:
        rows, log = Path(folder, "rows.jsonl"), Path(folder, "log")
        rows.touch()

        def so_far(status: str) -> dict[str, Any]:
            return {"status": status, "seconds": round(time.monotonic() - started, 1), "rows": _whole_rows(rows)}

        with log.open("wb") as out:
            child = subprocess.Popen(
                command_of(name, device, rows),
                cwd=ROOT,
                env=environment_of_parts(),
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
            try:
                status = _wait(child, started + limit_s, lambda: keep(so_far("running")))
            finally:
                if child.poll() is None:
                    os.killpg(child.pid, signal.SIGKILL)
                    child.wait()
        found = so_far(status)
        if status == "failed":
            printed = log.read_text(errors="replace").strip().splitlines()[-8:]
            found["log"] = [line.replace(str(ROOT), ".") for line in printed]
            print("\n".join(printed), file=sys.stderr)
        return found


def _wait(child: subprocess.Popen[bytes], deadline: float, running: Callable[[], None]) -> str:
    """Wait for a part's process; returns how it ended, or that its time is up."""
    while True:
        left = max(0.0, deadline - time.monotonic())
        try:
            return "done" if child.wait(min(left, BETWEEN_WRITES_S)) == 0 else "failed"
        except subprocess.TimeoutExpired:
            if time.monotonic() >= deadline:
                return "out of time"
            running()


def _whole_rows(file: Path) -> list[Any]:
    # The last line of a process that was killed, or is writing, may be half a row.
    return [json.loads(line) for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]


def environment_of_parts() -> dict[str, str]:
    """Return the environment of a part: the allocator as in a run, and no download by a library."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"}
    set_allocator(environment)
    return environment


def command_of(name: str, device: str, rows: Path) -> list[str]:
    """Return the command line of a part's process, which adds its rows to a file."""
    return [sys.executable, "-m", "benchmarks.gpu.part", name, "--device", device, "--rows", str(rows)]


def describe(device: str) -> dict[str, Any] | None:
    """Return card, driver and versions, or None without a GPU; a separate process asks, and takes some memory.

    Where the allocator of a run does not work there, that is printed, and the parts run with torch's own setting.
    """
    done = ask_device(device)
    if done.returncode and not any(name in os.environ for name in VARIABLES):
        print(f"{DEFAULT} does not work here: {_last_line(done.stderr)}", file=sys.stderr)
        os.environ[VARIABLES[-1]] = "expandable_segments:False"
        done = ask_device(device)
    if done.returncode:
        sys.exit(_last_line(done.stderr))
    found: dict[str, Any] | None = json.loads(done.stdout.splitlines()[-1])
    return found


def ask_device(device: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.gpu.part", "describe", "--device", device]
    environment = environment_of_parts()
    return subprocess.run(command, cwd=ROOT, env=environment, check=False, capture_output=True, text=True)


def _last_line(printed: str) -> str:
    return printed.strip().rpartition("\n")[2]


def _slug(card: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", card.lower()).strip("-") or platform.machine()


def _write(file: Path, body: dict[str, Any]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(".partial")
    partial.write_text(json.dumps(body, indent=2) + "\n")
    partial.replace(file)
