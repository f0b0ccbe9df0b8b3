"""`zslurm generate`: a prompt goes in, its continuation comes out as it is made."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from zslurm.checkpoint_tools.plain import in_words
from zslurm.checkpoint_tools.quantities import counted, show_bytes
from zslurm.cli.checkpoint_convert import TokenizerChoice, as_user_errors
from zslurm.cli.options import Context, Json, RopeBase, TokenizerFile, run_locally_or_as_job
from zslurm.core.console import print_json, say
from zslurm.core.errors import ConfigError
from zslurm.run.checkpoints import find_weights
from zslurm.train.data.build.tokenizer import load_tokenizer
from zslurm.train.data.detokenize import text_pieces
from zslurm.train.hub import Overrides, Settings, TokenizerFiles, Weights, open_weights


class Device(StrEnum):
    """Where to compute."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


class Dtype(StrEnum):
    """Number formats to compute in."""

    BF16 = "bf16"
    FP32 = "fp32"


def generate(
    checkpoint: Annotated[
        str,
        typer.Argument(
            metavar="CKPT",
            help="A run (its newest checkpoint), a checkpoint's directory, or a folder in transformers' format.",
            show_default=False,
        ),
    ],
    prompt: Annotated[
        str, typer.Option("--prompt", "-p", metavar="TEXT", help="Text to continue; - reads it from stdin.")
    ],
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-n", min=1, help="Tokens to make at most.")] = 128,
    temperature: Annotated[
        float, typer.Option("--temperature", help="0 always takes the likeliest token (greedy).")
    ] = 0.0,
    top_p: Annotated[
        float, typer.Option("--top-p", help="Draw from the likeliest tokens of this total share.")
    ] = 1.0,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of the draws.")] = 0,
    dtype: Annotated[
        Dtype | None, typer.Option("--dtype", help="Compute in this format; default: the weights' own.")
    ] = None,
    device: Annotated[
        Device, typer.Option("--device", help="cuda is also torch's name for AMD GPUs.")
    ] = Device.AUTO,
    tokenizer: TokenizerFile = None,
    rope_base: RopeBase = None,
    context: Context = None,
    json: Json = False,
) -> None:
    """Continue a text with a model; the continuation goes to stdout as it is made.

    Example: zslurm generate my-run --prompt 'def main(' --max-tokens 50
    """
    run_locally_or_as_job(False)

    generate_text(
        checkpoint,
        prompt,
        sampling=Sampling(max_tokens, temperature, top_p, seed),
        dtype=dtype.value if dtype else None,
        device=device.value,
        tokenizer=tokenizer,
        overrides=Overrides(rope_base, context),
        as_json=json,
    )


