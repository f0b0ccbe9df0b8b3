"""Continuous batching beside transformers' `generate`: the same weights, prompts, threads and numbers of tokens.

Prompts of drawn lengths are continued greedily in fp32, at batches of 1, 8 and 32. `transformers` pads a batch on
the left and ends with its longest sequence; here prompts begin and end one by one. Both make the same number of
tokens; there is no end token. Tokens/s are of all new tokens, reading the prompts included, by processor
time on one thread.
"""

from __future__ import annotations

import importlib.metadata
import os
import time
from typing import Any

import torch

from benchmarks.common import alternate, ratio, write_result
from benchmarks.models import TINY
from tests.train.model.reference import reference_of
from zslurm.train.inference.batch_generation import Prompt, generate_batch
from zslurm.train.model.generate import generate
from zslurm.train.model.zaya import build

BATCHES = {1: 8, 8: 16, 32: 32}
"""With how many prompts."""
NEW = 16
RUNS = int(os.environ.get("GENERATION_RUNS", "3"))
ROPE = 10_000.0
Made = dict[int, list[int]]


class Contenders:
    """Three ways to continue the same prompts, each of which keeps what it made."""

    def __init__(self, prompts: list[list[int]], batch: int) -> None:
        """Continue `prompts`, `batch` at one time."""
        self.model = build(TINY, 5, dtype=torch.float32)
        self.theirs = reference_of(self.model, ROPE)
        assert self.theirs.generation_config is not None
        self.theirs.generation_config.eos_token_id = None
        self.theirs.generation_config.pad_token_id = 0
        self.prompts, self.batch = prompts, batch
        self.made: dict[str, Made] = {}

    def zslurm(self) -> None:
        """Continue by continuous batching."""
        asked = [Prompt(tuple(prompt), NEW) for prompt in self.prompts]
        found = generate_batch(self.model, asked, rope_base=ROPE, most=self.batch)
        self.made["zslurm"] = {each.index: each.tokens for each in found}

    def one_by_one(self) -> None:
        """Continue one prompt after another."""
        self.made["one by one"] = {
            index: list(generate(self.model, prompt, max_new_tokens=NEW, rope_base=ROPE))
            for index, prompt in enumerate(self.prompts)
        }

    def transformers(self) -> None:
        """Continue batches by transformers' generate."""
        made: Made = {}
        for start in range(0, len(self.prompts), self.batch):
            part = self.prompts[start : start + self.batch]
            longest = max(map(len, part))
            ids = torch.tensor([[0] * (longest - len(each)) + each for each in part])
            mask = torch.tensor([[0] * (longest - len(each)) + [1] * len(each) for each in part])
            found = self.theirs.generate(ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False)
            made.update({start + row: each[longest:].tolist() for row, each in enumerate(found)})
        self.made["transformers"] = made


def _drawn(length: int, generator: torch.Generator) -> list[int]:
    found: list[int] = torch.randint(3, TINY.vocab_size, (length,), generator=generator).tolist()
    return found


def run() -> None:
    """Measure and write results/batch_generation.json."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(1)
    rows: list[dict[str, Any]] = []
    for batch, count in BATCHES.items():
        lengths = torch.randint(4, 60, (count,), generator=generator).tolist()
        prompts = [
            torch.randint(3, TINY.vocab_size, (length,), generator=generator).tolist() for length in lengths
        ]
        each = Contenders(prompts, batch)
        contenders = {
            "zslurm": each.zslurm,
            "transformers": each.transformers,
            "zslurm, one by one": each.one_by_one,
        }
        timings = alternate(contenders, runs=RUNS, warm_up=0, clock=time.process_time)
        expected = each.made.pop("one by one")
        rows.append(
            {
                "batch": batch,
                "prompts": count,
                "prompt_tokens": sum(lengths),
                "same_tokens_as_one_by_one": {name: made == expected for name, made in each.made.items()},
                "tokens_per_s": {name: round(count * NEW / one.median, 1) for name, one in timings.items()},
                "times_faster_than_transformers": ratio(timings["transformers"], timings["zslurm"]),
                "times_faster_than_one_by_one": ratio(timings["zslurm, one by one"], timings["zslurm"]),
                "timings": [one.row() for one in timings.values()],
            }
        )
        print(rows[-1], flush=True)
    write_result(
        "batch_generation",
        {
            "versions": {each: importlib.metadata.version(each) for each in ("torch", "transformers")},
            "threads": torch.get_num_threads(),
            "model": TINY.model_dump(mode="json"),
            "new_tokens_of_each": NEW,
            "load": [round(each, 1) for each in os.getloadavg()],
            "at": time.strftime("%H:%M"),
            "batches": rows,
        },
    )
