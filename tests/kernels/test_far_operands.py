"""Kernels in Triton on rows that are more than 2^31 elements apart: their offsets do not fit into 32 bits.

The tensors are views of a few rows of a buffer that is otherwise never touched, so they take little memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from tests.kernels.implementations import interpreter
from zslurm.kernels import checks
from zslurm.kernels.dispatch import operations

pytest.importorskip("triton")

_STEP = 2**30 + 16
_ELEMENTS = 2 * _STEP + 2**16
"""Of a buffer: three rows, the last of which starts behind 2^31."""


def _far(rows: Tensor) -> Tensor:
    """Return a copy of three rows whose elements are together, each row far from the one before."""
    view = torch.empty(_ELEMENTS, dtype=rows.dtype).as_strided(rows.shape, (_STEP, *rows.stride()[1:]))
    return view.copy_(rows)


def _queries_and_keys() -> list[tuple[Tensor, Tensor]]:
    from zslurm.kernels.qk_conv import triton

    torch.manual_seed(0)
    z_BSQ = torch.randn(3, 5, 48).bfloat16()
    weight_hIP, temperature_J = torch.randn(3, 48, 16).bfloat16() / 7, torch.randn(1).bfloat16()
    angles, bias_hP = torch.rand(5, 4), torch.randn(3, 16)
    gradients = torch.randn(3, 2, 5, 16).bfloat16(), torch.randn(3, 1, 5, 16).bfloat16()

    def run(z_BSQ: Tensor, grads: Sequence[Tensor]) -> list[Tensor]:
        operands = z_BSQ, weight_hIP, bias_hP, temperature_J, angles.cos(), angles.sin(), None, None
        results = triton.forward(True, *operands)
        return [*results, *triton.backward(*grads, *results[2:], *operands)]

    sequences = run(z_BSQ, gradients), run(_far(z_BSQ), [_far(each) for each in gradients])
    near = z_BSQ[:1, :3], [each[:1, :, :3] for each in gradients]
    of_tokens = _far(near[0][0])[None], [_far(each.transpose(0, 2)).transpose(0, 2) for each in near[1]]
    return [*zip(*sequences, strict=True), *zip(run(*near), run(*of_tokens), strict=True)]


def _products() -> list[tuple[Tensor, Tensor]]:
    from zslurm.kernels.grouped_gemm import triton as grouped
    from zslurm.kernels.symmetric_product import triton as symmetric

    torch.manual_seed(0)
    x_KSL, ends_E = torch.randn(3, 20, 24), torch.tensor([20, 20, 33], dtype=torch.int32)
    rows_NI = torch.randn(40, 20)
    results = []
    for matrices in (x_KSL, _far(x_KSL)):
        out_KSS = torch.empty(3, 20, 20)
        symmetric.symmetric_product(matrices, out_KSS)
        results.append([out_KSS, grouped.multiply(rows_NI, matrices, ends_E)[:33]])
    return list(zip(*results, strict=True))


@pytest.mark.parametrize("run", [_queries_and_keys, _products])
def test_what_is_far_apart_gives_the_same_bits(run: object) -> None:
    for near, far in interpreter().submit(run).result():  # type: ignore[arg-type]
        assert torch.equal(near, far)


def test_products_leave_rows_that_are_too_far_apart_for_their_tiles_to_others() -> None:
    class OnGpu:
        device, dtype = torch.device("cuda"), torch.bfloat16

        def __init__(self, step: int) -> None:
            self.step = step

        def stride(self) -> tuple[int, ...]:
            return 1, self.step, 1

    for step, lacks in ((2**24 - 1, None), (2**24, "rows that are too far apart in memory")):
        operand = OnGpu(step)
        assert checks.lacks_near_elements(operand) == lacks  # type: ignore[arg-type]
        for name, operands in (
            ("grouped_gemm.multiply", (operand, operand, None)),
            ("symmetric_product.product", (operand, operand)),
        ):
            assert operations()[name].implementation("triton").supports(*operands) == lacks
