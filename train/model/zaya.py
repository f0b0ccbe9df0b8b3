"""The whole model: embedding, layers, tied head.

    model = build(config, seed, dtype=torch.bfloat16, device=device)
    loss_sum, counts_LC = model(tokens_BS, targets_BS, rope_base=phase.rope_base)

If the experts are a loop, one forward waits for the device once per layer (see `experts.py`); else nowhere.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from zslurm.kernels.experts import ExpertSums, WeightSum
from zslurm.train.config import ModelConfig
from zslurm.train.context.context_parallel import ContextParallel
from zslurm.train.context.halos import last_tokens
from zslurm.train.context.layout import check_chunks, reach
from zslurm.train.context.tree_attention import DividedCache
from zslurm.train.model.attention_backends.packages import FlashAttention, Kernels
from zslurm.train.model.block import Layer, Stream
from zslurm.train.model.cache import Cache
from zslurm.train.model.head import IGNORED_TARGET, HeadLoss, logits, summed_losses
from zslurm.train.model.init import initial_balancing_bias, initial_tensor
from zslurm.train.model.norm import StageEntry
from zslurm.train.model.packing import Packing, pack, pack_next
from zslurm.train.shapes import tensor_table

_MOST_GRAPHS = 64


class GradientSums(Protocol):
    """Sums of gradients, by the names of parameters: `ZeroShards` has them."""

    def adder(self, name: str) -> Callable[[Tensor], None] | None:
        """Return what adds a part of a gradient; None if autograd rounds nothing."""
        ...

    def gradient_sum(self, name: str) -> WeightSum:
        """Return the sum that all gradients of a parameter are added to."""
        ...


class Zaya(nn.Module):
    """A ZAYA1 model. Its parameters hold no useful values until `build` or a checkpoint fills them.

    Build it in the format it shall have: `Module.to(dtype)` would round `balancing_bias`, which stays fp32.
    """

    balancing_bias: Tensor

    def __init__(self, config: ModelConfig, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.config = config
        # Not nn.Embedding(...): filling it by itself, on the meta device, would import all of torch's compiler.
        empty = torch.empty(config.vocab_size, config.hidden_size, dtype=dtype)
        self.embedding = nn.Embedding.from_pretrained(empty, freeze=False)
        self.layers = nn.ModuleList(Layer(config, dtype, first=layer == 0) for layer in range(config.layers))
        self.head_entry = StageEntry(config.hidden_size, config.norm_eps, dtype)
        bias_LC = torch.empty(config.layers, config.router_classes, dtype=torch.float32)
        self.register_buffer("balancing_bias", bias_LC)
        self._recomputed = 0
        self._by_bounds = False
        self.head_chunk: int | None = None
        self.add_head_gradient: Callable[[Tensor], None] | None = None
        self.compiled = False
        self._before: Callable[[str | None], None] = _here_already

    def call_before(self, wait: Callable[[str | None], None]) -> None:
        """Call `wait` with the name of each module (`embedding`, `layers.0`) before its weights are first read.

        None stands for all of them. It is no forward hook of the layers, which torch.compile would trace.
        """
        self._before = wait

    def sum_gradients_by(self, sums: GradientSums | None) -> None:
        """Add the gradients of the experts' matrices, and the head's part of the embedding's, to their sums.

        Backward adds them itself, and autograd gets none of them; Triton's kernels do so without rounding them to
        the weights' format before. None: autograd gets all.
        """
        self.add_head_gradient = None if sums is None else sums.adder("embedding.weight")
        for number, layer in enumerate(self.all_layers()):
            name, experts = f"layers.{number}.experts", layer.experts
            experts.sums = None
            if sums is not None:
                gate_up, down = (sums.gradient_sum(f"{name}.{part}.weight") for part in ("gate_up", "down"))
                experts.sums = ExpertSums(gate_up, down)

    def wait_for_weights(self) -> None:
        """Wait until all weights are there, if something gathers them."""
        self._before(None)

    def run_with(
        self,
        *,
        attention: Kernels = "auto",
        recompute: bool | int = False,
        compile: bool = False,
        context_parallel: bool = False,
        backend: str = "inductor",
    ) -> None:
        """Choose how the layers run; what they compute stays the same.

        A package's attention kernels (from `choose_kernels`) see no mask: with padding, attention is torch's.
        With `recompute`, of every layer or of the first so many only the inputs are kept for backward, where the
        layer runs again; its first run alone counts the experts' load. With `compile` each layer is one graph,
        or two around a package's kernels, made by torch.compile's `backend` when it first runs. With
        `context_parallel`, for `losses` that get a context, graphs also end where its ranks communicate.
        """
        self._recomputed = len(self.layers) if recompute is True else int(recompute)
        self._by_bounds = isinstance(attention, FlashAttention)
        self.compiled = compile
        if isinstance(attention, FlashAttention) and compile:
            attention = attention.outside_of_graphs()
        if compile:
            _allow_graphs()
        for layer in self.all_layers():
            layer.attention.kernels = attention
            if compile and context_parallel:
                layer.attention.communicate_outside_of_graphs()
            if compile:
                layer.compile(fullgraph=not (self._by_bounds or context_parallel), backend=backend)

    @contextmanager
    def without_graphs(self) -> Iterator[None]:
        """Run the layers uncompiled for a while, so that their parts can be looked at; the graphs are kept."""
        graphs = [(layer, layer._compiled_call_impl) for layer in self.all_layers()]
        try:
            for layer, _ in graphs:
                layer._compiled_call_impl = None
            yield
        finally:
            for layer, graph in graphs:
                layer._compiled_call_impl = graph

    def forward(
        self,
        tokens_BS: Tensor,
        targets_BS: Tensor | None = None,
        *,
        rope_base: float,
        valid_BS: Tensor | None = None,
        document_BS: Tensor | None = None,
        bounds_N: Tensor | None = None,
        context: ContextParallel | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Run the model over whole sequences of token ids (int64), which start at position 0.

        In `targets_BS`, `head.IGNORED_TARGET` marks positions that do not count; `valid_BS` and `document_BS` mark
        padding and documents, see `packing.py`. With documents, a package's attention kernels take `bounds_N` as
        it is, from `packing.document_bounds`; without it the host waits for the device. With `context`, several
        ranks share the sequences: each gets them whole and returns its part, to be summed over the ranks (logits
        are those of `context.positions`).

        Returns:
            logits [B, S, V] or, with targets, the summed cross-entropy in nats, in at least fp32; and
            counts_LC, how many of the B*S*K choices fell on each router class, int64. Padding is in neither
            loss nor counts.

        Raises:
            ConfigError: sequences are too short for the ranks that share them.
        """
        if targets_BS is None:
            x_BSD, counts_LC = self._hidden_states(tokens_BS, rope_base, valid_BS, document_BS, bounds_N, context)
            return logits(x_BSD, self.embedding.weight), counts_LC
        losses, counts_LC = self.losses(
            tokens_BS,
            targets_BS,
            rope_base=rope_base,
            valid_BS=valid_BS,
            document_BS=document_BS,
            bounds_N=bounds_N,
            context=context,
        )
        return losses.objective, counts_LC

    def losses(
        self,
        tokens_BS: Tensor,
        targets_BS: Tensor,
        *,
        rope_base: float,
        z_weight: float = 0.0,
        valid_BS: Tensor | None = None,
        document_BS: Tensor | None = None,
        bounds_N: Tensor | None = None,
        context: ContextParallel | None = None,
    ) -> tuple[HeadLoss, Tensor]:
        """As `forward` with targets, with a z-loss of weight `z_weight`; the loss in its parts, and counts_LC."""
        x_BSD, counts_LC = self._hidden_states(tokens_BS, rope_base, valid_BS, document_BS, bounds_N, context)
        if valid_BS is not None:
            targets_BS = targets_BS.where(valid_BS, IGNORED_TARGET)
        if context is not None:
            targets_BS = context.take(targets_BS, fill=IGNORED_TARGET)
        losses = summed_losses(
            x_BSD.flatten(0, 1),
            self.embedding.weight,
            targets_BS.flatten(),
            z_weight=z_weight,
            chunk_tokens=self.head_chunk,
            add_gradient=self.add_head_gradient,
        )
        return losses, counts_LC

    def hidden_states(self, tokens_BS: Tensor, *, rope_base: float) -> Tensor:
        """Return the normed hidden states [B, S, D] of whole sequences; `head.logits` makes logits of them."""
        return self._hidden_states(tokens_BS, rope_base, None, None, None, None)[0]

    @torch.inference_mode()
    def new_cache(self, batch: int = 1, room: int = 256, divided: DividedCache | None = None) -> Cache:
        """Return an empty cache for `decode`, with room for `room` tokens of each of `batch` sequences (it grows).

        Keys and values can be divided over ranks, which then decode the same tokens together.
        """
        self.wait_for_weights()
        layers = [layer.attention.new_cache(batch, room) for layer in self.all_layers()]
        return Cache(self.config, layers, divided)

    @torch.inference_mode()
    def decode(self, tokens_BS: Tensor, cache: Cache, *, rope_base: float, last_only: bool = False) -> Tensor:
        """Return logits of the next tokens of the cache's sequences, as `forward` on the whole would give them.

        [B, S, V], or with `last_only` those of the last token, [B, 1, V]. Any number of tokens at a time gives the
        same result. The cache must be made with the weights as they are now, and is advanced.
        """
        start, length = cache.length, tokens_BS.shape[1]
        slots = cache.reserve(length)
        angles = cache.angles(rope_base, self._wide)
        packing = pack_next(angles, length, start, slots)
        x_BSD, _ = self._run_layers(tokens_BS, packing, cache)
        return logits(x_BSD[:, -1:] if last_only else x_BSD, self.embedding.weight)

    @torch.inference_mode()
    def prefill(self, tokens_BS: Tensor, cache: Cache, context: ContextParallel, *, rope_base: float) -> Tensor:
        """Fill an empty cache, which the ranks of `context` divide, with whole sequences, each rank with its part.

        Returns:
            logits of the last token, [B, 1, V], on every rank.

        Raises:
            ConfigError: sequences are too short for the ranks that share them.
        """
        assert cache.length == 0
        length = tokens_BS.shape[1]
        x_BSD, _ = self._hidden_states(tokens_BS, rope_base, None, None, None, context, cache)
        return logits(last_tokens(context, x_BSD, length, 1), self.embedding.weight)

    def all_layers(self) -> Iterator[Layer]:
        """Yield the layers, first to last."""
        for layer in self.layers:
            assert isinstance(layer, Layer)
            yield layer

    @property
    def _wide(self) -> torch.dtype:
        return torch.promote_types(self.embedding.weight.dtype, torch.float32)

    def _hidden_states(
        self,
        tokens_BS: Tensor,
        rope_base: float,
        valid_BS: Tensor | None,
        document_BS: Tensor | None,
        bounds_N: Tensor | None,
        context: ContextParallel | None,
        cache: Cache | None = None,
    ) -> tuple[Tensor, Tensor]:
        if context is not None:
            check_chunks(self.config, tokens_BS.shape[1], context.size)
        packing = pack(
            torch.arange(tokens_BS.shape[1], device=tokens_BS.device),
            rotary_dim=self.config.rotary_dim,
            rope_base=rope_base,
            reach=reach(self.config),
            dtype=self._wide,
            valid_BS=valid_BS,
            document_BS=document_BS,
            bounds_N=bounds_N,
            by_bounds=self._by_bounds,
            context=context,
        )
        if context is not None:
            if cache is not None:
                packing = packing._replace(slots=cache.fill(tokens_BS.shape[1], context))
            tokens_BS = context.take(tokens_BS)
        return self._run_layers(tokens_BS, packing, cache)

    def _run_layers(self, tokens_BS: Tensor, packing: Packing, cache: Cache | None) -> tuple[Tensor, Tensor]:
        """Return the normed hidden states [B, S, D] of tokens, and counts_LC."""
        self._before("embedding")
        stream = Stream(hidden_BSD=self.embedding(tokens_BS), residual_BSD=None, router_TR=None)
        counts: list[Tensor] = []
        for number, (layer, bias_C) in enumerate(zip(self.layers, self.balancing_bias, strict=True)):
            self._before(f"layers.{number}")
            if number < self._recomputed and torch.is_grad_enabled():
                stream, counts_C = checkpoint(
                    layer, stream, packing, bias_C, use_reentrant=False, preserve_rng_state=False
                )
            else:
                stream, counts_C = layer(stream, packing, bias_C, cache and cache.layers[number])
            counts.append(counts_C)
        x_BSD, _ = self.head_entry(stream.hidden_BSD, stream.residual_BSD)
        return x_BSD, torch.stack(counts)


