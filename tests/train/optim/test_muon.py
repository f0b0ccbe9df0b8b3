"""Muon on batches of matrices is torch's Muon on the matrices themselves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.memory import peak_bytes
from zslurm.train.config import MuonConfig
from zslurm.train.optim import workspace
from zslurm.train.optim.muon import MatrixBatch, Muon

SHAPES = ((3, 8, 24), (1, 24, 8), (2, 16, 16), (4, 5, 9), (2, 33, 64), (1, 1, 7), (2, 8, 24))
RATES = (1e-2, 3e-2, 2e-2)
DECAY = 0.1
SETTINGS = [
    {"scale": scale, "nesterov": nesterov}
    for scale in ("match_rms_adamw", "original")
    for nesterov in (True, False)
]


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1000 * seed + sum(shape)))


def batches_of(shapes: Sequence[tuple[int, ...]], dtype: torch.dtype = torch.float32) -> list[MatrixBatch]:
    return [
        MatrixBatch(noise(*shape).to(dtype), torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype))
        for shape in shapes
    ]


def set_gradients(batches: Sequence[MatrixBatch], step: int) -> None:
    for batch in batches:
        batch.gradient_KMN.copy_(noise(*batch.gradient_KMN.shape, seed=step + 1))


def train(batches: Sequence[MatrixBatch], config: MuonConfig, decay: float = DECAY) -> None:
    muon = Muon(batches, config, decay)
    for step, rate in enumerate(RATES):
        set_gradients(batches, step)
        muon.step(rate)


def trained_by_torch(
    batches: Sequence[MatrixBatch], config: MuonConfig, decay: float = DECAY
) -> list[tuple[Tensor, Tensor]]:
    """Master and momentum [K, M, N] of every batch after torch's Muon took the steps of `train`."""
    parameters = [[nn.Parameter(matrix.clone()) for matrix in batch.master_KMN] for batch in batches]
    optimizer = torch.optim.Muon(
        [parameter for group in parameters for parameter in group],
        weight_decay=decay,
        momentum=config.momentum,
        nesterov=config.nesterov,
        adjust_lr_fn=config.scale,
    )
    for step, rate in enumerate(RATES):
        for batch, group in zip(batches, parameters, strict=True):
            gradient_KMN = noise(*batch.gradient_KMN.shape, seed=step + 1).to(batch.gradient_KMN.dtype)
            for gradient_MN, parameter in zip(gradient_KMN, group, strict=True):
                parameter.grad = gradient_MN
        optimizer.param_groups[0]["lr"] = rate * config.lr_factor
        optimizer.step()  # type: ignore[no-untyped-call]
    return [
        (
            torch.stack([parameter.detach() for parameter in group]),
            torch.stack([optimizer.state[parameter]["momentum_buffer"] for parameter in group]),
        )
        for group in parameters
    ]


def assert_equal(batches: Sequence[MatrixBatch], expected: Sequence[tuple[Tensor, Tensor]], exact: bool) -> None:
    for batch, (master_KMN, momentum_KMN) in zip(batches, expected, strict=True):
        assert torch.equal(batch.momentum_KMN, momentum_KMN)
        if exact:
            assert torch.equal(batch.master_KMN, master_KMN), batch.master_KMN.shape
        else:
            eps = torch.finfo(master_KMN.dtype).eps
            torch.testing.assert_close(batch.master_KMN, master_KMN, rtol=0, atol=200 * eps)


@pytest.fixture
def torchs_in_the_masters_format(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torch's Muon, which rounds to bf16, keep the format that it is given."""
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda tensor: tensor.clone())


@pytest.mark.parametrize("settings", SETTINGS)
def test_it_equals_torchs_optimizer_bit_for_bit_in_bf16(settings: dict[str, Any]) -> None:
    """Through oneDNN; torch's other bf16 products add up a tall matrix in another order than its transpose."""
    config = MuonConfig(**settings)
    batches = batches_of(SHAPES)
    expected = trained_by_torch(batches, config)
    train(batches, config)
    if torch.ops.mkldnn._is_mkldnn_bf16_supported():
        assert_equal(batches, expected, exact=True)
    else:
        for batch, (master_KMN, _) in zip(batches, expected, strict=True):
            torch.testing.assert_close(batch.master_KMN, master_KMN, rtol=0, atol=2e-3)


@pytest.mark.usefixtures("torchs_in_the_masters_format")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("settings", SETTINGS)
def test_it_equals_torchs_optimizer_in_wider_formats(settings: dict[str, Any], dtype: torch.dtype) -> None:
    """fp64 masters are multiplied in fp64, whatever the setting."""
    config = MuonConfig(**settings, dtype="fp32" if dtype == torch.float32 else "bf16")
    batches = batches_of(SHAPES, dtype)
    expected = trained_by_torch(batches, config)
    train(batches, config)
    assert_equal(batches, expected, exact=False)


def test_large_matrices_equal_torchs_too() -> None:
    """They are multiplied in column blocks."""
    config = MuonConfig()
    batches = batches_of(((1, 530, 520),))
    expected = trained_by_torch(batches, config)
    train(batches, config)
    if torch.ops.mkldnn._is_mkldnn_bf16_supported():
        assert_equal(batches, expected, exact=True)
    else:
        torch.testing.assert_close(batches[0].master_KMN, expected[0][0], rtol=0, atol=2e-3)


