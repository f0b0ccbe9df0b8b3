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
fp32, but for deepseek_v4's 0.0002 in fp32.

A step of any number of matrices is three calls. A and B are symmetric: whether their upper half is computed or
mirrored is decided in `kernels/symmetric_product`, by device and size. The bits on a CPU are torch.optim.Muon's.

Not done here: Gram Newton-Schulz (products of squares only), which needs fp16 and restarts to be stable.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from zslurm.kernels.symmetric_product import symmetric_polynomial, symmetric_product

CoefficientSet = Literal["keller", "you", "polar_express", "deepseek_v4"]
Triple = tuple[float, float, float]

_SMALLEST_NORM = 1e-7  # that a matrix is divided by: a matrix of zeros stays zero

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


def coefficient_schedule(coefficients: CoefficientSet, steps: int) -> tuple[Triple, ...]:
    """Return the triple (a, b, c) of each step; see the module's text."""
    if coefficients == "keller":
        return (_KELLER,) * steps
    if coefficients == "deepseek_v4":
        return (_KELLER,) * (steps - 2) + (_CONVERGING,) * min(steps, 2)
    table = _YOU if coefficients == "you" else _POLAR_EXPRESS
    return table[:steps] + table[-1:] * (steps - len(table))


def orthogonalise_(x_KMN: Tensor, schedule: tuple[Triple, ...], *, norms_K: Tensor | None = None) -> None:
    """Take the Newton-Schulz steps of `schedule` on all matrices of x, in place and in x's format.

    `norms_K` are their Frobenius norms, if the caller has them.
    """
    if not x_KMN.numel():
        return
    if norms_K is None:
        # A norm per matrix and not one call over two dimensions, which adds up in another order than torch's Muon.
        norms_K = torch.stack(torch._foreach_norm(x_KMN.unbind()))
    norms_K11 = norms_K.clamp(min=_SMALLEST_NORM).view(-1, 1, 1)
    y_KMN = torch.empty_like(x_KMN)
    odd = len(schedule) % 2 == 1
    # Each step writes from one into the other; the last one has to write into x.
    start_KMN, other_KMN = (y_KMN, x_KMN) if odd else (x_KMN, y_KMN)
    torch.div(x_KMN, norms_K11, out=start_KMN)
    _iterate(start_KMN, other_KMN, schedule)


def _iterate(x_KMN: Tensor, y_KMN: Tensor, schedule: tuple[Triple, ...]) -> None:
    """Step from x to y, from y to x, and so on."""
    tall, short = x_KMN.shape[1] > x_KMN.shape[2], min(x_KMN.shape[1:])
    a_KSS = x_KMN.new_empty(x_KMN.shape[0], short, short)
    b_KSS = torch.empty_like(a_KSS)
    for a, b, c in schedule:
        symmetric_product(x_KMN.mT if tall else x_KMN, a_KSS)
        symmetric_polynomial(a_KSS, b, c, b_KSS)
        torch.baddbmm(x_KMN, *((x_KMN, b_KSS) if tall else (b_KSS, x_KMN)), beta=a, out=y_KMN)
        x_KMN, y_KMN = y_KMN, x_KMN
