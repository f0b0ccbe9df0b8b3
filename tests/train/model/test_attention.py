"""Compressed convolutional attention and rotary embedding, one property at a time."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.train.models import autograd_nodes, random_like, scrambled, tiny_config
from zslurm.kernels.qk_conv import qk_conv, rotate
from zslurm.train.config import ModelConfig
from zslurm.train.model.attention import CompressedConvolutionalAttention
from zslurm.train.model.attention_backends.sdpa import attend
from zslurm.train.model.packing import Packing
from zslurm.train.model.rope import RotaryTable, rotary_table


def attention_of(config: ModelConfig) -> CompressedConvolutionalAttention:
    attention: CompressedConvolutionalAttention = scrambled(config).layers[0].attention
    return attention.requires_grad_(False)


def inputs(config: ModelConfig, length: int = 6, seed: str = "x") -> Tensor:
    return random_like(torch.empty(1, length, config.hidden_size), seed)


def values_of(attention: CompressedConvolutionalAttention, x_BSD: Tensor) -> Tensor:
    z_BSQ, current_BSQ, delayed_BSQ = attention.project(x_BSD)
    _, _, previous_BSQ = attention.mix(z_BSQ, delayed_BSQ, Packing(still(x_BSD.shape[1])), None)
    return attention.values(current_BSQ, previous_BSQ).transpose(1, 2)


def queries_and_keys(
    attention: CompressedConvolutionalAttention, x_BSD: Tensor, angles: RotaryTable | None = None
) -> tuple[Tensor, Tensor]:
    """[B, S, H, P] and [B, S, J, P]; not rotated unless angles are given."""
    z_BSQ, _, _ = attention.project(x_BSD)
    rotary = angles or still(x_BSD.shape[1])
    q_BHSP, k_BJSP = qk_conv(z_BSQ, attention.convolutions(), attention.temperature, *rotary)
    return q_BHSP.transpose(1, 2), k_BJSP.transpose(1, 2)


def still(length: int) -> RotaryTable:
    return rotary_table(torch.zeros(length), 4, 100.0, torch.float64)


def table(length: int, dim: int, base: float = 100.0) -> RotaryTable:
    return rotary_table(torch.arange(length), dim, base, torch.float64)


def test_second_half_of_the_values_comes_from_the_previous_token() -> None:
    config = tiny_config()
    attention = attention_of(config)
    x_BSD = inputs(config)
    v_BSJP = values_of(attention, x_BSD)
    torch.testing.assert_close(v_BSJP[:, :, 0], attention.value_current(x_BSD))
    torch.testing.assert_close(v_BSJP[:, 1:, 1], attention.value_previous(x_BSD)[:, :-1])
    assert (v_BSJP[:, 0, 1] == 0).all()


def test_values_of_one_head_are_half_current_half_previous() -> None:
    config = tiny_config(kv_heads=1)
    v_BSJP = values_of(attention_of(config), inputs(config))
    assert v_BSJP.shape == (1, 6, 1, 8)
    assert (v_BSJP[:, 0, 0, :4] != 0).all()
    assert (v_BSJP[:, 0, 0, 4:] == 0).all()


def test_queries_and_keys_have_a_fixed_length_and_keys_a_linear_temperature() -> None:
    config = tiny_config()
    attention = attention_of(config)
    attention.temperature.copy_(torch.tensor([0.5, -3.0]))
    q_BSHP, k_BSJP = queries_and_keys(attention, inputs(config))
    length = torch.full((1, 6), math.sqrt(config.head_dim), dtype=torch.float64)
    for head in range(config.query_heads):
        torch.testing.assert_close(q_BSHP[:, :, head].norm(dim=-1), length)
    torch.testing.assert_close(k_BSJP[:, :, 0].norm(dim=-1), 0.5 * length)
    torch.testing.assert_close(k_BSJP[:, :, 1].norm(dim=-1), 3.0 * length)
    attention.temperature.copy_(torch.tensor([0.5, 3.0]))
    torch.testing.assert_close(queries_and_keys(attention, inputs(config))[1][:, :, 1], -k_BSJP[:, :, 1])


def test_temperature_zero_attends_to_all_tokens_equally() -> None:
    config = tiny_config()
    attention = attention_of(config)
    attention.temperature.zero_()
    x_BSD = inputs(config)
    v_BSJP = values_of(attention, x_BSD)
    so_far = v_BSJP.cumsum(dim=1) / torch.arange(1, 7)[:, None, None]
    expected = attention.output(so_far.repeat_interleave(2, dim=2).flatten(2))
    torch.testing.assert_close(attention(x_BSD, Packing(table(6, config.rotary_dim))), expected)


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
    q_BSHP, k_BSJP = queries_and_keys(attention, x_BSD)
    torch.testing.assert_close(q_BSHP, mean / mean.norm(dim=-1, keepdim=True) * math.sqrt(8))
    grouped = (mean[:, :, 0::2] + mean[:, :, 1::2]) / 2
    key = grouped / grouped.norm(dim=-1, keepdim=True) * math.sqrt(8) * attention.temperature[:, None]
    torch.testing.assert_close(k_BSJP, key)


def test_rotation_leaves_position_zero_the_lengths_and_the_other_channels() -> None:
    x_BHSP = random_like(torch.empty(1, 2, 5, 8), "rope")
    turned = rotate(x_BHSP, *table(5, 4))
    torch.testing.assert_close(turned[:, :, 0], x_BHSP[:, :, 0])
    torch.testing.assert_close(turned.norm(dim=-1), x_BHSP.norm(dim=-1))
    assert torch.equal(turned[..., 4:], x_BHSP[..., 4:])
    assert not torch.isclose(turned[:, :, 1:, :4], x_BHSP[:, :, 1:, :4]).any()


def test_products_of_rotated_vectors_depend_on_their_distance_alone() -> None:
    q, k = (random_like(torch.empty(1, 1, 1, 8), name).expand(1, 1, 20, 8) for name in "qk")
    angles = table(20, 8)
    products = torch.einsum("bhsp,bhtp->st", rotate(q, *angles), rotate(k, *angles))
    for distance in range(-5, 6):
        diagonal = products.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal))
    assert (products[0, 1:] - products[0, 0]).abs().min() > 1e-9


def test_first_pair_turns_by_one_radian_per_token_in_halves() -> None:
    x_SP = torch.zeros(3, 8, dtype=torch.float64)
    x_SP[:, 0] = 1
    turned = rotate(x_SP, *table(3, 4))
    for position in range(3):
        assert turned[position].tolist() == pytest.approx(
            [math.cos(position), 0, math.sin(position), 0, 0, 0, 0, 0]
        )


def test_a_larger_base_turns_the_last_pair_more_slowly() -> None:
    slow, fast = (table(2, 4, base).sin_SA[1, 1].item() for base in (1e4, 1e2))
    assert slow == pytest.approx(math.sin(1e4**-0.5))
    assert fast == pytest.approx(math.sin(1e2**-0.5))


@pytest.mark.parametrize("length", [1, 127, 128, 129, 300])
def test_attention_in_blocks_is_that_of_torch(length: int) -> None:
    q, k, v = (random_like(torch.empty(2, heads, length, 4), f"{heads}").requires_grad_() for heads in (6, 2, 2))
    y_BSQ = attend(q, k, v, None)
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2).flatten(2)
    torch.testing.assert_close(y_BSQ, expected)
    direction = random_like(expected, "direction")
    ours, theirs = (torch.autograd.grad(y, [q, k, v], direction) for y in (y_BSQ, expected))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other)


def test_long_sequences_on_a_cpu_are_left_to_torch() -> None:
    q, k, v = (random_like(torch.empty(1, 1, 1100, 4), name).float().requires_grad_() for name in "qkv")
    assert "_CausalBlocksBackward" not in autograd_nodes(attend(q, k, v, None))
    expected = attend(q[:, :, :1000], k[:, :, :1000], v[:, :, :1000], None)
    torch.testing.assert_close(attend(q, k, v, None)[:, :1000], expected, rtol=1e-4, atol=1e-5)
