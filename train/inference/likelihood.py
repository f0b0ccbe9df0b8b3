"""Log-likelihoods of continuations, many at once: each context is read once, however many continuations it has.

    short ones      a context with all of its continuations is one row of a pass (`branches.py`)
    long ones       contexts in one pass; of those with several continuations the cache stays, and these continue
                    forks of it, which share its pages
    one token       such a continuation needs nothing more: the context's last logits have it
    shared prefix   of all contexts (few-shot examples, a description) can be read once for all of them

Sequences are scored in passes of PASS_TOKENS tokens; the logits of a pass exist in portions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from zslurm.train.inference.branches import Tokens, Tree, hidden_of_trees
from zslurm.train.inference.forward import Decoder
from zslurm.train.inference.pages import Pages
from zslurm.train.model.head import default_chunk, logits
from zslurm.train.model.zaya import Zaya

PASS_TOKENS = 4096
TREE_TOKENS = 512
"""Of a context with its continuations, up to which they are computed in one pass."""
_SLOTS = 512
_MASKED = 1 << 23  # pairs of queries and keys of a pass of trees: half a GiB of scores with 16 heads in fp32


class Asked(NamedTuple):
    """A context, at least one token, and its continuations, at least one token each."""

    context: Tokens
    continuations: tuple[Tokens, ...]

    @property
    def tokens(self) -> int:
        """Return how many tokens the model has to see for it."""
        return len(self.context) + sum(len(each) - 1 for each in self.continuations)


class Likelihood(NamedTuple):
    """Of a continuation: the sum of its tokens' log-probabilities in nats, and whether each is the likeliest."""

    log_likelihood: float
    greedy: bool


class _Counted(NamedTuple):
    """A token whose likelihood counts: the row of the hidden states before it, and whose it is."""

    row: int
    target: int
    owner: tuple[int, int]


@dataclass
class _Part:
    """Next tokens of one sequence, and what is counted of them, by rows among them."""

    slot: int
    tokens: Tokens
    counted: list[_Counted]


