"""FLOPs per token and peaks: counted by hand, and by torch's own counter."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.train.runs import MODEL
from zslurm.train.config import ModelConfig
from zslurm.train.model.zaya import build
from zslurm.train.shapes import parameter_counts
from zslurm.train.telemetry.flops import PEAKS, peak_of, token_flops


def test_zaya1_base_by_hand() -> None:
    """reference figures: per layer attention 5,575,682 parameters, one expert 12,582,912, router 660,736."""
    every, skipped = (token_flops(ModelConfig(), 4096, share) for share in (0, 1))
    attention_matrices = 2048 * (1024 + 256 + 128 + 128) + 1024 * 2048
    convolutions = 1280 * 2 + 1280 * 128 * 2
    router = 2048 * 256 + 2 * 256 * 256 + 256 * 17
    head = 262_272 * 2048
    keys_and_values = 2 * 40 * 8 * 128 * 4097 / 2
    assert skipped == 6 * (40 * (attention_matrices + convolutions + router) + head + keys_and_values)
    assert every == skipped + 6 * 40 * 12_582_912
    # What is multiplied is nearly all that is active, and the head on top.
    multiplied = (every - 6 * keys_and_values) / 6
    assert multiplied == pytest.approx(parameter_counts(ModelConfig()).active + head, rel=2e-3)


def test_skipped_choices_are_not_counted() -> None:
    for model, share in ((ModelConfig(), 0.25), (ModelConfig(experts_per_token=2), 0.5)):
        every, some, skipped = (token_flops(model, 4096, skip_share) for skip_share in (0, share, 1))
        assert some - skipped == pytest.approx((1 - share) * (every - skipped))
    assert every - skipped == 2 * 6 * 40 * 12_582_912


@pytest.mark.parametrize("router", ["mlp", "linear"])
def test_torch_counts_the_same_products(router: str) -> None:
    """Forward and backward of the real model under torch's FlopCounterMode.

    It sees products that run, so what the model saves or repeats is corrected: causal attention is computed in
    whole blocks (here one, so all keys of a block), the head takes its gradient in forward, both convolutions run
    as one of width 3 for each head, whose weights are their product, and each entry's norm sums the gradient of
    its weight over the tokens by a product.
    """
    config = ModelConfig.model_validate({**MODEL, "router": router, "skip_expert": False, "hidden_size": 64})
    context, batch = 64, 24
    model = build(config, 0, dtype=torch.float32)
    tokens_BS = torch.arange(batch * (context + 1)).view(batch, -1) % config.vocab_size
    in_place = {torch.ops.aten.addmm_: lambda out, left, right, **_: 2 * left[0] * left[1] * right[1]}
    with FlopCounterMode(display=False, custom_mapping=in_place) as counter:
        loss, _ = model(tokens_BS[:, :-1], tokens_BS[:, 1:], rope_base=1e4)
        loss.backward()
    tokens = batch * context
    heads = config.query_heads + config.kv_heads
    width, channels = sum(config.conv_widths) - 1, heads * config.head_dim
    published = channels * config.conv_widths[0] + channels * config.head_dim * config.conv_widths[1]
    joined = channels * config.head_dim * width
    hidden_keys = context - (context + 1) / 2
    expected = token_flops(config, context, 0) * tokens
    expected += 6 * config.layers * tokens * (joined - published)
    expected += 2 * (2 * config.layers + 1) * tokens * config.hidden_size
    expected += 12 * config.layers * tokens * config.query_heads * config.head_dim * hidden_keys
    assert counter.get_total_flops() == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize(
    ("name", "units", "dtype", "tflops"),
    [
        ("AMD Instinct MI300X", 304, "bf16", 1307.4),
        ("AMD Instinct MI300X OAM", 304, "fp32", 163.4),
        ("AMD Instinct MI325X", 304, "bf16", 1307.4),
        ("AMD Instinct MI355X", 256, "bf16", 2516.6),
        ("NVIDIA H100 80GB HBM3", 132, "bf16", 989.4),
        ("NVIDIA H100 PCIe", 114, "bf16", 756.5),
        ("NVIDIA H100 NVL", 132, "bf16", 835.5),
        ("NVIDIA H200", 132, "bf16", 989.4),
        ("NVIDIA H200 NVL", 132, "bf16", 835.5),
        ("NVIDIA A100-SXM4-80GB", 108, "bf16", 312.0),
        ("NVIDIA A100-PCIE-40GB", 108, "fp32", 19.5),
    ],
)
def test_devices_by_the_name_that_torch_gives_them(name: str, units: int, dtype: str, tflops: float) -> None:
    assert peak_of(name, units, dtype) == tflops * 1e12


@pytest.mark.parametrize("name", ["AMD Radeon RX 7900 XTX", "NVIDIA GeForce RTX 4090", "NVIDIA GH100", ""])
def test_a_device_that_is_not_in_the_table_has_no_peak(name: str) -> None:
    assert peak_of(name, 132, "bf16") is None


@pytest.mark.parametrize(
    ("name", "units"),
    [
        ("AMD Instinct MI300X", 38),  # CPX: each of its eight dies is a device of the same name
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", 16),
        ("NVIDIA A100-SXM4-80GB MIG 3g.40gb", 42),
        ("AMD Instinct MI250X / MI250", 104),  # an MI250
    ],
)
def test_a_part_of_a_device_has_not_the_peak_of_the_whole(name: str, units: int) -> None:
    assert peak_of(name, units, "bf16") is None


def test_formats_without_a_figure_have_no_peak() -> None:
    assert peak_of("AMD Instinct MI300X", 304, "fp64") is None


def test_every_row_can_be_reached_and_names_its_source() -> None:
    for row in PEAKS:
        assert peak_of("Some " + " ".join(row.words), row.units, "bf16") == row.bf16 * 1e12
        assert row.source
        assert row.fp32 < row.bf16
