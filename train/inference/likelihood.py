"""Log-likelihoods of continuations, many at once: contexts with their continuations, padded on the right.

The model is causal: what is behind a token changes nothing of it, so that padding needs no mask. Inputs that are
the same, such as choices of one token each, are computed once. The logits of a pass exist in portions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from zslurm.train.model.head import default_chunk, logits
from zslurm.train.model.zaya import Zaya

PASS_TOKENS = 8192
"""Tokens of one pass, padding included; a longer input is a pass by itself."""

Pair = tuple[tuple[int, ...], tuple[int, ...]]
"""The tokens of a context, at least one, and of what follows it, at least one."""
Likelihood = tuple[float, bool]
"""Of a continuation: the sum of its tokens' log-probabilities in nats, and whether each is the likeliest."""


def likelihoods(
    model: Zaya,
    pairs: Sequence[Pair],
    *,
    rope_base: float,
    rank: int = 0,
    ranks: int = 1,
    alive: Callable[[], None] = lambda: None,
) -> dict[int, Likelihood]:
    """Return the likelihoods of this rank's share of the pairs, by their places.

    A pair is computed in the same pass on any number of ranks, so that its likelihood is the same bits.

    Args:
        model: the model, on any device; its weights must not change.
        pairs: the pairs of all ranks.
        rope_base: base of the rotary embedding.
        rank: which share is computed.
        ranks: number of shares.
        alive: called before each pass.
    """
    places: dict[tuple[int, ...], list[int]] = {}
    for pair_index, (context, continuation) in enumerate(pairs):
        places.setdefault((context + continuation)[:-1], []).append(pair_index)
    computed: dict[int, Likelihood] = {}
    for inputs in _passes(sorted(places, key=len, reverse=True))[rank::ranks]:
        alive()
        rows = [(row, pair_index) for row, tokens in enumerate(inputs) for pair_index in places[tokens]]
        computed |= _one_pass(
            model, inputs, [(row, pair_index, pairs[pair_index]) for row, pair_index in rows], rope_base
        )
    return computed


@torch.inference_mode()
def _one_pass(
    model: Zaya, inputs: Sequence[tuple[int, ...]], wanted: Sequence[tuple[int, int, Pair]], rope_base: float
) -> dict[int, Likelihood]:
    """Return the likelihoods of `wanted`: row of the input, place of the pair, and the pair."""
    device = model.embedding.weight.device
    longest = len(inputs[0])
    tokens_BS = torch.tensor(
        [[*row_tokens, *[0] * (longest - len(row_tokens))] for row_tokens in inputs], device=device
    )
    x_TD = model.hidden_states(tokens_BS, rope_base=rope_base).flatten(0, 1)
    owners, positions, targets = list[int](), list[int](), list[int]()
    for row, pair_index, (context, continuation) in wanted:
        first = row * longest + len(context) - 1
        positions += range(first, first + len(continuation))
        targets += continuation
        owners += [pair_index] * len(continuation)
    sums = {pair_index: 0.0 for _, pair_index, _ in wanted}
    greedy = dict.fromkeys(sums, True)
    chunk = default_chunk(device.type, model.config.vocab_size)
    for start in range(0, len(positions), chunk):
        selection = slice(start, start + chunk)
        logits_MV = logits(x_TD[torch.tensor(positions[selection], device=device)], model.embedding.weight)
        target_M = torch.tensor(targets[selection], device=device)
        likely_M = logits_MV.gather(-1, target_M.unsqueeze(1)).squeeze(1) - logits_MV.logsumexp(dim=-1)
        greedy_M = logits_MV.argmax(dim=-1) == target_M
        for owner, likely, is_greedy in zip(owners[selection], likely_M.tolist(), greedy_M.tolist(), strict=True):
            sums[owner] += likely
            greedy[owner] &= is_greedy
    return {pair_index: (sums[pair_index], greedy[pair_index]) for pair_index in sums}


def _passes(inputs: Sequence[tuple[int, ...]]) -> list[Sequence[tuple[int, ...]]]:
    """Cut inputs, the longest first, into passes."""
    passes, start = list[Sequence[tuple[int, ...]]](), 0
    while start < len(inputs):
        count = max(1, PASS_TOKENS // len(inputs[start]))
        passes.append(inputs[start : start + count])
        start += count
    return passes
