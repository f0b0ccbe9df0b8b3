"""Decoding with caches equals the full forward; caches are as small as they should be; generation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.train.model.reference import reference_of
from tests.train.model.test_parity import draw, model_of
from tests.train.models import ROPE_BASE, scrambled, tiny_config, tokens
from zslurm.train.config import ModelConfig
from zslurm.train.model.cache import bytes_per_token
from zslurm.train.model.generate import choose, generate
from zslurm.train.model.zaya import Zaya

VARIANTS: list[dict[str, Any]] = [
    {},
    {"conv_widths": (3, 4), "experts_per_token": 2},
    {"conv_widths": (1, 1), "skip_rule": "zero", "layers": 3},
    {"query_heads": 3, "kv_heads": 1, "router": "linear"},
]


def decoded(model: Zaya, tokens_BS: Tensor, lengths: list[int], room: int = 3) -> Tensor:
    cache = model.new_cache(batch=tokens_BS.shape[0], room=room)
    pieces = [model.decode(piece, cache, rope_base=ROPE_BASE) for piece in tokens_BS.split(lengths, dim=1)]
    assert cache.length == sum(lengths)
    return torch.cat(pieces, dim=1)


@pytest.mark.parametrize("changes", VARIANTS, ids=str)
@pytest.mark.parametrize("lengths", [[1] * 9, [9], [4, 1, 1, 3], [1, 8]], ids=str)
def test_decoding_is_the_full_forward_however_it_is_cut(lengths: list[int], changes: dict[str, Any]) -> None:
    model = scrambled(tiny_config(**changes))
    tokens_BS = tokens(model.config)
    with torch.no_grad():
        whole, _ = model(tokens_BS, rope_base=ROPE_BASE)
    torch.testing.assert_close(decoded(model, tokens_BS, lengths), whole)


def test_only_the_last_logits_are_computed_when_only_they_are_wanted() -> None:
    model = scrambled(tiny_config())
    tokens_BS = tokens(model.config)
    cache = model.new_cache(batch=2)
    last = model.decode(tokens_BS, cache, rope_base=ROPE_BASE, last_only=True)
    torch.testing.assert_close(last, decoded(model, tokens_BS, [9])[:, -1:])


def test_decoding_in_bf16_is_the_full_forward_in_bf16() -> None:
    model = scrambled(tiny_config(), torch.bfloat16)
    model.balancing_bias[:] = torch.tensor([10.0, 0, 0, 0])  # rounding cannot change the routing
    tokens_BS = tokens(model.config)
    with torch.no_grad():
        whole, _ = model(tokens_BS, rope_base=ROPE_BASE)
    torch.testing.assert_close(decoded(model, tokens_BS, [1] * 9), whole, rtol=0.05, atol=0.1)


def test_the_cache_of_the_published_model_is_eight_times_smaller_than_that_of_full_heads() -> None:
    config = ModelConfig()
    assert bytes_per_token(config, torch.bfloat16) == 40_960
    full_heads = 2 * 40 * 16 * 128 * 2
    assert full_heads == 327_680 == 8 * bytes_per_token(config, torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cache_is_as_large_as_said(dtype: torch.dtype) -> None:
    model = scrambled(tiny_config(layers=3), dtype)
    cache = model.new_cache(batch=2, room=5)
    parts = [part for layer in cache.layers for part in (layer.keys_BJSP, layer.values_BJSP)]
    allocated = sum(part[0, :, 0].numel() * part.element_size() for part in parts)
    assert allocated == bytes_per_token(model.config, dtype) == 2 * 3 * 2 * 8 * dtype.itemsize


def tiny_generation(prompt: list[int], model: Zaya | None = None, **settings: Any) -> list[int]:
    model = model or scrambled(tiny_config(), torch.float32)
    values = {"max_new_tokens": 12, "rope_base": ROPE_BASE} | settings
    return list(generate(model, prompt, **values))


@pytest.mark.parametrize("seed", range(8))
def test_greedy_generation_gives_the_tokens_of_transformers(seed: int) -> None:
    case = draw(seed)
    model = model_of(case)
    prompt_1S = case.tokens_BS[:1]
    reference = reference_of(model, case.rope_base)
    expected = reference.generate(prompt_1S, max_new_tokens=20, do_sample=False)[0, prompt_1S.shape[1] :].tolist()
    assert tiny_generation(prompt_1S[0].tolist(), model, max_new_tokens=20, rope_base=case.rope_base) == expected


def test_greedy_generation_is_the_argmax_of_the_full_forward() -> None:
    model = scrambled(tiny_config(), torch.float32)
    sequence = [3, 1, 4]
    for token in tiny_generation(sequence, model):
        with torch.no_grad():
            logits, _ = model(torch.tensor([sequence]), rope_base=ROPE_BASE)
        assert token == int(logits[0, -1].argmax())
        sequence.append(token)


def test_generation_stops_after_an_end_token_and_yields_it() -> None:
    free = tiny_generation([3, 1, 4])
    stop = free[4]
    assert tiny_generation([3, 1, 4], eos_ids=[stop]) == free[: free.index(stop) + 1]
    assert tiny_generation([3, 1, 4], max_new_tokens=0) == []


def test_tokens_are_yielded_as_they_are_made() -> None:
    stream = generate(scrambled(tiny_config()), [3], max_new_tokens=10**9, rope_base=ROPE_BASE)
    assert [next(stream) for _ in range(3)] == tiny_generation([3], scrambled(tiny_config()), max_new_tokens=3)


def test_draws_are_repeatable_and_depend_on_the_seed() -> None:
    settings = {"temperature": 1.5, "max_new_tokens": 30}
    one, again, other = (tiny_generation([5], **settings, seed=seed) for seed in (1, 1, 2))
    assert one == again != other


def test_a_long_prompt_is_read_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = tokens(tiny_config(), batch=1, length=23)[0].tolist()
    whole = tiny_generation(prompt)
    monkeypatch.setattr("zslurm.train.model.generate._PREFILL_TOKENS", 5)
    assert tiny_generation(prompt) == whole


def test_top_p_draws_from_the_fewest_tokens_that_reach_it() -> None:
    logits = torch.tensor([0.15, 0.5, 0.05, 0.3]).log()
    generator = torch.Generator().manual_seed(0)
    seen = {top_p: {choose(logits, 1.0, top_p, generator) for _ in range(300)} for top_p in (0.01, 0.5, 0.7, 1.0)}
    assert seen == {0.01: {1}, 0.5: {1}, 0.7: {1, 3}, 1.0: {0, 1, 2, 3}}


def test_frequencies_of_draws_follow_the_temperature() -> None:
    logits = torch.tensor([2.0, 0.0])
    generator = torch.Generator().manual_seed(0)
    for temperature in (0.5, 1.0, 4.0):
        share = sum(choose(logits, temperature, 1.0, generator) == 0 for _ in range(2000)) / 2000
        assert share == pytest.approx(torch.sigmoid(torch.tensor(2.0 / temperature)).item(), abs=0.04)
    assert choose(logits, 0.0, 1.0, generator) == 0


@pytest.mark.parametrize(
    "changes", [{"temperature": -1.0}, {"top_p": 0.0}, {"top_p": 1.5}, {"prompt_ids": []}], ids=str
)
def test_settings_without_meaning_are_refused_at_once(changes: dict[str, Any]) -> None:
    values = {"prompt_ids": [1], "max_new_tokens": 3, "rope_base": ROPE_BASE} | changes
    with pytest.raises(ValueError):
        generate(scrambled(tiny_config()), **values)
