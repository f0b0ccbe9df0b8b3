"""From a clean clone to the first training step: `make setup` and `zslurm demo`, one after the other, once.

The peer is `pip install torch transformers` into a fresh environment, with the same pins: what anybody who trains
with PyTorch waits for before the first line of their own. pip's cache is what the machine has for both.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from pathlib import Path

from benchmarks.common import export, write_result
from zslurm.train.jsonl import read_jsonl

LIMIT_S = 1800


def run() -> None:
    """Measure and write results/first_step.json."""
    with tempfile.TemporaryDirectory() as folder:
        clone = Path(folder) / "zslurm"
        clone.mkdir()
        export("HEAD", clone)
        peer = _seconds(f"python3 -m venv {folder}/peer && {_pip(folder)}", clone)
        setup = _seconds("make setup", clone)
        to_step = _until_first_step(clone)
    write_result(
        "first_step",
        {
            "pip_install_torch_transformers_s": round(peer, 1),
            "make_setup_s": round(setup, 1),
            "demo_to_first_step_s": round(to_step, 1),
            "clone_to_first_step_s": round(setup + to_step, 1),
            "ratio_to_pip": round((setup + to_step) / peer, 2),
        },
    )


def _pip(folder: str) -> str:
    return f"{folder}/peer/bin/python -m pip install --quiet -c constraints.txt torch transformers"


def _seconds(command: str, directory: Path) -> float:
    began = time.monotonic()
    subprocess.run(["bash", "-c", command], cwd=directory, check=True, stdout=subprocess.DEVNULL, timeout=LIMIT_S)
    return time.monotonic() - began


def _until_first_step(clone: Path) -> float:
    """Start the demo and return the seconds until rank 0 has recorded a step; then end it."""
    began = time.monotonic()
    metrics = clone / "demo" / "runs" / "demo" / "metrics.jsonl"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    demo = subprocess.Popen(
        [".venv/bin/zslurm", "demo"], cwd=clone, env=environment,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        while not any(row["kind"] == "step" for row in (read_jsonl(metrics) if metrics.exists() else ())):
            if demo.poll() is not None or time.monotonic() - began > LIMIT_S:
                raise RuntimeError("the demo took no step")
            time.sleep(0.05)
        return time.monotonic() - began
    finally:
        subprocess.run([".venv/bin/zslurm", "cancel", "demo/runs/demo", "--wait"], cwd=clone, check=False)
        demo.wait(timeout=LIMIT_S)
