"""Forward and backward of zaya1-1b in bf16 against `ZayaForCausalLM` of transformers, eager and compiled.

One microbatch of 4,096 tokens, no optimizer; weights, tokens and format are the same in both, and so is the rule
for skipped tokens, which is the reference's (zero). The reference runs as its defaults are, with torch's
scaled_dot_product_attention and grouped experts. All contenders take turns.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.gpu.step import CONTEXT, CONTEXT_ON_CPU, drawn_on
from benchmarks.models import TINY, recipe
from zslurm.kernels.harness.timing import medians, wait
from zslurm.train.config import ModelConfig
from zslurm.train.model.zaya import Zaya, build

ROPE_BASE = 1e4
SAMPLES = 5
_BATCHES = 8
"""Every step takes the next one: the experts get other numbers of tokens, as in training."""


@dataclass(frozen=True)
class Contender:
    """A model, and forward and backward of it."""

    model: nn.Module
    step: Callable[[], Tensor]


Contenders = dict[str, Contender]


def rows(device: torch.device) -> Iterator[dict[str, Any]]:
    """Yield tokens a second and peak memory of each, as soon as it is measured; ours first."""
    small = device.type == "cpu"
    name, config, batch, context = (
        ("tiny", TINY, 2, CONTEXT_ON_CPU) if small else ("zaya1-1b", recipe("zaya1-1b"), 1, CONTEXT)
    )
    config = config.model_copy(update={"skip_rule": "zero"})
    batches = _batches(config, batch, context, device)
    about = {"model": name, "tokens": batch * context, "dtype": "bf16", "what": "forward and backward"}
    model = our_model(config, device)
    contenders = {"ours": Contender(model, lambda: _step(model, next(batches)))}
    yield from _measured(contenders, about, device)
    try:
        reference = reference_model(model, device)
    except Exception as error:  # of a library of others: ours is measured without it
        yield {**about, "name": "transformers", "problem": _line(error)}
    else:
        contenders["transformers"] = Contender(reference, lambda: _reference_step(reference, next(batches)))
        yield {**about, "losses": _losses(model, reference, next(batches))}
        yield from _measured(contenders, about, device)
    if small:  # compiling takes minutes there
        return
    again = our_model(config, device)
    again.run_with(compile=True)
    compiled = Contender(again, lambda: _step(again, next(batches)))
    yield from _added("ours compiled", compiled, contenders, about, device)
    if "transformers" in contenders:
        theirs = copy.deepcopy(reference)
        theirs.compile()
        compiled = Contender(theirs, lambda: _reference_step(theirs, next(batches)))
        yield from _added("transformers compiled", compiled, contenders, about, device)


def _batches(
    config: ModelConfig, batch: int, context: int, device: torch.device
) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    shape = (_BATCHES, batch, context + 1)
    tokens_XBS = torch.randint(config.vocab_size, shape, generator=generator).to(device)
    return cycle([(tokens_BS[:, :-1].contiguous(), tokens_BS[:, 1:].contiguous()) for tokens_BS in tokens_XBS])


def our_model(config: ModelConfig, device: torch.device) -> Zaya:
    with drawn_on(device):
        return build(config, 1, dtype=torch.bfloat16, device=device)


def reference_model(model: Zaya, device: torch.device) -> nn.Module:
    from tests.train.model.reference import reference_of

    with torch.device(device):  # where its initial values are drawn faster
        return reference_of(model, ROPE_BASE, attn_implementation="sdpa").to(device)


def _step(model: Zaya, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs_BS, targets_BS = batch
    model.zero_grad()
    loss = model(inputs_BS, targets_BS, rope_base=ROPE_BASE)[0] / targets_BS.numel()
    loss.backward()
    return loss.detach()


def _reference_step(reference: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs_BS, targets_BS = batch
    reference.zero_grad()
    logits_BSV = reference(inputs_BS, use_cache=False).logits.float()
    loss = F.cross_entropy(logits_BSV.flatten(0, 1), targets_BS.flatten())
    loss.backward()
    return loss.detach()


def _losses(model: Zaya, reference: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, float]:
    return {"ours": _step(model, batch).item(), "transformers": _reference_step(reference, batch).item()}


def _added(
    name: str, one_more: Contender, contenders: Contenders, about: dict[str, Any], device: torch.device
) -> Iterator[dict[str, Any]]:
    """Let one contender more take turns with the others, or yield why it cannot."""
    try:
        one_more.step()
        wait(device)
    except Exception as error:  # of the compiler: the others were measured without it
        yield {**about, "name": name, "problem": _line(error)}
        return
    contenders[name] = one_more
    yield from _measured(contenders, about, device)


def _measured(contenders: Contenders, about: dict[str, Any], device: torch.device) -> Iterator[dict[str, Any]]:
    steps = {name: each.step for name, each in contenders.items()}
    seconds = medians(steps, device, samples=SAMPLES)
    row: dict[str, Any] = {
        **about,
        "seconds": seconds,
        "tokens_per_s": {name: about["tokens"] / each for name, each in seconds.items()},
        "ratios": {name: each / seconds["ours"] for name, each in seconds.items() if name != "ours"},
    }
    if device.type == "cuda":
        row["bytes_beside_weights"] = {
            name: _peak(each.step, each.model, device) for name, each in contenders.items()
        }
    yield row


def _peak(step: Callable[[], Tensor], model: nn.Module, device: torch.device) -> int:
    """Return the most bytes that a step takes besides weights, its gradients included."""
    model.zero_grad()
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    step()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".strip().splitlines()[0][:300]
