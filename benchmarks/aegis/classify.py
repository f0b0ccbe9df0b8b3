"""Classifying logs: how fast, and how right on the labelled lines (tests/aegis/logs/log_samples.jsonl).

The rate is measured on generated logs of training: lines of three trainers and of NCCL, with srun's labels, and
recorded failure lines mixed in at three densities. The table was written with the labelled lines at hand, so their
recall says that nothing of them is missed, not how well it does on lines that it never saw; for that there are the
figures of lines that were gathered when a table was finished, scored by that table.

`python -m benchmarks.aegis.classify --foreign-logs DIRECTORY` also reads every file of a directory of other
systems' logs (logpai/loghub, the samples of 2,000 lines), in which no line may exclude a node. Without it the
counts of the last such run are kept.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.common import RESULTS, export, write_result
from tests.aegis.logs.log_samples import BATCHES, BATCHES_BLIND, COMPOSED, FORMS, FURTHER, RECORDED, Sample
from zslurm.aegis.fault_kinds import rule_of
from zslurm.aegis.logs.classify import classify
from zslurm.aegis.logs.lines import chunks_of
from zslurm.aegis.logs.scanner import findings_in
from zslurm.aegis.logs.signatures import Signatures

_MEGABYTES = 64
_RUNS = 5
_RANKS = 64

# What other rule sets recognise, single-line patterns only, of 118 real and fixture failure lines, of which the
# recorded ones here are a part. Figures as published with the collection; not run again here.
_BASELINE = {
    "lines": 118,
    "recognised": {
        "nvidia-resiliency-ext": 39,
        "CVS": 27,
        "Primus node_smoke": 21,
        "node-scraper": 15,
        "Primus-SaFE": 10,
    },
    "of 28 AMD GPU lines": {
        "nvidia-resiliency-ext": 0,
        "CVS": 19,
        "Primus node_smoke": 16,
        "node-scraper": 11,
        "Primus-SaFE": 10,
    },
    "of 14 NIC and memlock lines": 0,
    "source": "as published with the collection of lines, of which the recorded ones here are a part; not rerun",
}

_UNSEEN_BY = {
    "further": "7501624",
    "batch 1": "4978d02",
    "batch 2": "78cd3fb",
    "batch 3": "1c63847",
    "batch 4": "58f8fd3",
    "batch 5": "94f01df",
    "batch 6": "a020628",
    "batch 7": "6ce091c",
    "batch 8": "4748b42",
}
"""The commits whose rules had not seen the lines of log_samples_further.jsonl and log_samples_batch*.jsonl.
They were gathered from public threads, from sources of drivers and programs and from other tools' tests, and
labelled before they were scored; the rules were corrected after that. Batch 1 was gathered where the rules were
known to be weak. Batches 7 and later were gathered and labelled without sight of the rules."""


def run(foreign_logs: Path | None = None) -> None:
    """Measure and write results/classify.json.

    Args:
        foreign_logs: a directory of other systems' logs to count false alarms in.
    """
    load = os.getloadavg()[0]
    started = time.perf_counter()
    Signatures.load()
    loaded = time.perf_counter() - started
    write_result(
        "classify",
        {
            "load_at_the_start": round(load, 2),
            "table": {
                "kinds": len({rule.match.kind for rule in Signatures.load().rules}),
                "expressions": sum(len(rule.any) for rule in Signatures.load().rules),
                "load_s": round(loaded, 3),
            },
            "rate": [_rate(name, every) for name, every in _DENSITIES.items()],
            "recorded_lines": _score(RECORDED),
            "further_forms": _score(FORMS + COMPOSED),
            "further_lines": _score(FURTHER),
            "further_lines_by_rules_that_had_not_seen_them": _score_unseen("further", FURTHER),
            "batches": [_score(batch) for batch in BATCHES],
            "batches_by_rules_that_had_not_seen_them": [
                _score_unseen(f"batch {number}", batch) for number, batch in enumerate(BATCHES_BLIND, 1)
            ],
            "foreign_logs": _foreign(foreign_logs) if foreign_logs else _foreign_of_the_last_run(),
            "other_rule_sets": _BASELINE,
        },
    )


_DENSITIES = {"no failures": 0, "1 failure line in 10,000": 10_000, "1 failure line in 100": 100}


def _rate(name: str, every: int) -> dict[str, Any]:
    """MB/s of the whole way: read, find, diagnose."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "log"
        path.write_bytes(b"".join(_training(every, random.Random(1))))
        size = path.stat().st_size / 1e6
        rates, found = [], 0
        for turn in range(_RUNS + 1):
            started = time.perf_counter()
            found = sum(1 for _ in findings_in(chunks_of(path)))
            if turn:
                rates.append(size / (time.perf_counter() - started))
        diagnosis = classify([("log", chunks_of(path))])
    return {
        "log": name,
        "megabytes": round(size),
        "median_mb_per_s": round(statistics.median(rates), 1),
        "min_mb_per_s": round(min(rates), 1),
        "max_mb_per_s": round(max(rates), 1),
        "runs": _RUNS,
        "lines_found": found,
        "root": diagnosis.root.match.kind if diagnosis.root else None,
    }


def _training(every: int, chance: random.Random) -> Iterator[bytes]:
    """Return lines of 64 ranks, of which one in `every` is of a failure."""
    failures = [sample.line for sample in RECORDED if not sample.kind.startswith("benign")]
    size, step = 0, 0
    while size < _MEGABYTES * 1_000_000:
        step += 1
        line = chance.choice(_TRAINERS)(step, chance)
        if every and step % every == 0:
            line = chance.choice(failures)
        data = f"{chance.randrange(_RANKS)}: {line}\n".encode()
        size += len(data)
        yield data