if TYPE_CHECKING:
    from zslurm.train.model.zaya import Zaya


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen; temperature 0 takes the likeliest."""

    max_tokens: int
    temperature: float
    top_p: float
    seed: int


def generate_text(
    reference: str,
    prompt: str,
    *,
    sampling: Sampling,
    dtype: str | None,
    device: str,
    tokenizer: Path | None,
    overrides: Overrides,
    as_json: bool,
) -> None:
    """Continue a prompt, streaming to stdout; facts about it go to stderr.

    Raises:
        ConfigError: the prompt is empty or too long, or something about the weights is not known.
        NotFound, ZslurmError: the weights cannot be found or read.
    """
    _check(sampling)
    text = _prompt(prompt)
    path = find_weights(reference)
    with as_user_errors(), open_weights(path, overrides) as weights:
        files = TokenizerChoice(tokenizer).of(weights)
        if files is None:
            raise ConfigError(f"{path}: has no tokenizer; name one with --tokenizer")
        coder = _Coder(files)
        ids = coder.encode(text)
        room = _room(weights, ids)
        if room < sampling.max_tokens:
            say(
                f"note: at most {counted(room, 'token')}, not {sampling.max_tokens}: the context ends there "
                "(--context)"
            )
        model = _load(weights, dtype or weights.settings.dtype or "fp32", device)
    made: list[int] = []
    started = time.monotonic()
    pieces = coder.decode(ids, _tokens(model, ids, weights.settings, sampling, room, made))
    text = ""
    for piece in pieces:
        text += piece
        if not as_json:
            print(piece, end="", flush=True)
    seconds = time.monotonic() - started
    facts = _facts(model, len(ids), len(made), seconds)
    if as_json:
        print_json({"weights": str(path), "text": text, "tokens": made, **facts})
        return
    print()
    say(
        f"{counted(len(made), 'token')} after {len(ids)} of prompt, {len(made) / max(seconds, 1e-9):.1f} "
        f"tokens/s; cache {show_bytes(facts['cache_bytes_per_token'])} per token, "
        f"{facts['cache_compression']:g}x less than without compression"
    )


class _Coder:
    """A tokenizer, used as the weights' data were made, or as a published model's says."""

    def __init__(self, files: TokenizerFiles) -> None:
        self._special = files.adds_special_tokens
        self._tokenizer = load_tokenizer(files.file)
        self._tokenizer.encode_special_tokens = not self._special

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=self._special).ids)

    def decode(self, prompt: list[int], tokens: Iterator[int]) -> Iterator[str]:
        return text_pieces(self._tokenizer, prompt, tokens)


def _check(sampling: Sampling) -> None:
    if not 0 <= sampling.temperature < math.inf:
        raise ConfigError(f"--temperature must be 0 or a positive number, got {sampling.temperature}")
    if not 0 < sampling.top_p <= 1:
        raise ConfigError(f"--top-p must be above 0 and at most 1, got {sampling.top_p}")


def _prompt(given: str) -> str:
    try:
        text = sys.stdin.read() if given == "-" else given
        text.encode()
    except (UnicodeDecodeError, UnicodeEncodeError) as error:
        raise ConfigError(f"the prompt: {in_words(error)}") from error
    if not text:
        raise ConfigError("the prompt is empty; give some text to continue")
    return text


def _room(weights: Weights, ids: list[int]) -> int:
    """How many tokens may follow."""
    settings = weights.settings
    if not ids:
        raise ConfigError("the prompt is empty: the tokenizer makes no token of it")
    if max(ids) >= settings.model.vocab_size:
        raise ConfigError(
            f"the tokenizer has token {max(ids)}, the model {settings.model.vocab_size}: it is another model's"
        )
    if settings.rope_base is None:
        raise ConfigError(f"{weights.path}: is in no run, so its RoPE base is not known; pass --rope-base")
    if settings.context is None:
        raise ConfigError(f"{weights.path}: is in no run, so its context is not known; pass --context")
    if len(ids) >= settings.context:
        raise ConfigError(
            f"the prompt has {counted(len(ids), 'token')}, which leaves no room in the context of "
            f"{settings.context}; shorten it, or pass --context if the model bears more than it was trained with"
        )
    return settings.context - len(ids)


def _load(weights: Weights, dtype: str, device: str) -> Zaya:
    import torch

    from zslurm.train.checkpointing.load_weights import load_model

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    elif device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch finds no GPU here")
    return load_model(weights, dtype={"bf16": torch.bfloat16, "fp32": torch.float32}[dtype], device=device)


def _tokens(
    model: Zaya, ids: list[int], settings: Settings, sampling: Sampling, room: int, made: list[int]
) -> Iterator[int]:
    """Tokens as they are made, without the one that ends the text; `made` collects them."""
    from zslurm.train.model.generate import generate

    assert settings.rope_base is not None
    for token in generate(
        model,
        ids,
        max_new_tokens=min(sampling.max_tokens, room),
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        seed=sampling.seed,
        eos_ids=settings.tokens.end,
        rope_base=settings.rope_base,
    ):
        if token in settings.tokens.end:
            return
        made.append(token)
        yield token


def _facts(model: Zaya, prompt: int, made: int, seconds: float) -> dict[str, Any]:
    from zslurm.train.model.cache import bytes_per_token

    config = model.config
    return {
        "prompt_tokens": prompt,
        "new_tokens": made,
        "seconds": seconds,
        "cache_bytes_per_token": bytes_per_token(config, model.embedding.weight.dtype),
        "cache_compression": config.hidden_size / (config.kv_heads * config.head_dim),
    }
