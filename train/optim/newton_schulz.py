"""Newton-Schulz steps: push the singular values of matrices towards 1 with matrix products alone.

For a matrix X, divided by its Frobenius norm, one step with the coefficients (a, b, c) is

    A = X X^T        B = b A + c A A        X <- a X + B X

which maps each singular value x to a x + b x^3 + c x^5 and leaves the singular vectors alone. A tall X is
multiplied from the other side (A = X^T X, X <- a X + X B), so that A and B are squares of the shorter side s and
nothing has to be transposed. Cost of a step: 4 s m n + 2 s^3 FLOPs.

The coefficient sets, of one triple (a, b, c) per step:

    keller         (3.4445, -4.7750, 2.0315) in every step. Steep at 0, and does not converge: singular values
                   end between 0.7 and 1.2. Keller Jordan, kellerjordan.github.io/posts/muon; torch.optim.Muon's.
    you            five triples by Jiacheng You, from modded-nanogpt (train_gpt_medium.py); the method:
                   leloykun.github.io/ponder/muon-opt-coeffs. Further steps repeat the last triple.
    polar_express  the minimax polynomials of Polar Express, arXiv 2505.16932, algorithm 1, with its safety
                   factor of 1.01: seven triples, then (1.875, -1.25, 0.375), which converges. Fewer steps take the
                   first ones.
    deepseek_v4    the hybrid schedule of the DeepSeek-V4 report (section 2.4): keller's triple, but in the last
                   two steps (2, -1.5, 0.5), which converges. Published as 8 + 2 steps; n steps are n - 2 and 2
                   (one step is of the second kind).

Mean |singular value - 1| that they leave of a matrix with 512 singular values from 1 down to 0.001 in equal
distances, after 5 steps (deepseek_v4: 10; with 5 it is 0.050): 0.150, 0.033, 0.084 and 0.001, in bf16 and
fp32 alike but for deepseek_v4's 0.0002 in fp32.

On a CPU, matrices whose shorter side has at least `_BLOCKS_FROM` elements are multiplied one by one, and of the
symmetric A and B only the lower half is computed, in column blocks, and mirrored: a quarter of the FLOPs less.
Every block is a product to start, so the shorter side decides what that saves: with one thread a tenth of the time
at 512, a fifth at 768 (`python -m benchmarks optimizer_step`).
Smaller ones, and all on a GPU, go through batched products: a step of any number of matrices is three calls. In
bf16 through oneDNN all of these give the same bits, and torch.optim.Muon's; elsewhere they differ by rounding.

Not done here: symmetric products on a GPU, and Gram Newton-Schulz (products of squares only), which needs fp16
and restarts to be stable.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from zslurm.train.optim.workspace import iteration_bytes, matrices_at_once

CoefficientSet = Literal["keller", "you", "polar_express", "deepseek_v4"]
Triple = tuple[float, float, float]

EPS = 1e-7
"""Smallest norm that a matrix is divided by: a matrix of zeros stays zero."""

_KELLER: Triple = (3.4445, -4.7750, 2.0315)
_CONVERGING: Triple = (2.0, -1.5, 0.5)
_YOU: tuple[Triple, ...] = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)
_POLAR_EXPRESS: tuple[Triple, ...] = (
    *(
        (a / 1.01, b / 1.01**3, c / 1.01**5)
        for a, b, c in (
            (8.28721201814563, -23.595886519098837, 17.300387312530933),
            (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
            (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
            (3.3184196573706015, -2.488488024314874, 0.51004894012372),
            (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
            (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
            (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
        )
    ),
    (1.875, -1.25, 0.375),
)
_BLOCKS_FROM = 512  # elements of the shorter side; below it blocks cost what they save
_BLOCK = 192  # columns of a block


def coefficient_schedule(coefficients: CoefficientSet, steps: int) -> tuple[Triple, ...]:
    """Return the triple (a, b, c) of each step; see the module's text."""
    if coefficients == "keller":
        return (_KELLER,) * steps
    if coefficients == "deepseek_v4":
        return (_KELLER,) * (steps - 2) + (_CONVERGING,) * min(steps, 2)
    table = _YOU if coefficients == "you" else _POLAR_EXPRESS
    return table[:steps] + table[-1:] * (steps - len(table))


