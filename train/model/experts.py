"""The experts: SwiGLU networks, each applied to the tokens routed to it. No token is ever dropped.

Tokens are sorted by class, so that each expert's rows lie together and the skip class, being the last, at the
end. Only permutations move rows, forward and backward, so no sum depends on the order of atomic additions.

Cost beyond the matrix products: two permutations of T*K rows of D, and one wait for the device per layer, to
learn how many rows each expert has (`grouped_linear` needs the sizes on the host).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from train.config import ModelConfig
from train.model.router import Routing


class Dispatch(NamedTuple):
    """The order in which rows are sorted by class, and how many rows each class has (both int64)."""

    order_N: Tensor
    counts_C: Tensor


def dispatch_by_class(classes_TK: Tensor, classes: int) -> Dispatch:
    """Sort the T*K choices by class, keeping the order of tokens within a class."""
    sorted_N, order_N = classes_TK.flatten().sort(stable=True)
    ends_C = torch.searchsorted(sorted_N, torch.arange(classes, device=sorted_N.device), right=True)
    return Dispatch(order_N, ends_C.diff(prepend=ends_C.new_zeros(1)))


def grouped_linear(x_NI: Tensor, weight_EOI: Tensor, rows_E: Sequence[int]) -> Tensor:
    """Apply expert e's matrix to the e-th group of consecutive rows; groups may be empty.

    Empty groups are multiplied too: it costs nothing, and every weight gets a gradient in every backward.
    """
    groups = x_NI.split(list(rows_E))
    return torch.cat([F.linear(x, weight) for x, weight in zip(groups, weight_EOI.unbind(), strict=True)])


class StackedLinear(nn.Module):
    """One linear map per expert, without biases, in one tensor [experts, outputs, inputs]."""

    def __init__(self, experts: int, inputs: int, outputs: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, outputs, inputs, dtype=dtype))

    def forward(self, x_NI: Tensor, rows_E: Sequence[int]) -> Tensor:
        return grouped_linear(x_NI, self.weight, rows_E)


class Experts(nn.Module):
    """Sends tokens to their experts and adds up what comes back, weighted by the router."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.experts = config.experts
        self.classes = config.router_classes
        self.skip_rule = config.skip_rule
        hidden, inner = config.hidden_size, config.expert_hidden_size
        self.gate_up = StackedLinear(config.experts, hidden, 2 * inner, dtype)
        self.down = StackedLinear(config.experts, inner, hidden, dtype)

    def forward(self, x_TD: Tensor, routing: Routing, valid_T: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the weighted sum of each token's experts, and each class's number of choices [C], int64.

        Tokens where `valid_T` is false (padding) are computed, but not counted.
        """
        choices = routing.classes_TK.shape[1]
        order_N, counts_C = dispatch_by_class(routing.classes_TK, self.classes)
        x_ND = x_TD.unsqueeze(1).expand(-1, choices, -1).flatten(0, 1).index_select(0, order_N)
        y_ND = self._transform(x_ND, counts_C.tolist())
        y_TKD = y_ND.index_select(0, order_N.argsort()).unflatten(0, (-1, choices))
        y_TD = (y_TKD * routing.weights_TK.to(y_TKD.dtype).unsqueeze(-1)).sum(dim=1)
        if valid_T is not None:
            counts_C = dispatch_by_class(routing.classes_TK[valid_T], self.classes).counts_C
        return y_TD, counts_C

    def _transform(self, x_ND: Tensor, rows_C: list[int]) -> Tensor:
        """What each row's class makes of it, unweighted; the rows are sorted by class."""
        rows_E = rows_C[: self.experts]
        routed, skipped = x_ND.split([sum(rows_E), sum(rows_C[self.experts :])])
        gate, up = self.gate_up(routed, rows_E).chunk(2, dim=-1)
        y = self.down(F.silu(gate) * up, rows_E)
        return torch.cat([y, skipped if self.skip_rule == "identity" else torch.zeros_like(skipped)])
