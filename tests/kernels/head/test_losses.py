"""Losses and gradient of logits in their place: every implementation against autograd in fp64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.kernels.implementations import implementations
from zslurm.kernels.head import losses
from zslurm.kernels.head.reference import in_place_of

pytest.importorskip("triton")

RUNS = implementations(losses)


def drawn(rows: int, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(rows + columns)
    counted_T = torch.ones(rows, dtype=torch.bool)
    counted_T[1::3] = False
    return 5 * torch.randn(rows, columns), torch.randint(columns, (rows,)), counted_T


def exact(logits_TV: Tensor, targets_T: Tensor, counted_T: Tensor, z_weight: float) -> tuple[Tensor, Tensor]:
    """Log-sum-exp and the gradient, by autograd."""
    wide_TV = logits_TV.double().requires_grad_()
    log_sum_T = wide_TV.logsumexp(dim=-1)
    rows_T = F.cross_entropy(wide_TV, targets_T, reduction="none") + z_weight * log_sum_T.square()
    (gradient_TV,) = torch.autograd.grad(rows_T.where(counted_T, 0).sum(), wide_TV)
    return log_sum_T.detach(), gradient_TV


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
@pytest.mark.parametrize(("rows", "columns"), [(4, 1), (5, 999), (3, 9000), (2, 17_001), (0, 8)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("z_weight", [0.0, 0.1])
def test_losses_and_gradient_are_those_of_fp64(
    run: Callable[..., Any], rows: int, columns: int, dtype: torch.dtype, z_weight: float
) -> None:
    logits_TV, targets_T, counted_T = drawn(rows, columns)
    expected_T, expected_TV = exact(logits_TV, targets_T, counted_T, z_weight)
    of_target_T = logits_TV.gather(-1, targets_T.unsqueeze(-1)).squeeze(-1)
    log_sum_T, target_logit_T, gradient_TV = run(logits_TV.clone(), targets_T, counted_T, z_weight, dtype)
    torch.testing.assert_close(log_sum_T.double(), expected_T, rtol=1e-6, atol=1e-6)
    assert torch.equal(target_logit_T, of_target_T)
    assert gradient_TV.dtype == dtype
    # Triton's interpreter truncates to bf16, where GPUs round.
    unit = {torch.bfloat16: 2**-7, torch.float32: 1e-5}[dtype]
    assert ((gradient_TV.double() - expected_TV).abs() <= unit * expected_TV.abs() + 2e-6).all()
    assert not gradient_TV[~counted_T].any()


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_the_gradient_is_in_the_place_of_the_logits(run: Callable[..., Any]) -> None:
    """Rows of a larger matrix, and nothing next to them."""
    logits_TV, targets_T, counted_T = drawn(4, 9000)
    whole = torch.full((6, 9000), 7.0)
    whole[1:5] = logits_TV
    _, _, gradient_TV = run(whole[1:5], targets_T, counted_T, 0.0, torch.bfloat16)
    assert torch.equal(in_place_of(whole, torch.bfloat16)[1:5], gradient_TV)
    assert (whole[[0, 5]] == 7).all()


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_shows_in_its_row_alone(run: Callable[..., Any], value: float) -> None:
    """-inf is a class that never comes."""
    logits_TV, _, counted_T = drawn(4, 1000)
    targets_T = torch.full((4,), 7)
    logits_TV[2, 0] = value
    log_sum_T, _, gradient_TV = run(logits_TV, targets_T, torch.ones_like(counted_T), 0.0, torch.float32)
    assert log_sum_T.isfinite().tolist() == [True, True, value == float("-inf"), True]
    assert gradient_TV.isfinite().all(dim=-1).tolist() == [True, True, value == float("-inf"), True]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logits": torch.zeros(2, 3).bfloat16()}, "logits is bfloat16"),
        ({"targets": torch.zeros(3, dtype=torch.int64)}, r"targets has the shape \[3\], but must have \[2\]"),
        ({"targets": torch.zeros(2, dtype=torch.int32)}, "targets is int32"),
        ({"counted": torch.zeros(2)}, "counted is float32"),
        ({"dtype": torch.float64}, "a gradient in float64 does not fit in the place of the logits"),
        ({"logits": torch.zeros(3, 2).T}, "does not fit in the place"),
    ],
)
def test_wrong_operands_are_refused(change: dict[str, Any], message: str) -> None:
    operands: dict[str, Any] = {
        "logits": torch.zeros(2, 3),
        "targets": torch.zeros(2, dtype=torch.int64),
        "counted": torch.ones(2, dtype=torch.bool),
        "z": 0.0,
        "dtype": torch.bfloat16,
    }
    with pytest.raises(ValueError, match=f"^head.losses: .*{message}"):
        losses(*(operands | change).values())