@torch.no_grad()
def newton_schulz(
    x_KMN: Tensor,
    *,
    steps: int = 5,
    coefficients: CoefficientSet = "keller",
    dtype: torch.dtype = torch.bfloat16,
    eps: float = EPS,
) -> Tensor:
    """Orthogonalise K matrices of one shape, approximately; x is left as it is.

    Temporary tensors take at most `workspace.CHUNK_BYTES` beside the result (or one matrix's, if that is more).

    Args:
        x_KMN: the matrices, with any strides.
        steps: Newton-Schulz steps.
        coefficients: their polynomials; see the module's text.
        dtype: format of the products and of the result.
        eps: smallest norm that a matrix is divided by.

    Returns:
        [K, M, N] in `dtype`, contiguous.
    """
    out_KMN = torch.empty(x_KMN.shape, dtype=dtype, device=x_KMN.device).copy_(x_KMN)
    schedule = coefficient_schedule(coefficients, steps)
    each = iteration_bytes(x_KMN.shape[1], x_KMN.shape[2], dtype.itemsize)
    for part_KMN in out_KMN.split(matrices_at_once(each, x_KMN.device.type)):
        orthogonalise_(part_KMN, schedule, eps)
    return out_KMN


def orthogonalise_(
    x_KMN: Tensor, schedule: tuple[Triple, ...], eps: float = EPS, *, norms_K: Tensor | None = None
) -> None:
    """Take the Newton-Schulz steps of `schedule` on all matrices of x, in place and in x's format.

    `norms_K` are their Frobenius norms, where the caller has them.
    """
    if not x_KMN.numel():
        return
    if norms_K is None:
        # A norm per matrix and not one call over two dimensions, which adds up in another order than torch's Muon.
        norms_K = torch.stack(torch._foreach_norm(x_KMN.unbind()))
    norms_K11 = norms_K.clamp(min=eps).view(-1, 1, 1)
    y_KMN = torch.empty_like(x_KMN)
    odd = len(schedule) % 2 == 1
    # Each step writes from one into the other; the last one has to write into x.
    start_KMN, other_KMN = (y_KMN, x_KMN) if odd else (x_KMN, y_KMN)
    torch.div(x_KMN, norms_K11, out=start_KMN)
    if x_KMN.device.type == "cpu" and min(x_KMN.shape[1:]) >= _BLOCKS_FROM:
        for start_MN, other_MN in zip(start_KMN.unbind(), other_KMN.unbind(), strict=True):
            _iterate_in_blocks(start_MN, other_MN, schedule)
    else:
        _iterate_batched(start_KMN, other_KMN, schedule)


def _iterate_batched(x_KMN: Tensor, y_KMN: Tensor, schedule: tuple[Triple, ...]) -> None:
    """Step from x to y, from y to x, and so on."""
    tall, short = x_KMN.shape[1] > x_KMN.shape[2], min(x_KMN.shape[1:])
    a_KSS = x_KMN.new_empty(x_KMN.shape[0], short, short)
    b_KSS = torch.empty_like(a_KSS)
    for a, b, c in schedule:
        torch.bmm(*((x_KMN.mT, x_KMN) if tall else (x_KMN, x_KMN.mT)), out=a_KSS)
        torch.baddbmm(a_KSS, a_KSS, a_KSS, beta=b, alpha=c, out=b_KSS)
        torch.baddbmm(x_KMN, *((x_KMN, b_KSS) if tall else (b_KSS, x_KMN)), beta=a, out=y_KMN)
        x_KMN, y_KMN = y_KMN, x_KMN


def _iterate_in_blocks(x_MN: Tensor, y_MN: Tensor, schedule: tuple[Triple, ...]) -> None:
    """The same for one matrix, with symmetric products."""
    tall, short = x_MN.shape[0] > x_MN.shape[1], min(x_MN.shape)
    a_SS = x_MN.new_empty(short, short)
    b_SS = torch.empty_like(a_SS)
    for a, b, c in schedule:
        wide_SL = x_MN.T if tall else x_MN
        for rows, columns in _column_blocks(short):
            torch.mm(wide_SL[rows], wide_SL[columns].T, out=a_SS[rows, columns])
        _mirror(a_SS)
        for rows, columns in _column_blocks(short):
            block = a_SS[rows, columns]
            torch.addmm(block, a_SS[rows], a_SS[:, columns], beta=b, alpha=c, out=b_SS[rows, columns])
        _mirror(b_SS)
        torch.addmm(x_MN, *((x_MN, b_SS) if tall else (b_SS, x_MN)), beta=a, out=y_MN)
        x_MN, y_MN = y_MN, x_MN


def _column_blocks(size: int) -> list[tuple[slice, slice]]:
    """Columns of each block of a square's lower half, behind their rows, which begin on the diagonal."""
    starts = range(0, size, _BLOCK)
    return [(slice(start, size), slice(start, min(start + _BLOCK, size))) for start in starts]


def _mirror(square_SS: Tensor) -> None:
    """Copy what the blocks hold below the diagonal to above it."""
    for _, columns in _column_blocks(len(square_SS)):
        below = square_SS[columns.stop :, columns]
        # Both copies before the last one take torch's quick way of turning a matrix that is whole.
        square_SS[columns, columns.stop :] = below.contiguous().T.contiguous()
