"""A model that is asked in texts, as lm-evaluation-harness asks: this makes tokens of them, and asks the ranks.

The rules are the harness's with transformers (0.4.13): context and continuation are tokenized together and
split, white space at the end of a context belongs to what follows, an empty context is the token that begins a
text, longer contexts lose their beginning, and a text is read in disjoint windows of the context's length.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from zslurm.checkpoint_tools.quantities import counted
from zslurm.train.errors import DataError
from zslurm.train.evaluation.scoring import Ask, Work
from zslurm.train.inference.batch_generation import Prompt
from zslurm.train.inference.likelihood import Likelihood, Pair
from zslurm.train.inference.text import TextCoder

MAX_NEW_TOKENS = 256
"""Tokens of an answer, if the task does not say."""
_LENGTH_KEYS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
"""Names of the number of tokens of an answer; the first that is there counts."""
_KNOWN_KEYS = {*_LENGTH_KEYS, "until", "do_sample", "temperature", "top_p"}
_WITHOUT_EFFECT = {"num_beams": 1, "use_cache": True}
"""Settings of transformers' generation that are accepted with these values."""


class TextModel:
    """A tokenizer, and ranks with a model behind it.

    Attributes:
        tokens: that were asked about or made so far, as the harness counts: a question again for each choice.
    """

    def __init__(self, coder: TextCoder, context: int, ask: Ask) -> None:
        """Ask by `ask`, at most `context` tokens at one time."""
        self._coder, self._context, self._ask = coder, context, ask
        self.tokens = 0

    def log_likelihoods(self, texts: Sequence[tuple[str, str]]) -> list[Likelihood]:
        """Return the likelihood of each continuation behind its context.

        Raises:
            DataError: a continuation has no token, or has no place in the context.
        """
        pairs = [self._fitting(*pair, text) for pair, text in zip(self._coder.pairs(texts), texts, strict=True)]
        return self._likelihoods(pairs)

    def rolling_log_likelihoods(self, texts: Sequence[str]) -> list[float]:
        """Return the log-likelihood of each text as a whole.

        Raises:
            DataError: a text has no token.
        """
        windows = [self._windows(text) for text in texts]
        answers = iter(self._likelihoods([pair for pairs in windows for pair in pairs]))
        return [sum(next(answers)[0] for _ in pairs) for pairs in windows]

    def continuations(self, asked: Sequence[tuple[str, Mapping[str, Any]]]) -> list[str]:
        """Return the text that the model writes behind each context, by the keys of `generation_kwargs`.

        Raises:
            DataError: a setting is wrong or unknown, or leaves no room for a context.
        """
        encoded = self._coder.encode_all(context for context, _ in asked)
        prompts, stops = list[Prompt](), list[tuple[str, ...]]()
        for index, (context, settings) in enumerate(asked):
            new, temperature, top_p, strings = _generation(settings)
            if new >= self._context:
                raise DataError(
                    f"generation_kwargs.max_gen_toks ({new}) leaves no room for a prompt in the context of "
                    f"{counted(self._context, 'token')}"
                )
            ids = encoded[context] or (self._coder.prefix,)
            prompts.append(Prompt(ids[new - self._context :], new, temperature, top_p, seed=index))
            stops.append(strings)
        if not prompts:
            return []
        answers = self._ask(Work(prompts=tuple(prompts), stops=tuple(stops)))
        texts = [cast(str, answers[index]) for index in range(len(prompts))]
        self.tokens += sum(len(prompt.ids) for prompt in prompts)
        self.tokens += sum(len(ids) for ids in map(self._coder.encode, texts))
        return texts

    def _likelihoods(self, pairs: Sequence[Pair]) -> list[Likelihood]:
        if not pairs:
            return []
        self.tokens += sum(len(context) + len(continuation) for context, continuation in pairs)
        answers = self._ask(Work(pairs=tuple(pairs)))
        return [cast(Likelihood, answers[index]) for index in range(len(pairs))]

    def _fitting(self, context: tuple[int, ...], continuation: tuple[int, ...], text: tuple[str, str]) -> Pair:
        """Return a pair whose tokens, but for the last, fit into the context."""
        if not continuation:
            raise DataError(f"a choice ({text[1][:40]!r}) adds no token to its question (...{text[0][-40:]!r})")
        if len(continuation) > self._context:
            raise DataError(
                f"a choice ({text[1][:40]!r}...) has {counted(len(continuation), 'token')}, the context "
                f"{self._context}"
            )
        return context[len(continuation) - self._context - 1 :], continuation

    def _windows(self, text: str) -> list[Pair]:
        """Cut a text into windows of the context's length, each token in one of them with all before it there.

        The first begins with the token that begins a text. The last one is as long as the others, and counts only
        what those did not.
        """
        ids, size = self._coder.encode(text), self._context
        if not ids:
            raise DataError("a text whose likelihood is asked is empty")
        windows: list[Pair] = [((self._coder.prefix,), ids[:size])]
        for start in range(size, len(ids), size):
            end = min(len(ids), start + size)
            windows.append((ids[max(0, end - size - 1) : start], ids[start:end]))
        return windows


def _generation(settings: Mapping[str, Any]) -> tuple[int, float, float, tuple[str, ...]]:
    """Return the number of new tokens, temperature, top_p and stop strings of `generation_kwargs`.

    Raises:
        DataError: a key is unknown, or its value is wrong.
    """
    settings_given = {key: value for key, value in settings.items() if value is not None}
    unknown = {
        key for key in settings_given.keys() - _KNOWN_KEYS if settings_given[key] != _WITHOUT_EFFECT.get(key)
    }
    if unknown:
        raise DataError(
            f"generation_kwargs.{min(unknown)}: zslurm generates with until, max_gen_toks, do_sample, temperature "
            "and top_p; for other settings, export the model and run lm_eval on the export"
        )
    strings = settings_given.get("until", ())
    try:
        new = int(next((settings_given[key] for key in _LENGTH_KEYS if key in settings_given), MAX_NEW_TOKENS))
        temperature, top_p = float(settings_given.get("temperature", 0.0)), float(settings_given.get("top_p", 1.0))
        stops = (strings,) if isinstance(strings, str) else tuple(map(str, strings))
    except (TypeError, ValueError) as error:
        raise DataError(f"generation_kwargs: {error}") from error
    if new < 1 or temperature < 0 or not 0 < top_p <= 1:
        raise DataError(
            f"generation_kwargs: max_gen_toks ({new}) must be at least 1, temperature ({temperature:g}) at least "
            f"0 and top_p ({top_p:g}) in (0, 1]"
        )
    # As transformers has it: the likeliest token without do_sample, temperature 1 with do_sample alone.
    sampled = settings_given.get("do_sample", temperature > 0)
    if not sampled:
        return new, 0.0, 1.0, stops
    return new, temperature if "temperature" in settings_given else 1.0, top_p, stops