@torch.no_grad()
def build(config: ModelConfig, seed: int, *, dtype: torch.dtype, device: torch.device | str = "cpu") -> Zaya:
    """Make a model with its initial values, which depend on the seed and each tensor's name alone."""
    model = empty_model(config, dtype=dtype, device=device)
    parameters = dict(model.named_parameters())
    for info in tensor_table(config):
        parameters[info.name].copy_(initial_tensor(info, config, seed))
    model.balancing_bias.copy_(initial_balancing_bias(config))
    return model


def empty_model(config: ModelConfig, *, dtype: torch.dtype, device: torch.device | str) -> Zaya:
    """Make a model whose parameters and buffers have memory on the device, and undefined values."""
    with torch.device("meta"):
        model = Zaya(config, dtype)
    # Not `to_empty`: it imports sympy and torch's symbolic shapes, for which every rank would wait as it starts.
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            empty = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
            module.register_parameter(name, nn.Parameter(empty, parameter.requires_grad))
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, torch.empty(buffer.shape, dtype=buffer.dtype, device=device))
    return model


def _allow_graphs() -> None:
    """Let torch.compile make as many graphs of a layer as a run needs: beyond its limit it fails, or runs eagerly.

    There is one for each of: the first layer and the others; training and evaluation; a sequence alone and several
    (a rank's part of a microbatch has any number); each phase's length and whether ranks share its sequences.
    """
    settings: Any = importlib.import_module("torch._dynamo.config")
    settings.recompile_limit = max(settings.recompile_limit, _MOST_GRAPHS)


def _here_already(module: str | None) -> None:
    """Wait for no weights: nothing gathers them."""
