"""Continue many prompts at once: batches of prompts of similar length, each with one plain cache.

    prompts of a window are sorted by length and cut into batches
    a batch:  what all of its prompts have in length is read at once
              then every row gets one token at a time: its prompt's own until that ends, then those that are chosen
              a row that has ended is computed along until all have ended

All rows have the same length at any time, so that no padding and no mask is needed: a row's logits are those of
its prompt without the other rows, up to rounding, since products of other sizes round differently. What is drawn
for a prompt depends on its own seed and logits. So the tokens equal those that `train.model.generate.generate`
makes, unless two candidates are within rounding of each other.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Literal

import torch

from zslurm.checkpoint_tools.quantities import counted
from zslurm.train.model.cache import bytes_per_token
from zslurm.train.model.generate import choose
from zslurm.train.model.zaya import Zaya

PREFILL_TOKENS = 2048
"""Tokens of prompts that are read in one pass: bounds the memory of their activations."""
MOST_APART = 64
"""Tokens by which prompts of one batch differ in length at most: they are read one at a time."""
_WINDOW = 16
"""Batches of prompts that are sorted together; results come window by window."""
_MEMORY_SHARE = 0.5
"""Of a GPU's free memory that caches may take; activations need some."""

Ended = Literal["end", "stop", "length"]


@dataclass(frozen=True)
class Prompt:
    """What to continue, and how; see `train.model.generate.generate` for temperature and top_p.

    Attributes:
        ids: its tokens, at least one.
        max_new_tokens: that follow it at most, at least one.
        seed: of its draws.
    """

    ids: tuple[int, ...]
    max_new_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    @property
    def longest(self) -> int:
        """Return the most tokens that a cache holds of it; the last one is chosen, and never read."""
        return len(self.ids) + self.max_new_tokens - 1


@dataclass(frozen=True)
class Continuation:
    """What follows a prompt.

    Attributes:
        index: the prompt's place among all.
        tokens: without the one that ends the text; if a stop string did, with the tokens that it is in.
        ended: by an end token, a stop string, or the number of tokens.
    """

    index: int
    tokens: list[int]
    ended: Ended


Stops = Callable[[int], bool]
"""Called with each new token of a text; returns whether the text ends with it."""


def never(token: int) -> bool:
    """End no text."""
    return False


def never_stops(index: int, prompt: Prompt) -> Stops:
    """Return `never` for every prompt."""
    return never


@dataclass
class _Row:
    """A prompt of a batch."""

    index: int
    prompt: Prompt
    stops: Stops
    generator: torch.Generator
    tokens: list[int] = field(default_factory=list)
    ended: Ended | None = None


def tokens_that_fit(model: Zaya, at_least: int) -> int | None:
    """Return the tokens for whose caches a GPU has memory, or `at_least`; None on a CPU."""
    weight = model.embedding.weight
    if weight.device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(weight.device)
    free += torch.cuda.memory_reserved(weight.device) - torch.cuda.memory_allocated(weight.device)
    return max(at_least, int(free * _MEMORY_SHARE) // bytes_per_token(model.config, weight.dtype))


def generate_batch(
    model: Zaya,
    prompts: Iterable[Prompt],
    *,
    rope_base: float,
    eos_ids: Collection[int] = (),
    most: int = 32,
    most_tokens: int | None = None,
    stopper: Callable[[int, Prompt], Stops] = never_stops,
    alive: Callable[[], None] = lambda: None,
) -> Iterator[Continuation]:
    """Yield the continuation of each prompt as it ends, not in their order. The weights must not change.

    Args:
        model: the model, on any device.
        prompts: read as they are needed.
        rope_base: base of the rotary embedding.
        eos_ids: tokens that end a text.
        most: prompts of a batch.
        most_tokens: tokens of all sequences of a batch that there is memory for; None: no limit.
        stopper: makes, for each prompt that begins, what decides whether its text ends.
        alive: called before each pass.

    Raises:
        ValueError: a prompt is empty, asks for no token, or takes more than `most_tokens` by itself.
    """
    remaining = iter(enumerate(prompts))
    while window := list(islice(remaining, _WINDOW * most)):
        for batch in _batches(window, most, most_tokens):
            rows = [
                _Row(index, prompt, stopper(index, prompt), torch.Generator().manual_seed(prompt.seed))
                for index, prompt in batch
            ]
            yield from _continue(model, rows, rope_base, frozenset(eos_ids), alive)


def _batches(
    window: Sequence[tuple[int, Prompt]], most: int, limit: int | None
) -> Iterator[list[tuple[int, Prompt]]]:
    """Yield batches of prompts whose lengths are similar, for whose caches there is memory.

    Raises:
        ValueError: a prompt has no place in any batch.
    """
    for _, prompt in window:
        if not prompt.ids or prompt.max_new_tokens < 1:
            raise ValueError("a prompt is empty, or asks for no token: the first token needs one before it")
        if limit is not None and prompt.longest > limit:
            raise ValueError(
                f"a prompt takes the memory of {counted(prompt.longest, 'token')}, there is room for {limit}"
            )
    batch: list[tuple[int, Prompt]] = []
    longest = 0
    for index, prompt in sorted(window, key=lambda entry: len(entry[1].ids)):
        longest = max(longest, prompt.longest)
        too_far = batch and len(prompt.ids) - len(batch[0][1].ids) > MOST_APART
        too_large = limit is not None and (len(batch) + 1) * longest > limit
        if batch and (len(batch) == most or too_far or too_large):
            yield batch
            batch, longest = [], prompt.longest
        batch.append((index, prompt))
    if batch:
        yield batch


def _continue(
    model: Zaya, rows: Sequence[_Row], rope_base: float, eos_ids: frozenset[int], alive: Callable[[], None]
) -> Iterator[Continuation]:
    """Yield the continuations of a batch."""
    device = model.embedding.weight.device
    length = min(len(row.prompt.ids) for row in rows)
    cache = model.new_cache(len(rows), room=max(row.prompt.longest for row in rows))
    begins_BS = torch.tensor([row.prompt.ids[:length] for row in rows], device=device)
    pieces = begins_BS.split(max(1, PREFILL_TOKENS // len(rows)), dim=1)
    while True:
        for piece_BS in pieces:
            alive()
            logits_B1V = model.decode(piece_BS, cache, rope_base=rope_base, last_only=True)
        # One look at the device for all rows.
        likeliest = logits_B1V[:, 0].argmax(dim=-1).tolist()
        following = []
        for number, row in enumerate(rows):
            token = likeliest[number]  # of a row that has ended, any token does
            if length < len(row.prompt.ids):
                token = row.prompt.ids[length]
            elif row.ended is None:
                prompt = row.prompt
                if prompt.temperature > 0:
                    token = choose(logits_B1V[number, 0], prompt.temperature, prompt.top_p, row.generator)
                row.tokens.append(token)
                row.ended = _ended(row, eos_ids)
                if row.ended is not None:
                    yield Continuation(row.index, row.tokens, row.ended)
            following.append(token)
        if all(row.ended is not None for row in rows):
            return
        length += 1
        pieces = (torch.tensor(following, device=device).unsqueeze(1),)


def _ended(row: _Row, eos_ids: frozenset[int]) -> Ended | None:
    if row.tokens[-1] in eos_ids:
        row.tokens.pop()
        return "end"
    if row.stops(row.tokens[-1]):
        return "stop"
    return "length" if len(row.tokens) == row.prompt.max_new_tokens else None