def test_matrices_have_their_own_learning_rate() -> None:
    """Decay goes with it, as it does in torch's optimizer."""
    slow, reference = batches_of(SHAPES), batches_of(SHAPES)
    train(slow, MuonConfig(lr_factor=0.5))
    muon = Muon(reference, MuonConfig(), DECAY)
    for step, rate in enumerate(RATES):
        set_gradients(reference, step)
        muon.step(rate / 2)
    assert all(torch.equal(a.master_KMN, b.master_KMN) for a, b in zip(slow, reference, strict=True))


@pytest.mark.parametrize("limit", [1, 5000, 2**30])
def test_the_result_does_not_depend_on_how_matrices_are_batched(
    limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    masters_KMN = noise(6, 12, 20)
    one = batches_of(((6, 12, 20),))
    train(one, MuonConfig())

    monkeypatch.setattr(workspace, "CPU_CHUNK_BYTES", limit)
    gradient_KMN, momentum_KMN = torch.zeros(6, 12, 20), torch.zeros(6, 12, 20)
    cuts = (slice(1), slice(1, 1), slice(1, 4), slice(4, 6))
    several = [MatrixBatch(masters_KMN[cut], gradient_KMN[cut], momentum_KMN[cut]) for cut in cuts]
    muon = Muon(several, MuonConfig(), DECAY)
    for step, rate in enumerate(RATES):
        gradient_KMN.copy_(noise(6, 12, 20, seed=step + 1))
        muon.step(rate)
    assert torch.equal(masters_KMN, one[0].master_KMN)
    assert torch.equal(momentum_KMN, one[0].momentum_KMN)


def test_views_of_flat_buffers_are_updated_in_place() -> None:
    """Each tensor has other strides; what is between the matrices is left alone."""
    dense = batches_of(((3, 6, 10),))
    train(dense, MuonConfig())
    flats = [torch.full((400,), float("nan")) for _ in range(3)]
    strides = ((96, 10, 1), (64, 10, 1), (70, 11, 1))
    views = [flat.as_strided((3, 6, 10), stride, 7) for flat, stride in zip(flats, strides, strict=True)]
    for view, start in zip(views, (noise(3, 6, 10), torch.zeros(3, 6, 10), torch.zeros(3, 6, 10)), strict=True):
        view.copy_(start)
    batch = MatrixBatch(*views)
    train([batch], MuonConfig())
    assert torch.equal(batch.master_KMN, dense[0].master_KMN)
    assert torch.equal(batch.momentum_KMN, dense[0].momentum_KMN)
    assert all(flat.isnan().sum() == 400 - 180 for flat in flats)


def test_gradients_are_left_alone() -> None:
    batches = batches_of(SHAPES)
    set_gradients(batches, 0)
    Muon(batches, MuonConfig(), DECAY).step(1e-2)
    for batch in batches:
        assert torch.equal(batch.gradient_KMN, noise(*batch.gradient_KMN.shape, seed=1))


def test_a_zero_gradient_only_decays() -> None:
    batches = batches_of(((2, 4, 6),))
    before = batches[0].master_KMN.clone()
    Muon(batches, MuonConfig(), weight_decay=0.5).step(0.1)
    assert torch.equal(batches[0].master_KMN, before * (1 - 0.1 * 0.5))
    assert batches[0].momentum_KMN.abs().max() == 0


def test_no_matrices_is_no_work() -> None:
    Muon([], MuonConfig(), DECAY).step(1e-2)
    Muon(batches_of(((0, 4, 6),)), MuonConfig(), DECAY).step(1e-2)


def test_steps_are_as_long_as_adamws() -> None:
    """match_rms_adamw: 0.2 per element and unit of learning rate, whatever the shape."""
    for shape in ((1, 32, 128), (1, 128, 32), (1, 64, 64)):
        batches = batches_of((shape,))
        set_gradients(batches, 0)
        before = batches[0].master_KMN.clone()
        Muon(batches, MuonConfig(coefficients="deepseek_v4", steps=10), weight_decay=0.0).step(1.0)
        moved = (batches[0].master_KMN - before).square().mean().sqrt()
        assert moved.item() == pytest.approx(0.2, rel=0.01)


def test_batches_have_one_shape_and_one_format() -> None:
    good = torch.zeros(2, 3, 4)
    with pytest.raises(ValueError, match=r"\[K, M, N\]"):
        MatrixBatch(good, torch.zeros(2, 4, 3), good)
    with pytest.raises(ValueError, match=r"\[K, M, N\]"):
        MatrixBatch(good[0], good[0], good[0])
    with pytest.raises(ValueError, match="format"):
        MatrixBatch(good, good.bfloat16(), good)


def test_temporary_tensors_stay_within_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    batches = batches_of(((48, 32, 64), (16, 32, 64)))
    bound = 6 * workspace.update_bytes(32, 64, itemsize=2, master_itemsize=4)
    monkeypatch.setattr(workspace, "CPU_CHUNK_BYTES", bound)
    muon = Muon(batches, MuonConfig(), DECAY)
    small = 64 * 1024  # norms and the like
    assert bound / 2 < peak_bytes(lambda: muon.step(1e-2)) < bound + small
