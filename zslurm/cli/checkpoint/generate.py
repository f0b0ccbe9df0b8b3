"""`zslurm generate`: continue a prompt, and print the text as it is made."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from zslurm.checkpoint_tools.plain import in_words
from zslurm.checkpoint_tools.quantities import counted, show_bytes
from zslurm.cli.checkpoint.checkpoint_options import (
    ComputeDevice,
    Context,
    Dtype,
    RopeBase,
    TokenizerFile,
    choose_device,
    tokenizer_for,
)
from zslurm.cli.checkpoint.prompts import Defaults, PromptLine, generate_lines, read_lines, write_lines
from zslurm.cli.errors import as_user_errors
from zslurm.cli.help import MORE
from zslurm.cli.options import Json, run_locally_or_as_job
from zslurm.core.console import print_json, say
from zslurm.core.errors import ConfigError
from zslurm.run.checkpoints import find_weights
from zslurm.slurm.environment import own_job_id
from zslurm.train.config import ModelConfig
from zslurm.train.data.build.tokenizer import load_tokenizer
from zslurm.train.data.detokenize import text_pieces
from zslurm.train.hub import Overrides, TokenizerFiles, Weights, open_weights


def generate(
    checkpoint: Annotated[
        str,
        Argument(
            metavar="CKPT",
            help="A run (its newest checkpoint), a checkpoint's directory, or a folder in transformers' format.",
        ),
    ],
    prompt: Annotated[
        str | None, Option("--prompt", "-p", metavar="TEXT", help="Text to continue; - reads it from stdin.")
    ] = None,
    prompts: Annotated[
        str | None,
        Option(metavar="FILE", help='Many texts instead: a JSON object with "prompt" on each line; - for stdin.'),
    ] = None,
    out: Annotated[Path | None, Option(metavar="FILE", help="With --prompts: write the results there.")] = None,
    max_tokens: Annotated[int, Option("--max-tokens", "-n", min=1, help="Tokens to make at most.")] = 128,
    temperature: Annotated[float, Option(help="0 always takes the likeliest token (greedy).")] = 0.0,
    top_p: Annotated[
        float, Option(help="Draw from the likeliest tokens of this total share.", rich_help_panel=MORE)
    ] = 1.0,
    seed: Annotated[int, Option(min=0, help="Of the draws.", rich_help_panel=MORE)] = 0,
    stop: Annotated[
        list[str] | None, Option(metavar="TEXT", help="End the text before this (repeatable).")
    ] = None,
    batch: Annotated[
        int, Option(min=1, help="With --prompts: how many are continued at one time.", rich_help_panel=MORE)
    ] = 32,
    dtype: Annotated[
        Dtype | None, Option(help="Compute in this format; default: the weights' own.", rich_help_panel=MORE)
    ] = None,
    device: Annotated[
        ComputeDevice, Option(help="cuda is also torch's name for AMD GPUs.", rich_help_panel=MORE)
    ] = ComputeDevice.AUTO,
    ranks: Annotated[
        int,
        Option(
            min=1,
            help="Processes of each node, on GPUs one for each, that divide the cache of keys and values.",
            rich_help_panel=MORE,
        ),
    ] = 1,
    nodes: Annotated[
        int,
        Option(min=1, help="Nodes: of the job of --slurm, or of the one that you are in.", rich_help_panel=MORE),
    ] = 1,
    slurm: Annotated[
        bool, Option("--slurm", help="Run it as a Slurm job, and follow it.", rich_help_panel=MORE)
    ] = False,
    time_limit: Annotated[
        str | None,
        Option(
            "--time",
            metavar="LIMIT",
            help="With --slurm: limit of the job, such as 30 (minutes) or 2:00:00.",
            rich_help_panel=MORE,
        ),
    ] = None,
    tokenizer: TokenizerFile = None,
    rope_base: RopeBase = None,
    context: Context = None,
    json: Json = False,
) -> None:
    """Continue a text with a model. The continuation goes to stdout as it is made.

    Example: zslurm generate my-run --prompt 'def main(' --max-tokens 50
    """
    if (prompt is None) == (prompts is None):
        raise ConfigError("give --prompt TEXT, or --prompts FILE with many")
    inside = own_job_id() is not None
    if time_limit is not None and not slurm and not inside:
        raise ConfigError("--time is the limit of the job of --slurm; leave it out without")
    if nodes > 1 and not slurm and not inside:
        raise ConfigError(f"--nodes {nodes} needs --slurm, or a job of so many nodes around this command")
    if slurm and "-" in (prompt, prompts):
        raise ConfigError("--slurm: the job has no stdin; give --prompt TEXT, or --prompts FILE")
    run_locally_or_as_job(slurm, workers_option=None, nodes=nodes, gpus=ranks, time_limit=time_limit)
    if not 0 <= temperature < math.inf:
        raise ConfigError(f"--temperature must be 0 or a positive number, got {temperature}")
    if not 0 < top_p <= 1:
        raise ConfigError(f"--top-p must be above 0 and at most 1, got {top_p}")
    if prompts is not None or stop:
        lines = [PromptLine(prompt=_prompt(prompt))] if prompt is not None else read_lines(prompts or "-")
        if ranks > 1 or nodes > 1:
            raise ConfigError("--ranks divides the cache of one prompt; leave it out with --prompts and --stop")
        defaults = Defaults(max_tokens, temperature, top_p, seed, tuple(stop or ()))
        with as_user_errors(), open_weights(find_weights(checkpoint), Overrides(rope_base, context)) as weights:
            files = _tokenizer(weights, tokenizer)
            _check_known(weights)
            format_ = dtype or weights.settings.dtype or "fp32"
            chosen = choose_device(device, ranks)
            results = generate_lines(lines, weights, files, defaults, dtype=format_, device=chosen, batch=batch)
            if prompts is not None or json:
                write_lines(results, out)
            else:
                print(next(results)["text"])
        return
    assert prompt is not None
    text = _prompt(prompt)
    path = find_weights(checkpoint)
    with as_user_errors(), open_weights(path, Overrides(rope_base, context)) as weights:
        files = _tokenizer(weights, tokenizer)
        # As the weights' data were made, or as a published model's settings have it.
        coder, special = load_tokenizer(files.file), files.adds_special_tokens
        coder.encode_special_tokens = not special
        ids = list(coder.encode(text, add_special_tokens=special).ids)
        room = _room(weights, ids)
        if room < max_tokens:
            say(f"note: at most {counted(room, 'token')}, not {max_tokens}: the context ends there (--context)")
        end, format_ = weights.settings.tokens.end, dtype or weights.settings.dtype or "fp32"
        settings = {
            "max_new_tokens": min(max_tokens, room),
            "temperature": temperature,
            "top_p": top_p,
            "seed": seed,
            "eos_ids": end,
            "rope_base": weights.settings.rope_base,
        }
        stream = _stream(weights, format_, choose_device(device, ranks), (nodes, ranks), ids, settings)
    made: list[int] = []

    def tokens() -> Iterator[int]:
        """Yield and collect tokens as they are made, without the one that ends the text."""
        for token in stream:
            if token in end:
                return
            made.append(token)
            yield token

    started = time.monotonic()
    text = ""
    with as_user_errors():
        for piece in text_pieces(coder, ids, tokens()):
            text += piece
            if not json:
                print(piece, end="", flush=True)
    facts = _facts(weights.settings.model, format_, len(ids), len(made), time.monotonic() - started)
    if json:
        print_json({"weights": str(path), "text": text, "tokens": made, **facts})
        return
    print()
    say(
        f"{counted(len(made), 'token')} after {len(ids)} of prompt, {len(made) / max(facts['seconds'], 1e-9):.1f} "
        f"tokens/s; cache {show_bytes(facts['cache_bytes_per_token'])} per token, "
        f"{facts['cache_compression']:g}x less than without compression"
    )


def _prompt(given: str) -> str:
    try:
        text = sys.stdin.read() if given == "-" else given
        text.encode()
    except (UnicodeDecodeError, UnicodeEncodeError) as error:
        raise ConfigError(f"the prompt: {in_words(error)}") from error
    if not text:
        raise ConfigError("the prompt is empty; give some text to continue")
    return text


def _tokenizer(weights: Weights, given: Path | None) -> TokenizerFiles:
    files = tokenizer_for(weights, given)
    if files is None:
        raise ConfigError(f"{weights.path}: has no tokenizer; name one with --tokenizer")
    return files


def _check_known(weights: Weights) -> None:
    settings = weights.settings
    if settings.rope_base is None:
        raise ConfigError(f"{weights.path}: is in no run, so its RoPE base is not known; pass --rope-base")
    if settings.context is None:
        raise ConfigError(f"{weights.path}: is in no run, so its context is not known; pass --context")


def _room(weights: Weights, ids: list[int]) -> int:
    """Return how many tokens may follow the prompt."""
    settings = weights.settings
    if not ids:
        raise ConfigError("the prompt is empty: the tokenizer makes no token of it")
    if max(ids) >= settings.model.vocab_size:
        raise ConfigError(
            f"the tokenizer has token {max(ids)}, the model {settings.model.vocab_size}: it is another model's"
        )
    _check_known(weights)
    assert settings.context is not None
    if len(ids) >= settings.context:
        raise ConfigError(
            f"the prompt has {counted(len(ids), 'token')}, which leaves no room in the context of "
            f"{settings.context}; shorten it, or pass --context if the model bears more than it was trained with"
        )
    return settings.context - len(ids)


def _stream(
    weights: Weights, dtype: str, device: str, shape: tuple[int, int], ids: list[int], settings: dict[str, Any]
) -> Iterator[int]:
    """Return the tokens as they are made, by the ranks of `shape`: nodes, and ranks of each."""
    nodes, ranks = shape
    if nodes > 1 or ranks > 1:
        from zslurm.train.decoding import DecodingRequest, generate_on_ranks  # imports torch

        request = DecodingRequest(weights.path.absolute(), dtype, device, tuple(ids), **settings)
        if nodes == 1:
            return generate_on_ranks(request, ranks)
        from zslurm.job.generation_step import tokens_of_step
        from zslurm.job.ranks_step import step_of

        return tokens_of_step(request, step_of(nodes, ranks))
    from zslurm.train.checkpointing.load_weights import load_model
    from zslurm.train.model.generate import generate
    from zslurm.train.parallel.world import DTYPES

    return generate(load_model(weights, dtype=DTYPES[dtype], device=device), ids, **settings)


def _facts(config: ModelConfig, dtype: str, prompt: int, made: int, seconds: float) -> dict[str, Any]:
    from zslurm.train.model.cache import bytes_per_token
    from zslurm.train.parallel.world import DTYPES

    return {
        "prompt_tokens": prompt,
        "new_tokens": made,
        "seconds": seconds,
        "cache_bytes_per_token": bytes_per_token(config, DTYPES[dtype]),
        "cache_compression": config.hidden_size / (config.kv_heads * config.head_dim),
    }
