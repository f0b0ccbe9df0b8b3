"""The parts of a microbatch (train/plan/parts.py), by the trainer's own modules.

Each part is one module with drawn weights and inputs. Forward keeps what backward needs, as in training. Backward
gives the gradients of inputs and weights as new tensors: adding the gradients of other microbatches is not in it.
Choices of experts are drawn evenly, and none skips. Layers run as they are, not compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zslurm.train.config import ModelConfig
from zslurm.train.context.layout import reach
from zslurm.train.model.attention import CompressedConvolutionalAttention
from zslurm.train.model.experts import Experts
from zslurm.train.model.head import summed_losses
from zslurm.train.model.norm import StageEntry
from zslurm.train.model.packing import pack
from zslurm.train.model.router import Routing, make_router
from zslurm.train.parallel.world import DTYPES
from zslurm.train.plan.parts import BOTH

_DEVIATION = 0.02


class BuiltPart:
    """One part with its weights and inputs.

    Attributes:
        call: runs it once, in the pass that was asked for.
    """

    def __init__(self, values: dict[str, Any], device: torch.device) -> None:
        self.model = ModelConfig.model_validate(values["model"])
        self.tokens, self.length, self.rope_base = values["m"], values["n"], values["rope_base"]
        self.device, self.dtype = device, DTYPES[values["dtype"]]
        self.wide = torch.promote_types(self.dtype, torch.float32)
        self.generator = torch.Generator(device).manual_seed(0)
        self.leaves: list[Tensor] = []
        self._make: Callable[[], list[Tensor]] = getattr(self, f"_{values['product']}")()
        self.out = self._make()
        self.call: Callable[[], None] = self._forward
        if values["pass"] == BOTH:
            self.gradients = [torch.ones_like(output) for output in self.out]
            self.call = self._both

    def _forward(self) -> None:
        self.out = self._make()

    def _both(self) -> None:
        self.out = self._make()
        torch.autograd.grad(self.out, self.leaves, self.gradients, allow_unused=True)

    def wrong(self) -> int:
        """Return how many rows of the last results have something else than numbers."""
        rows = (output.detach().reshape(-1, output.shape[-1] if output.dim() else 1) for output in self.out)
        return sum(int((~output.isfinite().all(dim=1)).sum()) for output in rows)

    def _drawn(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.randn(*shape, dtype=dtype or self.dtype, device=self.device, generator=self.generator)

    def _leaf(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        leaf = self._drawn(*shape, dtype=dtype).requires_grad_()
        self.leaves.append(leaf)
        return leaf

    def _weights(self, module: nn.Module) -> nn.Module:
        """Give a module weights: matrices are drawn, scales and biases 1."""
        module.to(self.device)
        for parameter in module.parameters():
            with torch.no_grad():
                if parameter.dim() > 1:
                    parameter.copy_(self._drawn(*parameter.shape) * _DEVIATION)
                else:
                    parameter.fill_(1.0)
            self.leaves.append(parameter)
        return module

    def _embedding(self) -> Callable[[], list[Tensor]]:
        weight = self._leaf(self.model.vocab_size, self.model.hidden_size)
        tokens = self._classes(self.model.vocab_size)
        return lambda: [F.embedding(tokens, weight)]

    def _stage_entry(self) -> Callable[[], list[Tensor]]:
        module = self._weights(StageEntry(self.model.hidden_size, self.model.norm_eps, self.dtype))
        hidden = self._leaf(*self._shape)
        residual = self._leaf(*self._shape, dtype=self.wide)
        return lambda: list(module(hidden, residual))

    def _attention(self) -> Callable[[], list[Tensor]]:
        module = self._weights(CompressedConvolutionalAttention(self.model, self.dtype))
        packing = pack(
            torch.arange(self.length, device=self.device), rotary_dim=self.model.rotary_dim,
            rope_base=self.rope_base, reach=reach(self.model), dtype=self.wide,
        )  # fmt: skip
        x = self._leaf(*self._shape)
        return lambda: [module(x, packing)]

    def _router(self) -> Callable[[], list[Tensor]]:
        module = self._weights(make_router(self.model, self.dtype, first=False))
        x = self._leaf(self.tokens, self.model.hidden_size)
        linear = self.model.router == "linear"
        previous = None if linear else self._leaf(self.tokens, self.model.router_hidden_size)
        bias = torch.zeros(self.model.router_classes, device=self.device)

        def make() -> list[Tensor]:
            routing = module(x, previous, bias)
            return [routing.weights_TK] if routing.state_TR is None else [routing.weights_TK, routing.state_TR]

        return make

    def _experts(self) -> Callable[[], list[Tensor]]:
        module = self._weights(Experts(self.model, self.dtype))
        x = self._leaf(self.tokens, self.model.hidden_size)
        choices = self.model.experts_per_token
        first = self._classes(self.model.experts)
        classes = torch.stack([(first + number) % self.model.experts for number in range(choices)], dim=1)
        weights = torch.full(
            (self.tokens, choices), 1 / choices, dtype=self.wide, device=self.device
        ).requires_grad_()
        self.leaves.append(weights)
        return lambda: [module(x, Routing(classes, weights, None))[0]]

    def _head(self) -> Callable[[], list[Tensor]]:
        x = self._leaf(self.tokens, self.model.hidden_size)
        weight = (self._drawn(self.model.vocab_size, self.model.hidden_size) * _DEVIATION).requires_grad_()
        self.leaves.append(weight)
        targets = self._classes(self.model.vocab_size)
        return lambda: [summed_losses(x, weight, targets).objective]

    @property
    def _shape(self) -> tuple[int, int, int]:
        return self.tokens // self.length, self.length, self.model.hidden_size

    def _classes(self, count: int) -> Tensor:
        """Draw a class for each token, all of them as often as the others."""
        order = torch.randperm(self.tokens, device=self.device, generator=self.generator)
        return order % count if count <= self.tokens else order * (count // self.tokens)
