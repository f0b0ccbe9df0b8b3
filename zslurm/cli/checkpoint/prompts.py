"""Many prompts for `zslurm generate`: JSON lines in, JSON lines out in the same order, continued in batches."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from pydantic import ConfigDict, ValidationError, field_validator

from zslurm.checkpoint_tools.plain import in_words
from zslurm.checkpoint_tools.quantities import counted
from zslurm.core.console import say
from zslurm.core.errors import ConfigError, ZslurmError
from zslurm.train.hub import TokenizerFiles, Weights
from zslurm.train.sections.section import Count, NonNegative, Section, Share, Whole

_SEEDS = 1_000_003


class PromptLine(Section):
    """One line: a prompt, and what differs for it from the command's options; other fields are passed on."""

    model_config = ConfigDict(extra="allow", frozen=True)

    prompt: str
    max_tokens: Count | None = None
    temperature: NonNegative | None = None
    top_p: Share | None = None
    seed: Whole | None = None
    stop: tuple[str, ...] | None = None

    @field_validator("stop", mode="before")
    @classmethod
    def _one_or_many(cls, value: object) -> object:
        return [value] if isinstance(value, str) else value

    @field_validator("prompt", "stop")
    @classmethod
    def _is_text(cls, value: str | tuple[str, ...] | None) -> str | tuple[str, ...] | None:
        try:
            "".join(value or ()).encode()
        except UnicodeEncodeError:
            raise ValueError("holds half of a surrogate pair, which is no text") from None
        return value


@dataclass(frozen=True)
class Defaults:
    """The command's options, for lines that do not say otherwise."""

    max_tokens: int
    temperature: float
    top_p: float
    seed: int
    stop: tuple[str, ...]


def read_lines(given: str) -> list[PromptLine]:
    """Read prompts from a file, or with - from stdin.

    Raises:
        ConfigError: it cannot be read, or a line is wrong; it names the line.
    """
    where = "stdin" if given == "-" else given
    try:
        text = sys.stdin.read() if given == "-" else Path(given).expanduser().read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"--prompts {given}: no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--prompts {where}: {in_words(error)}") from error
    lines = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            lines.append(PromptLine.model_validate(json.loads(line)))
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(map(str, first["loc"])) or "the line"
            message = first["msg"].removeprefix("Value error, ")
            raise ConfigError(f"--prompts {where}, line {number}: {key}: {message}") from None
        except (ValueError, RecursionError):
            raise ConfigError(f"--prompts {where}, line {number}: is not JSON") from None
    if not lines:
        raise ConfigError(f'--prompts {where}: holds no prompt; write one JSON object a line: {{"prompt": "..."}}')
    return lines


def generate_lines(
    lines: Sequence[PromptLine],
    weights: Weights,
    files: TokenizerFiles,
    defaults: Defaults,
    *,
    dtype: str,
    device: str,
    batch: int,
) -> Iterator[dict[str, Any]]:
    """Check all prompts, then yield the result of each, in their order.

    Raises:
        ConfigError: a prompt is empty, or leaves no room in the context; it names the prompt.
    """
    from zslurm.train.checkpointing.load_weights import load_model  # imports torch
    from zslurm.train.inference.batch_generation import Prompt, Stops, generate_batch, tokens_that_fit
    from zslurm.train.inference.text import StopStrings, TextCoder, until
    from zslurm.train.parallel.world import DTYPES

    settings = weights.settings
    assert settings.context is not None and settings.rope_base is not None
    coder = TextCoder.open(files, settings.model.vocab_size, settings.tokens.end, settings.tokens.begin)
    prompts, cut = list[Prompt](), 0
    for number, line in enumerate(lines, 1):
        ids = coder.encode(line.prompt)
        room = settings.context - len(ids)
        if not ids or room < 1:
            problem = (
                "is empty" if not ids else f"has {counted(len(ids), 'token')}, the context {settings.context}"
            )
            raise ConfigError(f"prompt {number}: {problem}")
        new_tokens = line.max_tokens or defaults.max_tokens
        cut += room < new_tokens
        prompts.append(
            Prompt(
                ids,
                min(new_tokens, room),
                defaults.temperature if line.temperature is None else line.temperature,
                line.top_p or defaults.top_p,
                defaults.seed * _SEEDS + number - 1 if line.seed is None else line.seed,
            )
        )
    if cut:
        say(f"note: the context ends before --max-tokens in {counted(cut, 'prompt')}")
    stops = [defaults.stop if line.stop is None else line.stop for line in lines]

    def stopper(index: int, prompt: Prompt) -> Stops:
        return StopStrings(coder.tokenizer, stops[index])

    model = load_model(weights, dtype=DTYPES[dtype], device=device)
    made = generate_batch(
        model,
        prompts,
        rope_base=settings.rope_base,
        eos_ids=coder.end,
        most=min(batch, len(prompts)),
        most_tokens=tokens_that_fit(model, settings.context),
        stopper=stopper,
    )

    def results() -> Iterator[dict[str, Any]]:
        ready: dict[int, dict[str, Any]] = {}
        following = 0
        for generation in made:
            text = until(coder.decode(generation.tokens), stops[generation.index])
            facts = {"prompt_tokens": len(prompts[generation.index].ids), "new_tokens": len(generation.tokens)}
            fields = {"text": text, "ended": generation.ended, **facts, "tokens": generation.tokens}
            ready[generation.index] = lines[generation.index].model_dump(exclude_unset=True) | fields
            while following in ready:
                yield ready.pop(following)
                following += 1

    return results()


def write_lines(results: Iterator[Mapping[str, Any]], out: Path | None) -> None:
    """Write results as they come, to a new file or to stdout; say how fast it went.

    Raises:
        ConfigError: the file is there already, or cannot be made.
        ZslurmError: it cannot be written.
    """
    started, texts, tokens = time.monotonic(), 0, 0
    with _opened(out) as file:
        for result in results:
            texts, tokens = texts + 1, tokens + int(result["new_tokens"])
            try:
                print(json.dumps(result, ensure_ascii=False), file=file, flush=True)
            except OSError as error:
                raise ZslurmError(f"{out or 'stdout'}: cannot be written: {error.strerror}") from error
    seconds = max(time.monotonic() - started, 1e-9)
    say(f"{counted(tokens, 'token')} after {counted(texts, 'prompt')}, {tokens / seconds:.1f} tokens/s")


def _opened(out: Path | None) -> AbstractContextManager[IO[str]]:
    if out is None:
        return nullcontext(sys.stdout)
    try:
        return out.open("x", encoding="utf-8")
    except FileExistsError:
        raise ConfigError(f"--out {out}: is there already; remove it, or name another file") from None
    except OSError as error:
        raise ConfigError(f"--out {out}: {error.strerror}") from error