class LikelihoodScorer:
    """Scores continuations with a model whose weights do not change meanwhile."""

    def __init__(self, model: Zaya, rope_base: float, alive: Callable[[], None] = lambda: None) -> None:
        """Prepare; `alive` is called before each pass."""
        self._pages = Pages(model, slots=_SLOTS)
        self._decoder = Decoder(self._pages, rope_base)
        self._embedding_VD = model.embedding.weight
        self._alive = alive
        self._prefix: tuple[Tokens, int] | None = None
        self.computed_tokens = 0

    def share(self, prefix: Tokens) -> None:
        """Read what the contexts that follow begin with; () forgets it."""
        if self._prefix is not None:
            self._pages.free(self._prefix[1])
            self._prefix = None
        if prefix:
            slot = self._pages.add()
            for start in range(0, len(prefix), PASS_TOKENS):
                self._hidden([_Part(slot, prefix[start : start + PASS_TOKENS], [])])
            self._prefix = prefix, slot

    def score(self, asked: Sequence[Asked]) -> list[list[Likelihood]]:
        """Return the likelihood of each continuation of each context."""
        found = [[Likelihood(0.0, True)] * len(each.continuations) for each in asked]
        trees = [index for index, each in enumerate(asked) if self._is_tree(each)]
        others = sorted(set(range(len(asked))) - set(trees))
        before = 0 if self._prefix is None else len(self._prefix[0])
        for places in _tree_passes([asked[index].tokens - before for index in trees], before):
            self._score_trees([(trees[place], asked[trees[place]]) for place in places], found)
        for places in _passes([asked[index].tokens for index in others], _SLOTS // 4):
            self._score([(others[place], asked[others[place]]) for place in places], found)
        return found

    def _is_tree(self, asked: Asked) -> bool:
        """Return whether a context with its continuations is to be one row."""
        if self._prefix is not None and not _follows(asked.context, self._prefix[0]):
            return False
        return len(asked.continuations) > 1 and asked.tokens <= TREE_TOKENS

    def _score_trees(self, chosen: Sequence[tuple[int, Asked]], found: list[list[Likelihood]]) -> None:
        prefix, slot = self._prefix or ((), None)
        trees, counted, first = list[Tree](), list[_Counted](), 0
        for index, (context, continuations) in chosen:
            tree = Tree(context[len(prefix) :], tuple(each[:-1] for each in continuations))
            trees.append(tree)
            row = first + len(tree.context)
            counted += [_Counted(row - 1, each[0], (index, j)) for j, each in enumerate(continuations)]
            for j, each in enumerate(continuations):
                counted += [_Counted(row + place, token, (index, j)) for place, token in enumerate(each[1:])]
                row += len(each) - 1
            first += tree.size
        self._alive()
        self.computed_tokens += first
        self._count(hidden_of_trees(self._decoder, trees, slot), counted, found)

    def _score(self, chosen: Sequence[tuple[int, Asked]], found: list[list[Likelihood]]) -> None:
        parts: list[_Part] = []
        for index, each in chosen:
            slot, context = self._begin(each.context)
            if len(each.continuations) == 1:
                (only,) = each.continuations
                counted = [
                    _Counted(len(context) - 1 + place, token, (index, 0)) for place, token in enumerate(only)
                ]
                parts.append(_Part(slot, context + only[:-1], counted))
            else:
                firsts = [
                    _Counted(len(context) - 1, those[0], (index, j)) for j, those in enumerate(each.continuations)
                ]
                parts.append(_Part(slot, context, firsts))
        self._count_parts(parts, found)
        longer = [
            (part.slot, index, j, those)
            for part, (index, each) in zip(parts, chosen, strict=True)
            if len(each.continuations) > 1
            for j, those in enumerate(each.continuations)
            if len(those) > 1
        ]
        for places in _passes([len(those) for *_, those in longer], self._pages.free_slots):
            forks = []
            for slot, index, j, those in (longer[place] for place in places):
                counted = [_Counted(place, token, (index, j)) for place, token in enumerate(those[1:])]
                forks.append(_Part(self._pages.fork(slot), those[:-1], counted))
            self._count_parts(forks, found)
            for fork in forks:
                self._pages.free(fork.slot)
        for part in parts:
            self._pages.free(part.slot)

    def _begin(self, context: Tokens) -> tuple[int, Tokens]:
        """Return a slot for the context, and what it has not seen of it."""
        if self._prefix is not None:
            prefix, slot = self._prefix
            if _follows(context, prefix):
                return self._pages.fork(slot), context[len(prefix) :]
        return self._pages.add(), context

    def _hidden(self, parts: Sequence[_Part]) -> Tensor:
        self._alive()
        self.computed_tokens += sum(len(part.tokens) for part in parts)
        return self._decoder.hidden([part.slot for part in parts], [part.tokens for part in parts])

    def _count_parts(self, parts: Sequence[_Part], found: list[list[Likelihood]]) -> None:
        """Compute some next tokens, and add the likelihoods of what is counted of them."""
        first, counted = 0, list[_Counted]()
        for part in parts:
            counted += [each._replace(row=first + each.row) for each in part.counted]
            first += len(part.tokens)
        self._count(self._hidden(parts), counted, found)

    @torch.inference_mode()
    def _count(self, x_TD: Tensor, counted: Sequence[_Counted], found: list[list[Likelihood]]) -> None:
        """Add the likelihoods of what is counted by these hidden states."""
        rows = [each.row for each in counted]
        chunk = default_chunk(x_TD.device.type, len(self._embedding_VD))
        for places in _runs_of_rows(rows, chunk):
            unique, inverse_M = torch.tensor(rows[places]).unique_consecutive(return_inverse=True)
            logits_RV = logits(x_TD.index_select(0, unique.to(x_TD.device)), self._embedding_VD)
            those = counted[places]
            target_M = torch.tensor([each.target for each in those], device=x_TD.device)
            inverse_M = inverse_M.to(x_TD.device)
            log_sum_R = logits_RV.logsumexp(dim=-1)
            likely_M = logits_RV[inverse_M, target_M] - log_sum_R[inverse_M]
            greedy_M = logits_RV.argmax(dim=-1)[inverse_M] == target_M
            for each, likely, greedy in zip(those, likely_M.tolist(), greedy_M.tolist(), strict=True):
                index, place = each.owner
                before = found[index][place]
                found[index][place] = Likelihood(before.log_likelihood + likely, before.greedy and greedy)


def _follows(context: Tokens, prefix: Tokens) -> bool:
    """Return whether a context begins with a prefix and is longer."""
    return len(context) > len(prefix) and context[: len(prefix)] == prefix


def _passes(tokens: Sequence[int], most: int) -> Iterator[range]:
    """Yield runs of at most so many sequences and, but for one alone, PASS_TOKENS tokens."""
    start = total = 0
    for place, count in enumerate(tokens):
        if place > start and (total + count > PASS_TOKENS or place - start == most):
            yield range(start, place)
            start, total = place, 0
        total += count
    if start < len(tokens):
        yield range(start, len(tokens))


def _tree_passes(sizes: Sequence[int], before: int) -> Iterator[range]:
    """Yield runs of trees, but for one alone of PASS_TOKENS tokens and, padded, _MASKED pairs at most."""
    start = total = longest = 0
    for place, size in enumerate(sizes):
        wide = max(longest, size)
        pairs = (place - start + 1) * wide * (before + wide)
        if place > start and (total + size > PASS_TOKENS or pairs > _MASKED):
            yield range(start, place)
            start, total, wide = place, 0, size
        total, longest = total + size, wide
    if start < len(sizes):
        yield range(start, len(sizes))


def _runs_of_rows(rows: Sequence[int], most: int) -> Iterator[slice]:
    """Yield runs with at most so many different rows; equal ones are beside each other."""
    start = different = 0
    for place, row in enumerate(rows):
        if place == start or row != rows[place - 1]:
            if different == most:
                yield slice(start, place)
                start, different = place, 0
            different += 1
    if start < len(rows):
        yield slice(start, len(rows))
