"""The whole model: embedding, layers, tied head.

    model = build(config, seed, dtype=torch.bfloat16, device=device)
    loss_sum, counts_LC = model(tokens_BS, targets_BS, rope_base=phase.rope_base)

Where the experts are a loop, one forward waits for the device once per layer (see `experts.py`); else nowhere.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from train.config import ModelConfig
from train.model.block import Layer, Stream
from train.model.head import IGNORED_TARGET, logits, summed_cross_entropy
from train.model.initial import initial_balancing_bias, initial_tensor
from train.model.norm import StageEntry
from train.model.packing import pack
from train.shapes import tensor_table


class Zaya(nn.Module):
    """A ZAYA1 model. Its parameters hold no useful values until `initialise` or a checkpoint fills them.

    Build it in the format it shall have: `Module.to(dtype)` would round `balancing_bias`, which stays fp32.
    """

    balancing_bias: Tensor

    def __init__(self, config: ModelConfig, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size, dtype=dtype)
        self.layers = nn.ModuleList(Layer(config, dtype, first=layer == 0) for layer in range(config.layers))
        self.head_entry = StageEntry(config.hidden_size, config.norm_eps, dtype)
        bias_LC = torch.empty(config.layers, config.router_classes, dtype=torch.float32)
        self.register_buffer("balancing_bias", bias_LC)
        self._recompute = False

    def run_with(
        self,
        *,
        grouped_gemm: Literal["auto", "on", "off"] = "auto",
        recompute: bool = False,
        compile: bool = False,
        backend: str = "inductor",
    ) -> None:
        """Choose how the layers run; what they compute stays the same.

        Args:
            grouped_gemm: when the experts' products are one call; see `Experts`.
            recompute: keep only each layer's inputs for backward, and run the layer once more there. The
                experts' load is counted in the first run alone.
            compile: compile each layer as one graph, when it is first run.
            backend: torch.compile's backend.
        """
        self._recompute = recompute
        for layer in self.layers:
            assert isinstance(layer, Layer)
            layer.experts.grouped_gemm = grouped_gemm
            if compile:
                layer.compile(fullgraph=True, backend=backend)

    def forward(
        self,
        tokens_BS: Tensor,
        targets_BS: Tensor | None = None,
        *,
        rope_base: float,
        valid_BS: Tensor | None = None,
        document_BS: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Run the model over whole sequences, which start at position 0.

        Args:
            tokens_BS: token ids, int64.
            targets_BS: the tokens to predict; `head.IGNORED_TARGET` marks positions that do not count.
            rope_base: base of the rotary embedding; it belongs to the phase of training.
            valid_BS: bool, false for padding, before or after the tokens; see `packing.py`.
            document_BS: integers that change where a new document begins; see `packing.py`.

        Returns:
            logits [B, S, V] or, with targets, the summed cross-entropy in nats, in at least fp32; and
            counts_LC, how many of the B*S*K choices fell on each router class, int64. Padding is in neither
            loss nor counts.
        """
        x_BSD, counts_LC = self._hidden_states(tokens_BS, rope_base, valid_BS, document_BS)
        if targets_BS is None:
            return logits(x_BSD, self.embedding.weight), counts_LC
        if valid_BS is not None:
            targets_BS = targets_BS.where(valid_BS, IGNORED_TARGET)
        loss = summed_cross_entropy(x_BSD.flatten(0, 1), self.embedding.weight, targets_BS.flatten())
        return loss, counts_LC

    def _hidden_states(
        self, tokens_BS: Tensor, rope_base: float, valid_BS: Tensor | None, document_BS: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        packing = pack(
            torch.arange(tokens_BS.shape[1], device=tokens_BS.device),
            rotary_dim=self.config.rotary_dim,
            rope_base=rope_base,
            reach=max(1, sum(self.config.conv_widths) - 2),
            dtype=torch.promote_types(self.embedding.weight.dtype, torch.float32),
            valid_BS=valid_BS,
            document_BS=document_BS,
        )
        stream = Stream(hidden_BSD=self.embedding(tokens_BS), residual_BSD=None, router_TR=None)
        counts: list[Tensor] = []
        for layer, bias_C in zip(self.layers, self.balancing_bias, strict=True):
            if self._recompute and torch.is_grad_enabled():
                stream, counts_C = checkpoint(
                    layer, stream, packing, bias_C, use_reentrant=False, preserve_rng_state=False
                )
            else:
                stream, counts_C = layer(stream, packing, bias_C)
            counts.append(counts_C)
        x_BSD, _ = self.head_entry(stream.hidden_BSD, stream.residual_BSD)
        return x_BSD, torch.stack(counts)


def build(config: ModelConfig, seed: int, *, dtype: torch.dtype, device: torch.device | str = "cpu") -> Zaya:
    """Make a model with its initial values, without allocating or filling anything twice."""
    with torch.device("meta"):
        model = Zaya(config, dtype)
    model.to_empty(device=device)
    initialise(model, seed)
    return model


@torch.no_grad()
def initialise(model: Zaya, seed: int) -> None:
    """Fill every parameter and buffer; the values depend on the seed and each tensor's name alone."""
    parameters = dict(model.named_parameters())
    for info in tensor_table(model.config):
        parameters[info.name].copy_(initial_tensor(info, model.config, seed))
    model.balancing_bias.copy_(initial_balancing_bias(model.config))
