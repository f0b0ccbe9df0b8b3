"""Compressed convolutional attention and rotary embedding, one property at a time."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tests.train.models import random_like, scrambled, tiny_config
from train.config import ModelConfig
from train.model.attention import CompressedConvolutionalAttention
from train.model.rope import RotaryTable, rotary_table, rotate


def attention_of(config: ModelConfig) -> CompressedConvolutionalAttention:
    attention: CompressedConvolutionalAttention = scrambled(config).layers[0].attention
    return attention.requires_grad_(False)


def inputs(config: ModelConfig, length: int = 6, seed: str = "x") -> Tensor:
    return random_like(torch.empty(1, length, config.hidden_size), seed)


def table(length: int, dim: int, base: float = 100.0) -> RotaryTable:
    return rotary_table(torch.arange(length), dim, base, torch.float64)


def test_second_half_of_the_values_comes_from_the_previous_token() -> None:
    config = tiny_config()
    attention = attention_of(config)
    x_BSD = inputs(config)
    v_BSJP = attention._values(x_BSD)
    torch.testing.assert_close(v_BSJP[:, :, 0], attention.value_current(x_BSD))
    torch.testing.assert_close(v_BSJP[:, 1:, 1], attention.value_previous(x_BSD)[:, :-1])
    assert (v_BSJP[:, 0, 1] == 0).all()


def test_values_of_one_head_are_half_current_half_previous() -> None:
    config = tiny_config(kv_heads=1)
    v_BSJP = attention_of(config)._values(inputs(config))
    assert v_BSJP.shape == (1, 6, 1, 8)
    assert (v_BSJP[:, 0, 0, :4] != 0).all()
    assert (v_BSJP[:, 0, 0, 4:] == 0).all()


def test_second_convolution_sees_the_first_ones_bias_before_the_sequence() -> None:
    attention = attention_of(tiny_config())
    silent = torch.zeros(1, 4, 48, dtype=torch.float64)
    through_both = attention._convolve(silent)
    bias = attention.depthwise_conv.bias
    assert bias is not None
    steady = attention.grouped_conv(bias[None, :, None].expand(1, -1, 2)).transpose(1, 2)
    torch.testing.assert_close(through_both, steady.expand(1, 4, -1))


def test_convolutions_reach_as_far_back_as_their_widths() -> None:
    config = tiny_config(conv_widths=(3, 2))
    attention = attention_of(config)
    z_BSQ = random_like(torch.empty(1, 8, 48), "z")
    changed = z_BSQ.clone()
    changed[:, 2] += 1
    difference = (attention._convolve(changed) - attention._convolve(z_BSQ)).abs().amax(dim=(0, 2))
    assert [bool(d > 1e-9) for d in difference] == [False, False, True, True, True, True, False, False]


def test_queries_and_keys_have_a_fixed_length_and_keys_a_linear_temperature() -> None:
    config = tiny_config()
    attention = attention_of(config)
    attention.temperature.copy_(torch.tensor([0.5, -3.0]))
    q_BSHP, k_BSJP = attention._queries_and_keys(inputs(config))
    length = torch.full((1, 6), math.sqrt(config.head_dim), dtype=torch.float64)
    for head in range(config.query_heads):
        torch.testing.assert_close(q_BSHP[:, :, head].norm(dim=-1), length)
    torch.testing.assert_close(k_BSJP[:, :, 0].norm(dim=-1), 0.5 * length)
    torch.testing.assert_close(k_BSJP[:, :, 1].norm(dim=-1), 3.0 * length)
    attention.temperature.copy_(torch.tensor([0.5, 3.0]))
    torch.testing.assert_close(attention._queries_and_keys(inputs(config))[1][:, :, 1], -k_BSJP[:, :, 1])


def test_temperature_zero_attends_to_all_tokens_equally() -> None:
    config = tiny_config()
    attention = attention_of(config)
    attention.temperature.zero_()
    x_BSD = inputs(config)
    v_BSJP = attention._values(x_BSD)
    so_far = v_BSJP.cumsum(dim=1) / torch.arange(1, 7)[:, None, None]
    expected = attention.output(so_far.repeat_interleave(2, dim=2).flatten(2))
    torch.testing.assert_close(attention(x_BSD, table(6, config.rotary_dim)), expected)


def test_mean_skip_bypasses_the_convolutions() -> None:
    config = tiny_config()
    attention = attention_of(config)
    for convolution in (attention.depthwise_conv, attention.grouped_conv):
        for parameter in convolution.parameters():
            parameter.zero_()
    x_BSD = inputs(config)
    q0 = attention.query(x_BSD).unflatten(-1, (4, 8))
    k0 = attention.key(x_BSD).unflatten(-1, (2, 8))
    mean = (q0 + k0[:, :, [0, 0, 1, 1]]) / 2
    q_BSHP, k_BSJP = attention._queries_and_keys(x_BSD)
    torch.testing.assert_close(q_BSHP, mean / mean.norm(dim=-1, keepdim=True) * math.sqrt(8))
    grouped = (mean[:, :, 0::2] + mean[:, :, 1::2]) / 2
    key = grouped / grouped.norm(dim=-1, keepdim=True) * math.sqrt(8) * attention.temperature[:, None]
    torch.testing.assert_close(k_BSJP, key)


def test_rotation_leaves_position_zero_the_lengths_and_the_other_channels() -> None:
    x_BSHP = random_like(torch.empty(1, 5, 2, 8), "rope")
    turned = rotate(x_BSHP, table(5, 4))
    torch.testing.assert_close(turned[:, 0], x_BSHP[:, 0])
    torch.testing.assert_close(turned.norm(dim=-1), x_BSHP.norm(dim=-1))
    assert torch.equal(turned[..., 4:], x_BSHP[..., 4:])
    assert not torch.isclose(turned[:, 1:, :, :4], x_BSHP[:, 1:, :, :4]).any()


def test_products_of_rotated_vectors_depend_on_their_distance_alone() -> None:
    q, k = (random_like(torch.empty(1, 1, 1, 8), name).expand(1, 20, 1, 8) for name in "qk")
    angles = table(20, 8)
    products = torch.einsum("bshp,bthp->st", rotate(q, angles), rotate(k, angles))
    for distance in range(-5, 6):
        diagonal = products.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal))
    assert (products[0, 1:] - products[0, 0]).abs().min() > 1e-9


def test_first_pair_turns_by_one_radian_per_token_in_halves() -> None:
    x_BSHP = torch.zeros(1, 3, 1, 8, dtype=torch.float64)
    x_BSHP[..., 0] = 1
    turned = rotate(x_BSHP, table(3, 4))[0, :, 0]
    for position in range(3):
        assert turned[position].tolist() == pytest.approx(
            [math.cos(position), 0, math.sin(position), 0, 0, 0, 0, 0]
        )


def test_a_larger_base_turns_the_last_pair_more_slowly() -> None:
    slow, fast = (table(2, 4, base).sin_SA[1, 1].item() for base in (1e4, 1e2))
    assert slow == pytest.approx(math.sin(1e4**-0.5))
    assert fast == pytest.approx(math.sin(1e2**-0.5))
