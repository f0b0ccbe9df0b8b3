"""Continue a prompt, one token after another, with the model's decode cache."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import torch
from torch import Tensor

from zslurm.train.context.context_parallel import ContextParallel
from zslurm.train.context.layout import fits
from zslurm.train.context.tree_attention import DividedCache
from zslurm.train.model.zaya import Zaya

_PREFILL_TOKENS = 1024
"""Tokens of the prompt that are read at one time: bounds the memory of their activations."""


def generate(
    model: Zaya,
    prompt_ids: Sequence[int],
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    eos_ids: Collection[int] = (),
    rope_base: float,
    divided: DividedCache | None = None,
) -> Iterator[int]:
    """Return an iterator of the tokens that follow the prompt, each as soon as it is chosen.

    The model's weights must not change meanwhile. The logits are divided by `temperature` before their softmax
    (at 0 the largest is taken), and the token is drawn from the fewest most probable ones whose probabilities sum
    to at least `top_p`. One of `eos_ids` ends the text, and is yielded last. The same seed gives the same tokens
    on the same kind of machine. Ranks that divide the cache make the text together: all of them call this with the
    same arguments, and get the same tokens.

    Raises:
        ValueError: the prompt is empty, or a setting has no meaning.
    """
    if not prompt_ids:
        raise ValueError("the prompt is empty: the first token needs one before it")
    if temperature < 0 or not 0 < top_p <= 1:
        raise ValueError(f"temperature ({temperature}) must be at least 0 and top_p ({top_p}) in (0, 1]")
    device = model.embedding.weight.device
    generator = torch.Generator().manual_seed(seed)

    def tokens() -> Iterator[int]:
        room = len(prompt_ids) + min(max_new_tokens, 1024)
        cache = model.new_cache(room=-(-room // (divided.size if divided else 1)), divided=divided)
        prompt_1S = torch.tensor([list(prompt_ids)], device=device)
        pieces = prompt_1S.split(_PREFILL_TOKENS, dim=1)
        if divided is not None and fits(model.config, len(prompt_ids), divided.size):
            logits_11V = model.prefill(prompt_1S, cache, ContextParallel(divided.group), rope_base=rope_base)
            pieces = ()
        for made in range(max_new_tokens):
            for piece_1S in pieces:
                logits_11V = model.decode(piece_1S, cache, rope_base=rope_base, last_only=True)
            token = choose(logits_11V[0, 0], temperature, top_p, generator)
            if divided is not None:
                token = divided.same_everywhere(token)
            yield token
            if token in eos_ids or made + 1 == max_new_tokens:
                return
            pieces = (torch.tensor([[token]], device=device),)

    return tokens()


_LEAST = 1e-6
"""A temperature below which nothing but the likeliest token can be drawn."""


@torch.inference_mode()
def choose(logits_V: Tensor, temperature: float, top_p: float, generator: torch.Generator) -> int:
    """Choose one token by its logits; draws are made on the CPU, whatever device the logits are on."""
    if temperature < _LEAST:  # in effect 0, and dividing by it would leave no number
        return int(logits_V.argmax())
    probabilities_V = (logits_V.cpu() / temperature).softmax(dim=-1)
    if top_p < 1:
        ordered_V, ids_V = probabilities_V.sort(descending=True, stable=True)
        # A token stays if those before it do not reach top_p: at least one does.
        ordered_V *= ordered_V.cumsum(dim=-1) - ordered_V < top_p
        return int(ids_V[torch.multinomial(ordered_V, 1, generator=generator)])
    return int(torch.multinomial(probabilities_V, 1, generator=generator))
