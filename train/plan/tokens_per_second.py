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

import torch

from zslurm.train.config import TrainConfig, load_train_config
from zslurm.train.model.zaya import build
from zslurm.train.parallel.world import DTYPES, cpu_threads

_SECONDS = 2.0


def microbatch_rate(config: TrainConfig) -> dict[str, float]:
    """Measure the first phase's microbatches on the CPU: tokens a second, and the seconds that it took.

    At least one microbatch is run, after one that does not count.
    """
    torch.set_num_threads(cpu_threads(config.parallel.threads))
    phase = config.phases[0]
    model = build(config.model, config.run.seed, dtype=DTYPES[config.parallel.dtype])
    generator = torch.Generator().manual_seed(config.run.seed)
    shape = (phase.micro_batch, phase.context)
    count, started = -1, 0.0
    while count < 1 or time.perf_counter() - started < _SECONDS:
        if count == 0:
            started = time.perf_counter()
        tokens_BS = torch.randint(config.model.vocab_size, shape, generator=generator)
        loss, _ = model(tokens_BS, tokens_BS, rope_base=phase.rope_base)
        loss.backward()
        count += 1
    took = time.perf_counter() - started
    return {"tokens_per_s": count * tokens_BS.numel() / took, "seconds": took}


if __name__ == "__main__":
    print(json.dumps(microbatch_rate(load_train_config(Path(sys.argv[1])))))
