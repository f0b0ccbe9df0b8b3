"""Commands on long histories: `status` of 300 runs of some weeks, and events and report of a run with a million.

Each command is a process, with its wall time, processor time and peak memory. The peer is what any reader of the
file has to do: to parse each of its lines by Python's json, in the same run; ratios are of processor times.
`status` is run twice on files of a supervisor, which keeps the rows that change the state, and before that once on
files without such a record, as earlier versions left them: then it reads every line. The aims are 1 s for
`status`, 5 s for `events`, 10 s for `report`, and 300 MB.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.common import write_result
from tests.run.stories import Story
from zslurm.run.index import IndexedJob, record
from zslurm.run.state.state_events import keep_state_events

RUNS, EVENTS_OF_EACH, MANY = 300, 30_000, 1_000_000
_UNKEPT = 4000
"""Events, nearly a MiB, that the supervisor wrote since it kept the state-changing rows last."""
_MEASURED = """
import resource, runpy, sys, time
started = time.perf_counter()
try:
    runpy.run_module("zslurm", run_name="__main__", alter_sys=True)
except SystemExit as end:
    code = end.code
took, used = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_SELF)
print(took, used.ru_utime + used.ru_stime, used.ru_maxrss, code or 0, file=sys.stderr)
"""
_PARSED = "import json, sys\nfor line in open(sys.argv[1], 'rb'):\n    json.loads(line)"


def run(runs: int = RUNS, events_of_each: int = EVENTS_OF_EACH, many: int = MANY) -> None:
    """Measure and write results/long_histories.json."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["XDG_STATE_HOME"] = str(folder / "state")
        for number in range(runs):
            write_run(folder / f"run{number:03d}", f"local-{number + 2}", events_of_each)
        kept = sorted(folder.glob("*/state-events.json"))
        texts = [path.read_text() for path in kept]
        for path in kept:
            path.unlink()
        rows = [measured("status", folder) | {"files": "of earlier versions"}]
        for path, text in zip(kept, texts, strict=True):
            path.write_text(text)
        rows += [measured("status", folder), measured("status", folder)]
        long = write_run(folder / "long", "local-1", many)
        rows += [
            measured(*command, cwd=folder)
            for command in (
                ("status", "long"),
                ("status", "long"),
                ("logs", "--events", "long"),
                ("logs", "--events", "long", "--all"),
                ("logs", "--events", "long", "--json"),
                ("report", "long"),
            )
        ]
        started, before = time.perf_counter(), _processor_s()
        subprocess.run([sys.executable, "-c", _PARSED, long.run.events], check=True)
        parsed_s, parsed_processor_s = time.perf_counter() - started, _processor_s() - before
        size = long.run.events.stat().st_size
    for row in rows:
        row["times_json"] = round(row["processor_s"] / parsed_processor_s, 3)
    write_result(
        "long_histories",
        {
            "runs": runs,
            "events_of_each": events_of_each,
            "events_of_long": many,
            "bytes_of_long": size,
            "json_of_long_s": round(parsed_s, 2),
            "json_of_long_processor_s": round(parsed_processor_s, 2),
            "commands": rows,
        },
    )


def _processor_s() -> float:
    """Return the processor time of the commands that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def write_run(directory: Path, job_id: str, count: int) -> Story:
    """Write a run as some weeks leave it: nine in ten events are about single ranks."""
    story = Story(directory).submitted(job_id).started().trained(1, 2)
    with story.run.events.open("a") as file:
        for number in range(count):
            rank, when = number % 1024, story.clock + number / 10
            fault: dict[str, Any] = {
                "kind": "slow_rank",
                "role": "advisory",
                "scope": "rank",
                "source": "progress",
            }
            fault |= {"line": f"rank {rank} takes 1.4 times as long as its peers", "step": number, "rank": rank}
            ended = {"event": "ranks_ended", "ranks": [rank], "what": "Exited with exit code 1"}
            body = ended if number % 10 == 9 else {"event": "fault_detected", "fault_time": when, **fault}
            row = {"time": when, **body, "job_id": job_id, "attempt": 1, "node": f"node{rank // 8:03d}"}
            file.write(json.dumps(row, separators=(",", ":")) + "\n")
            if number == count - _UNKEPT:
                file.flush()
                keep_state_events(story.run.events)  # as the supervisor does for every MiB
    story.clock += count / 10
    story.ended("completed", 0)
    record(IndexedJob(job_id, directory, "local", "local", story.clock))
    return story


def measured(*command: str | Path, cwd: Path | None = None) -> dict[str, Any]:
    """Run a command of zslurm and return its wall time, processor time and peak memory."""
    words = [str(each) for each in command if not isinstance(each, Path)]
    cwd = cwd or next(each for each in command if isinstance(each, Path))
    with tempfile.TemporaryFile() as out:  # output that this process keeps would count as the next one's memory
        process = [sys.executable, "-c", _MEASURED, *words]
        done = subprocess.run(process, cwd=cwd, stdout=out, stderr=subprocess.PIPE, text=True, check=True)
        out.seek(0)
        lines = sum(1 for _ in out)
    seconds, processor_s, kib, code = done.stderr.split()[-4:]
    assert code == "0", done.stderr
    return {
        "command": f"zslurm {' '.join(words)}",
        "seconds": round(float(seconds), 2),
        "processor_s": round(float(processor_s), 2),
        "peak_mb": round(int(kib) * 1024 / 1e6),
        "lines": lines,
    }
