"""Continuous batching beside transformers' `generate`: the same weights, prompts, threads and numbers of tokens.

Prompts of drawn lengths are continued greedily in fp32, at batches of 1, 8 and 32. `transformers` pads a batch on
the left and ends with its longest sequence; here prompts begin and end one by one. Both make the same number of
tokens; there is no end token. Tokens/s are of all new tokens, reading the prompts included.
"""

from __future__ import annotations

import importlib.metadata
import os
import time
from typing import Any

import torch

from benchmarks.common import alternate, ratio, write_result
from benchmarks.training.models import TINY
from tests.train.model.reference import reference_of
from zslurm.train.inference.generation import Prompt, generate_batch
from zslurm.train.model.generate import generate
from zslurm.train.model.zaya import build

BATCHES = (1, 8, 32)
PROMPTS, NEW = 32, 32
RUNS = int(os.environ.get("GENERATION_RUNS", "3"))
ROPE = 10_000.0


def run() -> None:
    """Measure and write results/batch_generation.json."""
    model = build(TINY, 5, dtype=torch.float32)
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(4, 60, (PROMPTS,), generator=generator).tolist()
    prompts = [torch.randint(3, TINY.vocab_size, (length,), generator=generator).tolist() for length in lengths]
    theirs = reference_of(model, ROPE)
    assert theirs.generation_config is not None
    theirs.generation_config.eos_token_id = None
    theirs.generation_config.pad_token_id = 0

    def ours(batch: int) -> dict[int, list[int]]:
        asked = [Prompt(tuple(prompt), NEW) for prompt in prompts]
        return {each.index: each.tokens for each in generate_batch(model, asked, rope_base=ROPE, most=batch)}

    def one_by_one() -> dict[int, list[int]]:
        return {
            index: list(generate(model, prompt, max_new_tokens=NEW, rope_base=ROPE))
            for index, prompt in enumerate(prompts)
        }

    def reference(batch: int) -> dict[int, list[int]]:
        made = {}
        for start in range(0, PROMPTS, batch):
            part = prompts[start : start + batch]
            longest = max(map(len, part))
            ids = torch.tensor([[0] * (longest - len(each)) + each for each in part])
            mask = torch.tensor([[0] * (longest - len(each)) + [1] * len(each) for each in part])
            found = theirs.generate(ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False)
            made.update({start + row: each[longest:].tolist() for row, each in enumerate(found)})
        return made

    expected = one_by_one()
    rows: list[dict[str, Any]] = []
    for batch in BATCHES:
        same = {"zslurm": ours(batch) == expected, "transformers": reference(batch) == expected}
        contenders = {
            "zslurm": lambda batch=batch: ours(batch),
            "transformers": lambda batch=batch: reference(batch),
            "zslurm, one by one": one_by_one,
        }
        timings = alternate(contenders, runs=RUNS, warm_up=0)
        rows.append(
            {
                "batch": batch,
                "same_tokens_as_one_by_one": same,
                "tokens_per_s": {name: round(PROMPTS * NEW / each.median, 1) for name, each in timings.items()},
                "times_faster_than_transformers": ratio(timings["transformers"], timings["zslurm"]),
                "times_faster_than_one_by_one": ratio(timings["zslurm, one by one"], timings["zslurm"]),
                "timings": [each.row() for each in timings.values()],
            }
        )
        print(rows[-1], flush=True)
    write_result(
        "batch_generation",
        {
            "versions": {each: importlib.metadata.version(each) for each in ("torch", "transformers")},
            "threads": torch.get_num_threads(),
            "model": TINY.model_dump(mode="json"),
            "prompts": PROMPTS,
            "prompt_tokens": sum(lengths),
            "new_tokens": PROMPTS * NEW,
            "load": [round(each, 1) for each in os.getloadavg()],
            "at": time.strftime("%H:%M"),
            "batches": rows,
        },
    )