def _megatron(step: int, chance: random.Random) -> str:
    return (
        f" [2026-02-02 12:{step // 60 % 60:02}:{step % 60:02}] iteration {step:8}/  250000 | consumed samples: "
        f"{step * 8:12} | elapsed time per iteration (ms): {chance.uniform(4000, 4100):.1f} | learning rate: "
        f"2.999E-04 | global batch size:     8 | lm loss: {chance.random():.6E} | loss scale: 1.0 | grad norm: "
        f"{chance.random():.3f} | number of skipped iterations:   0 | number of nan iterations:   0 |"
    )


def _titan(step: int, chance: random.Random) -> str:
    return (
        f"\x1b[36m[titan] 2026-02-02 12:{step // 60 % 60:02}:{step % 60:02},123 - root - INFO - step: {step:6}  "
        f"loss: {chance.random():7.4f}  grad_norm: {chance.random():7.4f}  memory: 45.12GiB(70.44%)\x1b[0m"
    )


def _hugging_face(step: int, chance: random.Random) -> str:
    return (
        f"{{'loss': {chance.random():.4f}, 'grad_norm': {chance.random()}, 'learning_rate': "
        f"{chance.random():.3e}, 'epoch': {step / 1000:.2f}}}"
    )


def _nccl(step: int, chance: random.Random) -> str:
    channel = chance.randrange(64)
    return f"node{step % 8}:4711:4712 [{step % 8}] NCCL INFO Channel {channel:02}/64 : 0[1c000] -> 1[2d000]"


_TRAINERS: list[Callable[[int, random.Random], str]] = [_megatron, _titan, _hugging_face, _nccl]


def _foreign(directory: Path) -> dict[str, Any]:
    """Count what is found in each file of a directory: whole, and line by line, so that no line has a context."""
    return {"source": directory.name} | {
        way: _count(directory, line_by_line)
        for way, line_by_line in (("whole_files", False), ("line_by_line", True))
    }


def _count(directory: Path, line_by_line: bool) -> dict[str, Any]:
    lines, roots, exclude = 0, Counter[str](), Counter[str]()
    files = sorted(path for path in directory.iterdir() if path.is_file())
    for path in files:
        data = path.read_bytes()
        lines += len(data.splitlines())
        for part in data.splitlines() if line_by_line else [data]:
            kinds = [found.match.kind for found in findings_in([part]) if found.match.role == "root"]
            roots.update(kinds)
            exclude.update(kind for kind in kinds if rule_of(kind).exclude_after is not None)
    return {"files": len(files), "lines": lines, "roots": dict(roots), "roots_that_exclude": dict(exclude)}


def _foreign_of_the_last_run() -> Any:
    path = RESULTS / "classify.json"
    return json.loads(path.read_text()).get("foreign_logs") if path.exists() else None


def _score_unseen(name: str, samples: list[Sample]) -> dict[str, Any]:
    """The score of an older version of the rules and of their code, from this repository's history."""
    commit = _UNSEEN_BY[name]
    with tempfile.TemporaryDirectory() as folder:
        export(commit, folder, *_PACKAGES)
        lines = json.dumps([sample.line for sample in samples]).encode()
        done = subprocess.run(
            [sys.executable, "-c", _SCORER], cwd=folder, input=lines, check=True, capture_output=True
        )
    kinds = dict(zip((sample.line for sample in samples), json.loads(done.stdout), strict=True))
    return {"by_the_rules_of_commit": commit} | _score(samples, kinds.__getitem__)


# The scanner has had two homes.
_IMPORTS = """
try:
    from zslurm.aegis.logs.scanner import findings_in
    from zslurm.aegis.logs.lines import chunks_of
except ImportError:
    from zslurm.aegis.log_faults import findings_in
    from zslurm.aegis.log_lines import chunks_of
"""

_PACKAGES = ("zslurm", "train", "checkpoint_tools")

_SCORER = f"""
import json, sys
{_IMPORTS}
lines = json.load(sys.stdin)
found = (next(iter(findings_in([line.encode()])), None) for line in lines)
json.dump([one.match.kind if one else "benign" for one in found], sys.stdout)
"""


def _score(samples: list[Sample], kind_of: Callable[[str], str] | None = None) -> dict[str, Any]:
    """Recall and false alarms for each class; a false alarm is a line that is given a class which it has not."""
    given = [(sample.kind, (kind_of or _kind)(sample.line)) for sample in samples]
    lines = Counter(kind for kind, _ in given)
    right = Counter(kind for kind, found in given if kind == found)
    alarms = Counter(found for kind, found in given if kind != found and not _harmless(found))
    faults = [kind for kind in lines if not _harmless(kind)]
    return {
        "failure_lines": sum(lines[kind] for kind in faults),
        "recognised": sum(right[kind] for kind in faults),
        "harmless_lines": sum(count for kind, count in lines.items() if _harmless(kind)),
        "harmless_lines_flagged": sum(1 for kind, found in given if _harmless(kind) and not _harmless(found)),
        "by_class": {
            kind: {"lines": lines[kind], "right": right[kind], "false_alarms": alarms[kind]}
            for kind in sorted(lines)
        },
    }


def _kind(line: str) -> str:
    return next((found.match.kind for found in findings_in([line.encode()])), "benign")


def _harmless(kind: str) -> bool:
    return kind in ("benign", "benign_after_fault")


if __name__ == "__main__":
    _parser = argparse.ArgumentParser(prog="python -m benchmarks.aegis.classify")
    _parser.add_argument("--foreign-logs", type=Path, metavar="DIRECTORY", help="other systems' logs")
    run(_parser.parse_args().foreign_logs)
