"""Forward and backward, memory, and decoding against `ZayaForCausalLM` of transformers.

Peer: the published implementation in the same process, with the same weights, tokens, format and threads, as
its defaults are (scaled_dot_product_attention, grouped_mm experts), turn by turn with ours. Beside them the
model's own matrix products without the rest: every product of a forward pass and both of its gradients'
(attention's for the causal half).

Models: the tiny recipe, and one of 108.8 million parameters. Skipped tokens get zero in both, as is the
reference's rule. `make gpu` compares them on a GPU.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.common import Timing, alternate, ratio, write_result
from benchmarks.memory import peak_bytes
from benchmarks.models import LARGER, TINY
from tests.train.model.reference import reference_of
from zslurm.train.config import ModelConfig
from zslurm.train.model.cache import bytes_per_token
from zslurm.train.model.generate import generate
from zslurm.train.model.zaya import build
from zslurm.train.shapes import parameter_counts

THREADS = 1
ROPE_BASE = 1e4
LARGE_VOCABULARY = TINY.model_copy(update={"vocab_size": 262_272})
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
DECODED = 64
BATCHES = 64
"""Every step takes the next one: the experts get other numbers of tokens, as in training."""


@dataclass(frozen=True)
class Size:
    """A model and its microbatch."""

    name: str
    config: ModelConfig
    batch: int
    context: int
    runs: int
    compiled: bool = False

    @property
    def tokens(self) -> int:
        return self.batch * self.context


SIZES = (Size("tiny", TINY, 4, 256, 30, compiled=True), Size("larger", LARGER, 2, 512, 8))


class Pair:
    """Our model and the reference with its weights, and a step of each."""

    def __init__(self, size: Size, dtype: torch.dtype) -> None:
        self.ours = build(size.config, 1, dtype=dtype)
        self.reference: nn.Module = reference_of(self.ours, ROPE_BASE, attn_implementation="sdpa")
        generator = torch.Generator().manual_seed(0)
        shape = (BATCHES, size.batch, size.context + 1)
        tokens_XBS = torch.randint(size.config.vocab_size, shape, generator=generator)
        batches = [(tokens_BS[:, :-1].contiguous(), tokens_BS[:, 1:].contiguous()) for tokens_BS in tokens_XBS]
        self.prompt_1S = batches[0][0][:1, :64]
        self._of_ours, self._of_reference = cycle(batches), cycle(batches)

    def step(self) -> Tensor:
        """Forward and backward of our model; mean loss."""
        inputs_BS, targets_BS = next(self._of_ours)
        self.ours.zero_grad()
        loss = self.ours(inputs_BS, targets_BS, rope_base=ROPE_BASE)[0] / targets_BS.numel()
        loss.backward()
        return loss.detach()

    def reference_step(self) -> Tensor:
        """Forward and backward of the reference; mean loss."""
        inputs_BS, targets_BS = next(self._of_reference)
        self.reference.zero_grad()
        logits_BSV = self.reference(inputs_BS, use_cache=False).logits.float()
        loss = F.cross_entropy(logits_BSV.flatten(0, 1), targets_BS.flatten())
        loss.backward()
        return loss.detach()


def products(size: Size, dtype: torch.dtype) -> Callable[[], None]:
    """All matrix products of a step, forward and backward, of the model's shapes and nothing else.

    By the libraries that multiply in our model.
    """
    operands = []
    for batch, rows, inner, columns, head in _product_shapes(size):
        x, weight, gradient = (
            torch.randn(shape, dtype=dtype)
            for shape in ((batch, rows, inner), (batch, inner, columns), (batch, rows, columns))
        )
        forward = (x.float(), weight.float()) if head else (x, weight)
        multiply: Callable[[Tensor, Tensor], Tensor] = torch.bmm
        if batch == 1:
            forward, (x, weight, gradient) = (forward[0][0], forward[1][0]), (x[0], weight[0], gradient[0])
            multiply = torch.mm
        operands.append((multiply, forward, x, weight, gradient))

    def run() -> None:
        for multiply, forward, x, weight, gradient in operands:
            multiply(*forward)
            multiply(gradient, weight.mT)
            multiply(x.mT, gradient)

    return run


def _product_shapes(size: Size) -> Iterator[tuple[int, int, int, int, bool]]:
    """(batch, rows, inner, columns, whether it is the head's): an even load of the experts is assumed."""
    config, rows = size.config, size.tokens
    hidden, head_dim, heads = config.hidden_size, config.head_dim, config.query_heads + config.kv_heads
    queries, keys = config.query_heads * head_dim, config.kv_heads * head_dim
    width, routed = config.router_hidden_size, rows // config.experts
    for _ in range(config.layers):
        yield 1, rows, hidden, queries + 2 * keys, False
        yield heads, rows, config.conv_widths[1] * head_dim, head_dim, False
        yield size.batch * config.query_heads, size.context, head_dim, size.context // 2, False
        yield size.batch * config.query_heads, size.context, size.context // 2, head_dim, False
        yield 1, rows, queries, hidden, False
        yield 1, rows, hidden, width, False
        yield 1, rows, width, width, False
        yield 1, rows, width, width, False
        for _ in range(config.experts):
            yield 1, routed, hidden, 2 * config.expert_hidden_size, False
            yield 1, routed, config.expert_hidden_size, hidden, False
    yield 1, rows, hidden, config.vocab_size, True


def _training(size: Size, dtype_name: str) -> dict[str, Any]:
    dtype = DTYPES[dtype_name]
    pair = Pair(size, dtype)
    losses = pair.step().item(), pair.reference_step().item()
    assert abs(losses[0] - losses[1]) < 0.02, losses
    contenders: dict[str, Callable[[], object]] = {
        "ours": pair.step,
        "reference": pair.reference_step,
        "products": products(size, dtype),
    }
    if size.compiled:
        compiled = Pair(size, dtype)
        compiled.ours.run_with(compile=True)
        contenders["ours_compiled"] = compiled.step
    timings = alternate(contenders, runs=size.runs)
    rates: dict[str, float] = {
        f"{name}_tokens_per_s": round(size.tokens / timing.median) for name, timing in timings.items()
    }
    if size.compiled:
        rates["speed_ratio_compiled"] = ratio(timings["reference"], timings["ours_compiled"])
    return {
        "model": size.name,
        "parameters": parameter_counts(size.config).total,
        "dtype": dtype_name,
        "batch": size.batch,
        "context": size.context,
        **rates,
        "speed_ratio": ratio(timings["reference"], timings["ours"]),
        "speed_ratio_of_fastest_runs": _fastest(timings["reference"], timings["ours"]),
        "time_over_products": ratio(timings["ours"], timings["products"]),
        **_memory(pair),
        "timings": [timing.row() for timing in timings.values()],
    }


def _memory(pair: Pair) -> dict[str, Any]:
    """Peak bytes of tensors in a step that begins without gradients."""
    peaks = {}
    for name, model, step in (
        ("ours", pair.ours, pair.step),
        ("reference", pair.reference, pair.reference_step),
    ):
        model.zero_grad()
        peaks[name] = peak_bytes(step)
    return {
        "ours_peak_mib": round(peaks["ours"] / 2**20, 1),
        "reference_peak_mib": round(peaks["reference"] / 2**20, 1),
        "peak_ratio": round(peaks["ours"] / peaks["reference"], 3),
    }


def _large_vocabulary(dtype_name: str) -> dict[str, Any]:
    size = Size("tiny, vocabulary 262,272", LARGE_VOCABULARY, 4, 256, 0)
    pair = Pair(size, DTYPES[dtype_name])
    return {"model": size.name, "dtype": dtype_name, "tokens": size.tokens, **_memory(pair)}


def _decoding(size: Size, dtype_name: str) -> dict[str, Any]:
    pair = Pair(size, DTYPES[dtype_name])
    prompt_1S = pair.prompt_1S

    def ours() -> list[int]:
        return list(
            generate(pair.ours, prompt_1S[0].tolist(), max_new_tokens=DECODED, temperature=0, rope_base=ROPE_BASE)
        )

    def reference() -> list[int]:
        made = pair.reference.generate(prompt_1S, max_new_tokens=DECODED, do_sample=False)  # type: ignore[operator]
        return made[0, prompt_1S.shape[1] :].tolist()

    same = ours() == reference()
    timings = alternate({"ours": ours, "reference": reference}, runs=max(5, size.runs // 3))
    return {
        "model": size.name,
        "dtype": dtype_name,
        "prompt_tokens": prompt_1S.shape[1],
        "new_tokens": DECODED,
        "same_tokens": same,
        **{f"{name}_tokens_per_s": round(DECODED / timing.median, 1) for name, timing in timings.items()},
        "speed_ratio": ratio(timings["reference"], timings["ours"]),
        "timings": [timing.row() for timing in timings.values()],
    }


def _fastest(slower: Timing, faster: Timing) -> float:
    return round(min(slower.seconds) / min(faster.seconds), 2)


def run() -> None:
    """Measure and write results/train_step.json."""
    import transformers

    logging.getLogger("transformers").setLevel(logging.ERROR)
    torch.set_num_threads(THREADS)
    write_result(
        "train_step",
        {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "threads": THREADS,
            "cache_bytes_per_token_of_the_published_model": bytes_per_token(ModelConfig(), torch.bfloat16),
            "training": [_training(size, dtype) for size in SIZES for dtype in DTYPES],
            "large_vocabulary": [_large_vocabulary(dtype) for dtype in DTYPES],
            "decoding": [_decoding(size, dtype) for size in SIZES for dtype in DTYPES],
        },
    )
