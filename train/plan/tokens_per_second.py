"""`python -m zslurm.train.plan.tokens_per_second CONFIG.json` measures in a few seconds how fast a CPU trains.

It runs forward and backward of microbatches of random tokens, on as many threads as a rank gets: most of a step,
without optimizer, collectives and data. Ranks share caches and memory, so start one such process for each rank, at
the same time, with LOCAL_WORLD_SIZE in the environment.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import NamedTuple

import torch

from zslurm.train.config import TrainConfig, load_train_config
from zslurm.train.model.zaya import build
from zslurm.train.parallel.world import DTYPES, cpu_threads

SECONDS = 2.0


class Rate(NamedTuple):
    """What was measured, and in how many seconds."""

    tokens_per_s: float
    seconds: float


def microbatch_rate(config: TrainConfig, seconds: float = SECONDS) -> Rate:
    """Measure the first phase's microbatches on the CPU.

    Args:
        config: a run; its model, format, threads and first phase count.
        seconds: how long to measure; at least one microbatch is run, after one that does not count.
    """
    torch.set_num_threads(cpu_threads(config.parallel.threads))
    phase = config.phases[0]
    model = build(config.model, config.run.seed, dtype=DTYPES[config.parallel.dtype])
    generator = torch.Generator().manual_seed(config.run.seed)
    shape = (phase.micro_batch, phase.context)
    count, started = -1, 0.0
    while count < 1 or time.perf_counter() - started < seconds:
        if count == 0:
            started = time.perf_counter()
        tokens_BS = torch.randint(config.model.vocab_size, shape, generator=generator)
        loss, _ = model(tokens_BS, tokens_BS, rope_base=phase.rope_base)
        loss.backward()
        count += 1
    took = time.perf_counter() - started
    return Rate(count * tokens_BS.numel() / took, took)


if __name__ == "__main__":
    print(json.dumps(microbatch_rate(load_train_config(Path(sys.argv[1])))._asdict()))
