"""Define the head's product, of operands in at least fp32, and what its loss takes of the logits."""

from __future__ import annotations

import torch
from torch import Tensor


def product(left_MK: Tensor, right_KN: Tensor, out_MN: Tensor) -> None:
    """Write left right."""
    torch.mm(left_MK.to(out_MN.dtype), right_KN.to(out_MN.dtype), out=out_MN)


def losses(
    logits_TV: Tensor, targets_T: Tensor, counted_T: Tensor, z_weight: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-sum-exp and the target's logit of each row [T], and the gradient [T, V] in the logits' place.

    The loss of a row that counts is Z - logit[target] + z_weight Z^2, with Z its log-sum-exp; the gradient is
    (1 + 2 z_weight Z) softmax - onehot(target). Rows that do not count have a gradient of zero.
    """
    log_sum_T = logits_TV.logsumexp(dim=-1)
    target_T1 = targets_T.unsqueeze(-1)
    target_logit_T = logits_TV.gather(-1, target_T1).squeeze(-1)
    gradient_TV = (logits_TV - log_sum_T.unsqueeze(-1)).exp_().mul_((1 + 2 * z_weight * log_sum_T).unsqueeze(-1))
    gradient_TV.scatter_add_(-1, target_T1, -torch.ones_like(gradient_TV[:, :1]))
    gradient_TV.masked_fill_(~counted_T.unsqueeze(-1), 0)
    in_place_TV = in_place_of(logits_TV, dtype)
    return log_sum_T, target_logit_T, in_place_TV.copy_(gradient_TV)


def in_place_of(x_TV: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a matrix of this shape and format, each of whose rows begins at the same address as that of x."""
    return x_TV.view(dtype)[:, : x_TV.shape[1]]
