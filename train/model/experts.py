"""The experts: SwiGLU networks, each applied to the tokens routed to it. No token is ever dropped.

Choices are sorted by class, so that each expert's rows are together and the skip class, being the last, at the
end. The operations are those of `kernels/experts`, with the products of `kernels/grouped_gemm`: only if these
run in a loop, the host waits for the device once per layer, to learn how many rows each expert has.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from zslurm.kernels.experts import ExpertSums, network, sort
from zslurm.train.config import ModelConfig
from zslurm.train.model.router import Routing


class StackedLinear(nn.Module):
    """One linear map per expert, without biases, in one tensor [experts, outputs, inputs]."""

    def __init__(self, experts: int, inputs: int, outputs: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, outputs, inputs, dtype=dtype))


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
        self.sums: ExpertSums | None = None

    def forward(self, x_TD: Tensor, routing: Routing, valid_T: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the weighted sum of each token's experts, and each class's number of choices [C], int64.

        Tokens if `valid_T` is false (padding) are computed, but not counted.
        """
        order = sort(routing.classes_TK, self.classes, self.experts)
        identity = self.skip_rule == "identity"
        y_TD = network(x_TD, routing.weights_TK, self.gate_up.weight, self.down.weight, order, identity, self.sums)
        counts_C = order.counts_C
        if valid_T is not None:
            # The sum over a mask, not a selection: its size would have to be asked of the device.
            chosen_TKC = routing.classes_TK.unsqueeze(-1) == torch.arange(self.classes, device=x_TD.device)
            counts_C = (chosen_TKC & valid_T[:, None, None]).sum(dim=(0, 1))
        return y_TD, counts_C
