"""Decoding with a cache that ranks divide equals decoding on one rank, for any split."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from tests.train.models import ROPE_BASE, random_like, scrambled, tiny_config, tokens
from tests.train.ranks import in_group
from zslurm.train.context.context_parallel import ContextParallel
from zslurm.train.context.tree_attention import DividedCache, partial_attention
from zslurm.train.model.generate import generate

PIECES = {torch.float64: [[9], [1] * 9, [4, 1, 1, 3]], torch.float32: [[4, 1, 1, 3]]}
GENERATED = {"max_new_tokens": 10, "rope_base": ROPE_BASE, "temperature": 0.7, "seed": 3}


@dataclass(frozen=True)
class Listed(DividedCache):
    """A cache in which the keeper of each token is listed."""

    keepers: tuple[int, ...] = ()

    def keeps(self, position_S: Tensor) -> Tensor:
        return torch.tensor(self.keepers)[position_S] == self.rank


def splits(ranks: int) -> list[tuple[int, ...]]:
    """Blocks, everything on the first or the last rank, and drawn ones: some ranks begin or stay empty."""
    drawn = np.random.default_rng(7).integers(0, ranks, (3, 9)).tolist()
    return [(0,) * 9, (ranks - 1,) * 9, tuple(place % ranks for place in range(9)), *map(tuple, drawn)]


def every_split(group: dist.ProcessGroup) -> list[tuple[NDArray[Any], list[int]]]:
    """Logits of a text in pieces, and how many tokens this rank holds, for each split."""
    found = []
    for dtype, ways in PIECES.items():
        model = scrambled(tiny_config(), dtype)
        tokens_BS = tokens(model.config)
        for keepers in splits(dist.get_world_size(group)):
            for pieces in ways:
                cache = model.new_cache(2, room=2, divided=Listed(group, keepers=keepers))
                parts = [model.decode(x, cache, rope_base=ROPE_BASE) for x in tokens_BS.split(pieces, dim=1)]
                found.append((torch.cat(parts, dim=1).numpy(), [cache.held, cache.length]))
    return found


def prefilled(group: dist.ProcessGroup, length: int, narrow: bool) -> NDArray[Any]:
    """Logits from the end of a prompt on, which the ranks read together."""
    model = scrambled(tiny_config(conv_widths=(1, 2)) if narrow else tiny_config())
    tokens_BS = tokens(model.config)
    cache = model.new_cache(2, room=1, divided=DividedCache(group, block=1))
    context = ContextParallel(group)
    parts = [model.prefill(tokens_BS[:, :length], cache, context, rope_base=ROPE_BASE)]
    parts += [model.decode(x, cache, rope_base=ROPE_BASE) for x in tokens_BS[:, length:].split(1, dim=1)]
    assert cache.length == 9
    return torch.cat(parts, dim=1).numpy()


def text_of(group: dist.ProcessGroup, prompt: list[int]) -> list[int]:
    model = scrambled(tiny_config())
    return list(generate(model, prompt, divided=DividedCache(group, block=2), **GENERATED))


@pytest.mark.parametrize("ranks", [2, 3])
def test_any_split_gives_the_logits_of_one_rank(ranks: int) -> None:
    found = in_group(every_split, ranks)
    tolerance, whole = {"float64": 1e-12, "float32": 1e-5}, {}
    for dtype in PIECES:
        model = scrambled(tiny_config(), dtype)
        with torch.no_grad():
            logits, _ = model(tokens(model.config), rope_base=ROPE_BASE)
        whole[logits.numpy().dtype.name] = logits.numpy()
    for case in zip(*found, strict=True):
        for logits, _ in case:
            name = logits.dtype.name
            np.testing.assert_allclose(logits, whole[name], rtol=tolerance[name], atol=tolerance[name])
        held, lengths = zip(*(kept for _, kept in case), strict=True)
        assert (sum(held), set(lengths)) == (9, {9}), "every token is kept once"
    assert {logits.dtype.name for logits, _ in found[0]} == set(whole)
    assert any(kept[0] == 0 for by_rank in found for _, kept in by_rank), "some are empty"


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("length", [6, 7, 8])
def test_a_prompt_is_read_as_in_training_and_continued(ranks: int, length: int) -> None:
    """Of some lengths the chunks are padded, so that the last token is not in the last chunk."""
    model = scrambled(tiny_config(conv_widths=(1, 2)) if ranks == 3 else tiny_config())
    with torch.no_grad():
        whole, _ = model(tokens(model.config), rope_base=ROPE_BASE)
    for found in in_group(prefilled, ranks, length, ranks == 3):
        np.testing.assert_allclose(found, whole[:, length - 1 :], rtol=1e-10, atol=1e-10)


def test_ranks_make_the_text_of_one_rank() -> None:
    prompt = [3, 1, 4, 1, 5]
    alone = list(generate(scrambled(tiny_config()), prompt, **GENERATED))
    assert in_group(text_of, 2, prompt) == [alone, alone]


def test_a_part_of_the_keys_has_its_log_sum_exp() -> None:
    q, k, v = (random_like(torch.empty(2, heads, 5, 8), str(heads)) for heads in (4, 2, 2))
    out, lse = partial_attention(q, k, v, None)
    torch.testing.assert_close(out, F.scaled_dot_product_attention(q, k, v, enable_gqa=True))
    scores = q @ k.repeat_interleave(2, dim=1).mT / math.sqrt(8)
    torch.testing.assert_close(lse, scores.logsumexp(-1, keepdim=True))


def test_without_keys_there_is_nothing_and_no_nan() -> None:
    q, k = torch.randn(1, 4, 3, 8), torch.randn(1, 2, 0, 8)
    unseen = torch.zeros(3, 5, dtype=torch.bool)
    some = torch.randn(1, 2, 5, 8)
    for out, lse in (partial_attention(q, k, k, None), partial_attention(q, some, some, unseen)):
        assert not out.any()
        assert lse.isneginf().all()


def test_scores_of_any_size_stay_finite() -> None:
    q = torch.full((1, 2, 1, 8), 1e18)
    out, lse = partial_attention(q, q.clone(), torch.ones(1, 2, 1, 8), None)
    assert out.isfinite().all() and lse.isfinite().all()
