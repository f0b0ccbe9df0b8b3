"""Compute steps of a run again, from a checkpoint, on as many ranks as computed them.

All ranks run on this machine, in the nodes that they were on: `LOCAL_WORLD_SIZE` and the threads of each are as
the checkpoint's link records them (checkpointing/chain.py). If that changed between, the steps are computed in
legs, one after each change: the ranks of a leg save, and those of the next one resume from that. Nothing of the
run is changed: the ranks write into another directory.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from zslurm.checkpoint_tools import list_checkpoints
from zslurm.checkpoint_tools.quantities import counted
from zslurm.train.config import load_train_config
from zslurm.train.errors import ConfigError, TrainError
from zslurm.train.integrity.digest import digest_of_weights
from zslurm.train.jsonl import read_jsonl
from zslurm.train.parallel.world import open_world
from zslurm.train.setup import open_trainer
from zslurm.train.stop import StopRequest

_RESULT = "weights.txt"
_POLL_S = 0.1
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
    run_dir: Path, checkpoint: Path | None, links: Sequence[Mapping[str, Any]], step: int, folder: Path
) -> tuple[str, int, list[ChangedNumber]]:
    """Compute the steps after a checkpoint until `step` again, in `folder`; without one, those from the start.

    Args:
        run_dir: the run directory.
        checkpoint: the checkpoint before the steps; None if they are the first.
        links: those after it, in order, until the first that is not before `step`.
        step: the last step to compute.
        folder: an empty directory.

    Returns:
        The digest of the weights after it, how many steps were compared with metrics.jsonl, and what differs.

    Raises:
        ConfigError: this machine has not as many GPUs as the run had ranks.
        TrainError: the steps could not be computed.
    """
    ranks = max(int(link["ranks"]) for link in links)
    device = links[-1]["device"]
    if device != "cpu" and torch.cuda.device_count() < ranks:
        raise ConfigError(
            f"step {step} was computed by {counted(ranks, 'GPU')} ({device}), this machine has "
            f"{torch.cuda.device_count()}: run the command where there are as many"
        )
    computed: dict[int, dict[str, Any]] = {}
    legs = _legs(links)
    for number, link in enumerate(legs):
        leg = folder / f"leg-{number}"
        leg.mkdir()
        until = step if link is legs[-1] else int(link["step"])
        _write_config(run_dir, leg, link, checkpoint, saves=None if link is legs[-1] else until)
        _run_ranks(leg, until, int(link["ranks"]), int(link["local"]))
        computed |= _steps_of(leg)
        checkpoint = next((listing.path for listing in list_checkpoints(leg / "checkpoints")), None)
    recorded = _steps_of(run_dir)
    differences = [
        ChangedNumber(number, name, recorded[number].get(name), computed[number].get(name))
        for number in sorted(recorded.keys() & computed.keys())
        for name in _COMPARED
        if recorded[number].get(name) != computed[number].get(name)
    ]
    return (leg / _RESULT).read_text(), len(recorded.keys() & computed.keys()), differences


def _legs(links: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the last of the links of each run of links with equal ranks."""
    return [
        link
        for link, after in zip(links, [*links[1:], None], strict=True)
        if after is None or any(link[name] != after[name] for name in ("ranks", "local", "threads"))
    ]


def _write_config(
    run_dir: Path, leg: Path, link: Mapping[str, Any], checkpoint: Path | None, *, saves: int | None
) -> None:
    """Write the configuration of the ranks of a leg, which resume from a checkpoint, and save after a step."""
    config = json.loads((run_dir / "config.json").read_bytes())
    config = {name: section for name, section in config.items() if name not in _LEFT_OUT}
    device = "cpu" if link["device"] == "cpu" else "cuda"
    config["parallel"] = {**config.get("parallel", {}), "device": device, "threads": int(link["threads"])}
    config["checkpoint"] = {"every_steps": saves or 2**40, "background": False}
    if checkpoint is not None:
        config["checkpoint"]["resume_from"] = str(checkpoint)
    (leg / "config.json").write_text(json.dumps(config))


def _steps_of(run_dir: Path) -> dict[int, dict[str, Any]]:
    return {row["step"]: row for row in read_jsonl(run_dir / "metrics.jsonl") if row["kind"] == "step"}


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
        failed = _first_failure(processes)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    if failed is not None:
        code = processes[failed].returncode
        lines = (folder / f"rank-{failed}.log").read_text(errors="replace").splitlines()
        end = f"it was ended by signal {-code}" if code < 0 else lines[-1] if lines else f"exit code {code}"
        raise TrainError(f"rank {failed} could not compute the steps: {end}")


def _first_failure(processes: Sequence[subprocess.Popen[bytes]]) -> int | None:
    """Wait for the ranks; return the first that fails, without the others, which wait for it."""
    while True:
        codes = [process.poll() for process in processes]
        if (failed := next((rank for rank, code in enumerate(codes) if code), None)) is not None:
            return failed
        if None not in codes:
            return None
        time.sleep(_POLL_S)


def main(argv: list[str]) -> int:
    """Train one rank of the run in a directory until a step, saving if that is due; returns the exit code."""
    folder, step = Path(argv[0]), int(argv[1])
    config = load_train_config(folder / "config.json")
    try:
        with open_world(config.parallel) as world:
            trainer = open_trainer(folder, config, world, StopRequest())
            with trainer.observers, trainer.loader:
                while trainer.step < step:
                    if config.checkpoint.every_steps <= step:
                        trainer.advance()
                    else:
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
