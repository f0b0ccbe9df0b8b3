"""Run the parts on a GPU, most valuable first, and write gpu-CARD.json as rows come, and gpu-CARD.md at the end.

A part is a process: if it hangs, or breaks the GPU's context, the others keep what they have. It writes each row
as soon as the row is measured, and takes at most its share of the time. When the time is up, rows so far are kept
and marked, and parts that did not start are named. A result of the same card, driver and versions, in the folder
of results or in benchmarks/results, is continued: so two calls make one result.

Tables of crossovers go into a file as soon as they are measured, where later parts read them, and
into the result, from which a later call takes them.

Nothing is downloaded. Missing packages are taken from the folder wheels/, which `make gpu-wheels` fills on a
machine with a network; a part whose packages are missing there too fails. With `--device cpu` everything runs with
small sizes on this machine's CPU, which shows that it would run.
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
from benchmarks.gpu.page import page_of
from benchmarks.gpu.parts import GROUPS, PARTS
from zslurm.core.files import write_atomically
from zslurm.kernels.arch import CPU
from zslurm.kernels.cache import TABLES_VARIABLE, cache_directory, measured_tables, with_tables
from zslurm.train.allocator import DEFAULT, VARIABLES, set_allocator

NO_GPU = 3
"""Exit code where torch finds no GPU."""
SHORTEST_S = 5.0
"""With less time left no part is begun."""
PACKAGES = ("triton", "pydantic", "yamlcore", "h5py", "zlib_ng", "transformers", "pytest", "hypothesis")
"""Packages that the parts import, torch excepted."""
WHEELS = ROOT / "wheels"
"""Packages that travel with the tree: `make gpu-wheels`."""
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
            print(f"{name:18} {part.group:9} {part.what}")
        return 0
    with tempfile.TemporaryDirectory(prefix="zslurm-gpu-wheels-") as folder:
        add_packages(Path(folder))
        return _run(options)


def _run(options: argparse.Namespace) -> int:
    about = describe(options.device)
    if about is None:
        print(
            "no GPU: torch finds none on this machine (torch.cuda.is_available() is False); "
            "`python -m benchmarks gpu --device cpu` tries the program without one",
            file=sys.stderr,
        )
        return NO_GPU
    file = options.results / f"gpu-{_slug(about['card'])}.json"
    for names in _calls(options.groups, options.only):
        body = run_parts(names, options.device, 60 * options.minutes, file, about)
    print(page := "\n".join(page_of(body)))
    file.with_suffix(".md").write_text(page + "\n")
    for name, part in body["parts"].items():
        why = f": {part['log'][-1]}" if part.get("log") else ""
        print(f"{name:18} {part['status']}, {len(part['rows'])} rows, {part['seconds']} s{why}", file=sys.stderr)
    print(f"wrote {file} and {file.with_suffix('.md').name}", file=sys.stderr)
    return 1 if any(part["status"] == "failed" for part in body["parts"].values()) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks gpu", description=__doc__)
    parser.add_argument(
        "groups", nargs="*", choices=(*GROUPS, []), metavar="GROUP", help="kernels, training (both)"
    )
    parser.add_argument("--minutes", type=_minutes, default=9.0, help="time for each group (default: %(default)s)")
    parser.add_argument("--only", action="append", default=[], metavar="PART", help="run this part (repeatable)")
    parser.add_argument("--device", choices=("gpu", "cpu"), default="gpu", help="cpu: small sizes, a rehearsal")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="DIR", help="where the result goes")
    parser.add_argument("--list", action="store_true", help="list the parts and exit")
    return parser


def _minutes(text: str) -> float:
    value = float(text)
    if not 0 < value < 24 * 60:
        raise argparse.ArgumentTypeError(f"{text}: expected minutes, more than 0")
    return value


def _calls(groups: Sequence[str], only: Sequence[str]) -> list[list[str]]:
    """Return the parts to run, in lists that share a time limit: named ones, or one list for each group."""
    if only:
        return [list(only)]
    return [[name for name, part in PARTS.items() if part.group == group] for group in groups or GROUPS]


def add_packages(folder: Path) -> None:
    """Put packages that are missing here from the wheels of the tree into a folder, and that into PYTHONPATH."""
    missing = [name for name in PACKAGES if find_spec(name) is None]
    wheels = sorted(map(str, WHEELS.glob("*.whl")))
    if missing and wheels:
        install = "-m pip install --quiet --no-index --no-deps --no-compile --target".split()
        command = [sys.executable, *install, str(folder), *wheels]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        if done.returncode:
            print(f"{WHEELS.name}/ cannot be installed: {_last_line(done.stderr)}", file=sys.stderr)
        else:
            sys.path.append(str(folder))
            before = os.environ.get("PYTHONPATH")
            os.environ["PYTHONPATH"] = f"{folder}{os.pathsep}{before}" if before else str(folder)
            missing = [name for name in missing if find_spec(name) is None]
    if missing:
        print(
            f"not installed for {sys.executable}: {', '.join(missing)}; parts that need them fail "
            "(`make gpu-wheels`, on a machine with a network, fills the folder wheels)",
            file=sys.stderr,
        )


def run_parts(
    names: Iterable[str], device: str, budget_s: float, file: Path, about: dict[str, Any]
) -> dict[str, Any]:
    """Run parts until the time is up; write what there is after each, and return it."""
    ends = time.monotonic() + budget_s
    parts = _earlier_parts(file, about)
    body = {
        "benchmark": "gpu",
        "command": "python -m benchmarks gpu" + (" --device cpu" if device == "cpu" else ""),
        "date": time.strftime("%Y-%m-%d"),
        **about,
        "machine": machine(),
        "parts": parts,
    }
    for part in parts.values():
        _keep_tables(part)
    for name in names:
        left = ends - time.monotonic()
        if left < SHORTEST_S:
            parts.setdefault(name, {"status": "no time", "rows": [], "seconds": 0.0})
        else:
            limit = min(left, PARTS[name].share * budget_s)
            print(f"== {name}: {PARTS[name].what} (up to {limit:.0f} of {left:.0f} s left)", file=sys.stderr)

            def keep(part: dict[str, Any], name: str = name) -> None:
                parts[name] = {**part, "date": body["date"]}
                _write(file, body)

            keep(run_part(name, device, limit, keep))
            _keep_tables(parts[name])
    _write(file, body)
    return body


def _earlier_parts(file: Path, about: dict[str, Any]) -> dict[str, Any]:
    """Return the parts of an earlier result of the same card and versions; an empty dict if there is none."""
    for earlier in (file, RESULTS / file.name):
        try:
            before = json.loads(earlier.read_text())
        except (OSError, ValueError):
            continue
        if all(before.get(key) == value for key, value in about.items()):
            parts: dict[str, Any] = before["parts"]
            return parts
    return {}


def _keep_tables(part: dict[str, Any]) -> None:
    """Write the tables of a part's rows where later parts read them; a CPU has none."""
    file = measured_tables() or cache_directory() / "kernel-tables.json"
    os.environ[TABLES_VARIABLE] = str(file)
    for row in part["rows"]:
        if row.get("architecture") not in (None, CPU.name):
            try:
                file.parent.mkdir(parents=True, exist_ok=True)
                write_atomically(file, json.dumps(with_tables(file, row["tables"])))
            except OSError as error:
                print(f"{file}: the tables cannot be kept: {error}", file=sys.stderr)


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

    If the allocator of a run does not work there, that is printed, and the parts run with torch's own setting.
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
