"""The router: which experts each token goes to, and how much each of them counts.

It works on a narrow state that is handed from layer to layer, so that a layer sees an average over depth
(exponential depth averaging, arXiv 2605.05365). A balancing bias shifts the choice, never the weight of a
class; no gradient reaches it, `zslurm.train.optim.balance` moves it once per optimizer step.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zslurm.kernels.experts import choose
from zslurm.train.config import ModelConfig
from zslurm.train.model.norm import RMSNorm


class Routing(NamedTuple):
    """The router's decision for every token.

    Attributes:
        classes_TK: chosen classes, int64, most preferred first; class E, if there is one, skips.
        weights_TK: their probabilities, in at least fp32, not renormalised over the chosen.
        state_TR: router state that the next layer averages in; None from a linear router.
    """

    classes_TK: Tensor
    weights_TK: Tensor
    state_TR: Tensor | None


class Router(nn.Module):
    """Down-projection, depth average, norm, a three-layer GELU MLP, softmax, choice."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, *, first: bool) -> None:
        super().__init__()
        self.classes_per_token = config.experts_per_token
        width = config.router_hidden_size
        if not first:
            self.previous_scale = nn.Parameter(torch.empty(width, dtype=dtype))
        self.down = nn.Linear(config.hidden_size, width, dtype=dtype)
        self.norm = RMSNorm(width, config.norm_eps, dtype)
        self.first = nn.Linear(width, width, dtype=dtype)
        self.second = nn.Linear(width, width, dtype=dtype)
        self.output = nn.Linear(width, config.router_classes, bias=False, dtype=dtype)

    def forward(self, x_TD: Tensor, previous_TR: Tensor | None, balancing_bias_C: Tensor) -> Routing:
        """Route the stage's normed input; previous_TR is the state of the layer before, None in the first."""
        state_TR = F.linear(x_TD, self.down.weight, self.down.bias)
        if previous_TR is not None:
            state_TR = state_TR + previous_TR * self.previous_scale
        logits_TC = self.output(F.gelu(self.second(F.gelu(self.first(self.norm(state_TR))))))
        return Routing(*choose(logits_TC, balancing_bias_C, self.classes_per_token), state_TR)


class LinearRouter(nn.Module):
    """One matrix and a softmax, every layer by itself: what ZAYA1's router is compared with."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.classes_per_token = config.experts_per_token
        self.output = nn.Linear(config.hidden_size, config.router_classes, bias=False, dtype=dtype)

    def forward(self, x_TD: Tensor, previous_TR: Tensor | None, balancing_bias_C: Tensor) -> Routing:
        """As `Router.forward`; the state of the layer before is not looked at."""
        return Routing(*choose(self.output(x_TD), balancing_bias_C, self.classes_per_token), None)


def make_router(config: ModelConfig, dtype: torch.dtype, *, first: bool) -> Router | LinearRouter:
    """Return the router that the configuration asks for."""
    return LinearRouter(config, dtype) if config.router == "linear" else Router(config, dtype, first=first)
