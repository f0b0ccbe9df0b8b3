"""Compute steps of a run once more, from a checkpoint, on as many ranks as computed them.

All ranks run on this machine, in the nodes that they were on: `LOCAL_WORLD_SIZE` and the threads of each are as
the checkpoint's link records them (checkpointing/chain.py). Nothing of the run is changed: the ranks write into
another directory.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from zslurm.checkpoint_tools.quantities import counted
from zslurm.train.config import load_train_config
from zslurm.train.errors import ConfigError, TrainError
from zslurm.train.integrity.digest import digest_of_weights
from zslurm.train.jsonl import read_jsonl
from zslurm.train.parallel.world import open_world
from zslurm.train.setup import open_trainer
from zslurm.train.stop import StopRequest

_RESULT = "weights.txt"
_COMPARED = ("loss", "z_loss", "grad_norm", "lr", "tokens")
_LEFT_OUT = ("evaluation", "metrics", "recovery", "integrity")


@dataclass(frozen=True)
class ChangedNumber:
    """A number of a step that was computed again with another result."""

    step: int
    name: str
    recorded: Any
    computed: Any


def recompute(
    run_dir: Path, checkpoint: Path | None, link: Mapping[str, Any], step: int, folder: Path
) -> tuple[str, int, list[ChangedNumber]]:
    """Compute the steps after a checkpoint until `step` again, in `folder`; without one, those from the start.

    Returns:
        The digest of the weights after it, how many steps were compared with metrics.jsonl, and what differs.

    Raises:
        ConfigError: this machine has not as many GPUs as the run had ranks.
        TrainError: the steps could not be computed.
    """
    ranks, local = int(link["ranks"]), int(link["local"])
    if link["device"] != "cpu" and torch.cuda.device_count() < ranks:
        raise ConfigError(
            f"step {step} was computed by {counted(ranks, 'GPU')} ({link['device']}), this machine has "
            f"{torch.cuda.device_count()}: run the command where there are as many"
        )
    config = json.loads((run_dir / "config.json").read_bytes())
    config = {name: section for name, section in config.items() if name not in _LEFT_OUT}
    device = "cpu" if link["device"] == "cpu" else "cuda"
    config["parallel"] = {**config.get("parallel", {}), "device": device, "threads": int(link["threads"])}
    config["checkpoint"] = {"every_steps": 2**40, "background": False}
    if checkpoint is not None:
        config["checkpoint"]["resume_from"] = str(checkpoint)
    (folder / "config.json").write_text(json.dumps(config))
    _run_ranks(folder, step, ranks, local)
    recorded, computed = (
        {row["step"]: row for row in read_jsonl(path / "metrics.jsonl") if row["kind"] == "step"}
        for path in (run_dir, folder)
    )
    differences = [
        ChangedNumber(number, name, recorded[number].get(name), computed[number].get(name))
        for number in sorted(recorded.keys() & computed.keys())
        for name in _COMPARED
        if recorded[number].get(name) != computed[number].get(name)
    ]
    return (folder / _RESULT).read_text(), len(recorded.keys() & computed.keys()), differences


def _run_ranks(folder: Path, step: int, ranks: int, local: int) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith("ZSLURM_") and name not in names
    }
    processes = []
    for rank in range(ranks):
        numbers = (rank, ranks, rank % local, local, "127.0.0.1", port)
        variables = dict(zip(names, map(str, numbers), strict=True)) if ranks > 1 else {}
        log = (folder / f"rank-{rank}.log").open("wb")
        command = [sys.executable, "-m", "zslurm.train.recompute", str(folder), str(step)]
        processes.append(subprocess.Popen(command, env=kept | variables, stdout=log, stderr=log))
        log.close()
    try:
        codes = [process.wait() for process in processes]
    finally:
        for process in processes:
            process.kill()
    if (failed := next((rank for rank, code in enumerate(codes) if code), None)) is not None:
        lines = (folder / f"rank-{failed}.log").read_text(errors="replace").splitlines()
        raise TrainError(f"rank {failed} could not compute the steps: {lines[-1] if lines else codes[failed]}")


def main(argv: list[str]) -> int:
    """Train one rank of the run in a directory until a step, without a save; returns the exit code."""
    folder, step = Path(argv[0]), int(argv[1])
    config = load_train_config(folder / "config.json")
    try:
        with open_world(config.parallel) as world:
            trainer = open_trainer(folder, config, world, StopRequest())
            with trainer.observers, trainer.loader:
                while trainer.step < step:
                    trainer.take_step()
            trainer.wait_for_weights()
            if world.is_first:
                (folder / _RESULT).write_text(digest_of_weights(trainer.model))
            trainer.checkpointer.close()
    except TrainError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
