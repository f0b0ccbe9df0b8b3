"""The program of one rank: `train(run_dir)`, which zslurm's ranks and `python -m zslurm.train RUN_DIR` call."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from zslurm.checkpoint_tools import CheckpointError
from zslurm.train.config import load_train_config
from zslurm.train.errors import TrainError
from zslurm.train.model.zaya import Zaya
from zslurm.train.parallel.world import open_world
from zslurm.train.progress import dump_stacks_on_signal
from zslurm.train.recovery.generation import Generation
from zslurm.train.recovery.recovery import open_recovery
from zslurm.train.setup import open_trainer
from zslurm.train.stop import Ending, StopRequest


def train(
    run_dir: Path,
    stop: StopRequest | None = None,
    generation: Generation | None = None,
    model: Zaya | None = None,
    becomes: Callable[[int], None] = lambda rank: None,
) -> Ending:
    """Train one rank of the run in `run_dir`, which holds config.json; the environment is torchrun's.

    `stop` is a request that listens already; by default one begins to listen now. A process that takes a rank's
    place joins a `generation`, with a `model` that it has made before. `becomes` is called with the new rank of
    this process if the number of ranks changes.

    Raises:
        ConfigError, DataError: the user can correct the configuration or the data.
        TrainError: training cannot continue.
    """
    if stop is None:
        stop = StopRequest()
        stop.install()
    dump_stacks_on_signal()
    config = load_train_config(run_dir / "config.json")
    recovery = open_recovery(config, generation)
    try:
        if recovery is not None:
            trainer, ending = recovery.train(run_dir, stop, model, becomes)
        else:
            with open_world(config.parallel) as world:
                trainer = open_trainer(run_dir, config, world, stop)
                ending = trainer.run()
        # The other ranks have left, or may leave: rank 0 waits for the last evaluation.command.
        trainer.observers.finish(give_up=lambda: stop.asked or ending is Ending.INTERRUPTED)
        return ending
    except BaseException as error:
        if recovery is not None:
            recovery.fence()  # the record of its end, and of its progress, is that of the process in its place
        if isinstance(error, CheckpointError):
            raise TrainError(f"checkpoint: {error}") from error
        raise
    finally:
        stop.close()


def main(argv: list[str]) -> int:
    """Run `python -m zslurm.train RUN_DIR`; returns the exit code."""
    if len(argv) != 1 or argv[0].startswith("-"):
        print(
            "usage: python -m zslurm.train RUN_DIR   (also: torchrun --nproc-per-node N -m zslurm.train RUN_DIR)",
            file=sys.stderr,
        )
        return 2
    try:
        return train(Path(argv[0]))
    except TrainError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return error.exit_code
