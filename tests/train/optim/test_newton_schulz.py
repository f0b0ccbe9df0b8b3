"""Newton-Schulz steps: what they leave of the singular values, for any shape, strides and number of matrices."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from zslurm.train.optim.newton_schulz import CoefficientSet, coefficient_schedule, orthogonalise_

SETS: tuple[CoefficientSet, ...] = ("keller", "you", "polar_express", "deepseek_v4")
SHAPES = ((1, 8, 24), (3, 24, 8), (5, 16, 16), (2, 5, 9), (2, 1, 7), (2, 7, 1))


def newton_schulz(
    x_KMN: Tensor,
    *,
    steps: int = 5,
    coefficients: CoefficientSet = "keller",
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    result_KMN = torch.empty(x_KMN.shape, dtype=dtype).copy_(x_KMN)
    orthogonalise_(result_KMN, coefficient_schedule(coefficients, steps))
    return result_KMN


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def ill_conditioned(rows: int, columns: int) -> Tensor:
    """[1, rows, columns] in fp64, with singular values from 1 down to 0.001 in equal distances."""
    u_MS, _, vh_SN = torch.linalg.svd(noise(rows, columns).double(), full_matrices=False)
    values_S = torch.linspace(1, 1e-3, min(rows, columns), dtype=torch.float64)
    matrix: Tensor = u_MS * values_S @ vh_SN
    return matrix.unsqueeze(0)


@pytest.fixture(scope="module")
def matrix() -> Tensor:
    return ill_conditioned(512, 512)  # a longer side changes the cost, not the singular values


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("coefficients", "steps", "mean"),
    [
        ("keller", 5, 0.150),
        ("you", 5, 0.033),
        ("polar_express", 5, 0.084),
        ("deepseek_v4", 10, 0.001),
        ("deepseek_v4", 5, 0.050),
    ],
)
def test_singular_values_end_near_one(
    matrix: Tensor, coefficients: CoefficientSet, steps: int, mean: float, dtype: torch.dtype
) -> None:
    """The figures of the module's text."""
    result = newton_schulz(matrix, steps=steps, coefficients=coefficients, dtype=dtype)
    off_S = (torch.linalg.svdvals(result[0].float()) - 1).abs()
    assert off_S.mean().item() == pytest.approx(mean, abs=0.001)
    assert off_S[:256].max() < 0.25  # the upper half of the spectrum has arrived


@pytest.mark.parametrize("coefficients", SETS)
@pytest.mark.parametrize("shape", SHAPES)
def test_each_step_is_its_polynomial_of_the_singular_values(
    shape: tuple[int, int, int], coefficients: CoefficientSet
) -> None:
    x_KMN = noise(*shape).double()
    result = newton_schulz(x_KMN, steps=4, coefficients=coefficients, dtype=torch.float64)
    for x_MN, y_MN in zip(x_KMN, result, strict=True):
        u_MS, values_S, vh_SN = torch.linalg.svd(x_MN, full_matrices=False)
        values_S = values_S / x_MN.norm()
        for a, b, c in coefficient_schedule(coefficients, 4):
            values_S = a * values_S + b * values_S**3 + c * values_S**5
        torch.testing.assert_close(y_MN, u_MS * values_S @ vh_SN, rtol=0, atol=1e-12)


@pytest.mark.parametrize("coefficients", SETS)
@pytest.mark.parametrize("steps", [1, 2, 3, 5, 8, 10, 12])
def test_there_is_a_triple_for_each_step(coefficients: CoefficientSet, steps: int) -> None:
    assert len(coefficient_schedule(coefficients, steps)) == steps


def test_longer_schedules_go_on_as_documented() -> None:
    assert coefficient_schedule("you", 7)[4:] == coefficient_schedule("you", 5)[4:] * 3
    assert coefficient_schedule("polar_express", 9)[7:] == ((1.875, -1.25, 0.375),) * 2
    assert coefficient_schedule("polar_express", 3) == coefficient_schedule("polar_express", 8)[:3]
    keller, last = coefficient_schedule("keller", 1), (2.0, -1.5, 0.5)
    assert coefficient_schedule("deepseek_v4", 10) == keller * 8 + (last,) * 2
    assert coefficient_schedule("deepseek_v4", 1) == (last,)


@pytest.mark.parametrize("coefficients", SETS)
def test_more_steps_converge(coefficients: CoefficientSet) -> None:
    """No set leaves the region where it is stable, however often it is repeated."""
    values_S = torch.linalg.svdvals(
        newton_schulz(ill_conditioned(16, 48), steps=30, coefficients=coefficients)[0].float()
    )
    assert 0.6 < values_S.min() < values_S.max() < 1.25


@pytest.mark.parametrize("steps", [4, 5])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_matrix_does_not_depend_on_the_others(shape: tuple[int, int, int], steps: int) -> None:
    x_KMN = noise(*shape)
    together = newton_schulz(x_KMN, steps=steps)
    alone = torch.cat([newton_schulz(x_MN.unsqueeze(0), steps=steps) for x_MN in x_KMN])
    assert torch.equal(together, alone)


def test_tall_and_wide_are_each_others_transposes() -> None:
    x_KMN = noise(2, 12, 40)
    wide, tall = (newton_schulz(x, dtype=torch.float64) for x in (x_KMN, x_KMN.mT))
    torch.testing.assert_close(tall.mT, wide, rtol=0, atol=1e-14)


@pytest.mark.parametrize("shape", [(0, 4, 8), (3, 0, 8), (3, 8, 0)])
def test_nothing_gives_nothing(shape: tuple[int, int, int]) -> None:
    assert newton_schulz(torch.empty(shape)).shape == shape


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_zeros_stay_zeros_beside_other_matrices(dtype: torch.dtype) -> None:
    x_KMN = noise(3, 4, 8)
    x_KMN[1] = 0
    result = newton_schulz(x_KMN, dtype=dtype)
    assert result[1].abs().max() == 0
    assert result[[0, 2]].isfinite().all() and result[0].abs().max() > 0.1


def test_the_length_of_a_matrix_does_not_matter() -> None:
    x_KMN = noise(1, 16, 32)
    for factor in (2.0**-20, 2.0**20):
        assert torch.equal(newton_schulz(x_KMN * factor), newton_schulz(x_KMN))
