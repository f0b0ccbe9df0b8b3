"""Continue many prompts of different lengths at once: continuous batching over caches in pages.

    prompts wait in their order
    loop:  as many as there are slots and pages for begin: their prompts are read in passes of PREFILL_TOKENS
           every running sequence gets its next token, in one pass
           a sequence that ends leaves its slot and pages to the next prompt at once

Prompts that begin together and are the same, such as several samples of one question, are read once.

A prompt begins only where its pages suffice for all that it may become, so that no sequence is ever put back.

What is drawn for a prompt depends on its own seed and logits alone, never on what else is computed beside it.
These logits are the same up to rounding: products of other sizes round differently. So the tokens are those of
`train.model.generate.generate`, unless two candidates are within rounding of each other.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from zslurm.checkpoint_tools.quantities import counted
from zslurm.train.inference.forward import Decoder
from zslurm.train.inference.pages import PAGE_TOKENS, Pages, pages_for
from zslurm.train.model.generate import choose
from zslurm.train.model.head import logits
from zslurm.train.model.zaya import Zaya

PREFILL_TOKENS = 2048
"""Tokens of prompts that are read in one pass: bounds the memory of their activations."""

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


@dataclass(frozen=True)
class Continuation:
    """What follows a prompt.

    Attributes:
        index: the prompt's place among all.
        tokens: without the one that ends the text; where a stop string did, with the tokens that it is in.
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
class _Running:
    """A prompt that has begun; `unread` are the tokens that the model has not seen yet."""

    index: int
    prompt: Prompt
    slot: int
    stops: Stops
    generator: torch.Generator
    unread: tuple[int, ...]
    tokens: list[int] = field(default_factory=list)


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
    """Yield the continuation of each prompt as it ends, not in their order. The weights must not change meanwhile.

    Args:
        model: the model, on any device.
        prompts: they are read one after another, as they begin.
        rope_base: base of the rotary embedding.
        eos_ids: tokens that end a text.
        most: prompts that are continued at one time.
        most_tokens: tokens of all sequences that there is memory for; None: no limit.
        stopper: makes, for each prompt that begins, what decides whether its text ends.
        alive: called before each pass.

    Raises:
        ValueError: a prompt is empty, asks for no token, or takes more than `most_tokens` by itself.
    """
    return _Engine(model, rope_base, frozenset(eos_ids), most, most_tokens, stopper, alive).run(prompts)


class _Engine:
    """One call of `generate_batch`."""

    def __init__(
        self,
        model: Zaya,
        rope_base: float,
        eos_ids: frozenset[int],
        most: int,
        most_tokens: int | None,
        stopper: Callable[[int, Prompt], Stops],
        alive: Callable[[], None],
    ) -> None:
        self._pages = Pages(model, slots=most, most_tokens=most_tokens)
        self._decoder = Decoder(self._pages, rope_base)
        self._embedding_VD = model.embedding.weight
        self._eos_ids, self._stopper, self._alive = eos_ids, stopper, alive
        self._promised = 0  # pages that running sequences hold or may still take

    def run(self, prompts: Iterable[Prompt]) -> Iterator[Continuation]:
        """Yield continuations as they end."""
        waiting = enumerate(prompts)
        following = next(waiting, None)
        running: list[_Running] = []
        while following is not None or running:
            begun: list[_Running] = []
            while following is not None and self._fits(following[1]):
                begun.append(self._begin(*following))
                following = next(waiting, None)
            if begun:
                self._read(begun)
                running += begun
            else:
                self._step(running)
            for each in begun or running:
                if (ended := self._ended(each)) is not None:
                    self._promised -= _pages_of(each.prompt)
                    self._pages.free(each.slot)
                    yield Continuation(each.index, each.tokens, ended)
                    each.slot = -1
            running = [each for each in running if each.slot >= 0]

    def _fits(self, prompt: Prompt) -> bool:
        """Return whether the prompt can begin now.

        Raises:
            ValueError: it never can.
        """
        if not prompt.ids or prompt.max_new_tokens < 1:
            raise ValueError("a prompt is empty, or asks for no token: the first token needs one before it")
        wanted, limit = _pages_of(prompt), self._pages.most_pages
        if limit is not None and wanted > limit:
            raise ValueError(
                f"a prompt takes the memory of {counted(wanted * PAGE_TOKENS, 'token')}, there is room for "
                f"{limit * PAGE_TOKENS}"
            )
        return self._pages.free_slots > 0 and (limit is None or self._promised + wanted <= limit)

    def _begin(self, index: int, prompt: Prompt) -> _Running:
        self._promised += _pages_of(prompt)
        generator = torch.Generator().manual_seed(prompt.seed)
        stops = self._stopper(index, prompt)
        return _Running(index, prompt, self._pages.add(), stops, generator, prompt.ids)

    def _read(self, begun: Sequence[_Running]) -> None:
        """Read prompts in passes of so many tokens, and choose the token that follows each."""
        same: dict[tuple[int, ...], list[_Running]] = {}
        for each in begun:
            same.setdefault(each.prompt.ids, []).append(each)
        while unread := [each for each, *_ in same.values() if not each.tokens]:
            left, parts = PREFILL_TOKENS, list[tuple[_Running, tuple[int, ...]]]()
            for each in unread:
                if left:
                    part = each.unread[:left]
                    parts.append((each, part))
                    left -= len(part)
            self._alive()
            x_TD = self._decoder.hidden([each.slot for each, _ in parts], [part for _, part in parts])
            last_B = torch.tensor([len(part) for _, part in parts]).cumsum(0) - 1
            for each, part in parts:
                each.unread = each.unread[len(part) :]
            whole = [row for row, (each, _) in enumerate(parts) if not each.unread]
            chosen, rows = list[_Running](), list[int]()
            for row in whole:
                first, *others = same[parts[row][0].prompt.ids]
                for other in others:
                    self._pages.free(other.slot)
                    other.slot = self._pages.fork(first.slot)
                chosen += [first, *others]
                rows += [row] * (1 + len(others))
            if chosen:
                self._choose(chosen, x_TD[last_B[rows].to(x_TD.device)])

    def _step(self, running: Sequence[_Running]) -> None:
        """Choose one more token for each."""
        self._alive()
        x_BD = self._decoder.hidden([each.slot for each in running], [each.unread for each in running])
        self._choose(running, x_BD)

    @torch.inference_mode()
    def _choose(self, chosen: Sequence[_Running], x_BD: Tensor) -> None:
        logits_BV = logits(x_BD, self._embedding_VD)
        greedy = [each.prompt.temperature == 0 for each in chosen]
        likeliest = logits_BV.argmax(dim=-1).tolist() if any(greedy) else []
        for row, each in enumerate(chosen):
            if greedy[row]:
                token = likeliest[row]
            else:
                token = choose(logits_BV[row], each.prompt.temperature, each.prompt.top_p, each.generator)
            each.tokens.append(token)
            each.unread = (token,)

    def _ended(self, each: _Running) -> Ended | None:
        if each.tokens[-1] in self._eos_ids:
            each.tokens.pop()
            return "end"
        if each.stops(each.tokens[-1]):
            return "stop"
        return "length" if len(each.tokens) == each.prompt.max_new_tokens else None


def _pages_of(prompt: Prompt) -> int:
    """Return the pages that a prompt may come to take; its last token is chosen, and never read."""
    return pages_for(len(prompt.ids) + prompt.max_new_tokens - 1)
