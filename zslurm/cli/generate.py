"""`zslurm generate`."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from zslurm.cli.heavy import here_or_as_job
from zslurm.cli.options import Context, Json, RopeBase, TokenizerFile


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
    here_or_as_job(False)
    from train.hub import Overrides
    from zslurm.report.generate import Sampling, generate_text

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
