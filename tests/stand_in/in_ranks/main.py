"""The stand-in for zslurm.train.main; see tests/stand_in/__init__.py."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from torch.distributed import wait_until_left  # the stand-in's

from zslurm.checkpoint_tools import CheckpointError
from zslurm.train.errors import TrainError
from zslurm.train.progress import dump_stacks_on_signal
from zslurm.train.setup import World, open_trainer  # the stand-in's
from zslurm.train.stop import Ending, StopRequest


def train(
    run_dir: Path,
    stop: StopRequest,
    generation: None = None,
    model: None = None,
    becomes: Callable[[int], None] = lambda rank: None,
) -> Ending:
    """Train one rank of the run; the environment is that of zslurm.job.rank. It joins no generation."""
    assert generation is None
    assert model is None
    dump_stacks_on_signal()
    config = json.loads((run_dir / "config.json").read_text())
    try:
        world = World()
        ending = open_trainer(run_dir, config, world, stop).run()
        world.all_gather(None)
        world.store.leave()
        if world.is_first:
            wait_until_left()
        return ending
    except CheckpointError as error:
        raise TrainError(f"checkpoint: {error}") from error
    finally:
        stop.close()
