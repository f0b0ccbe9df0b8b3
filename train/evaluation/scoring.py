"""Answer the requests of an evaluation with a model: likelihoods and texts, on one rank or on several.

A request is in tokens, and a rank answers its share of all requests of a kind. Ranks need neither the harness nor
the tasks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from zslurm.train.inference.batch_generation import Prompt, Stops, generate_batch, tokens_that_fit
from zslurm.train.inference.likelihood import Likelihood, Pair, likelihoods
from zslurm.train.inference.text import StopStrings, TextCoder, until
from zslurm.train.model.zaya import Zaya

BATCH = 64
"""Prompts that a rank continues together at most; a GPU's memory may allow fewer."""

Answers = dict[int, Likelihood | str]
"""Answers by the places of their requests."""


@dataclass(frozen=True)
class Work:
    """Requests of one kind for all ranks: pairs of which the likelihood is asked, or prompts to continue.

    Attributes:
        stops: of each prompt, the strings that end its text.
    """

    pairs: tuple[Pair, ...] = ()
    prompts: tuple[Prompt, ...] = ()
    stops: tuple[tuple[str, ...], ...] = ()

    def fields(self) -> dict[str, Any]:
        """Return the requests as JSON has them."""
        return {"pairs": self.pairs, "prompts": [vars(prompt) for prompt in self.prompts], "stops": self.stops}

    @classmethod
    def of(cls, fields: dict[str, Any]) -> Work:
        """Return the requests that JSON has as `fields`."""
        pairs = tuple((tuple(context), tuple(continuation)) for context, continuation in fields["pairs"])
        prompts = tuple(Prompt(**{**prompt, "ids": tuple(prompt["ids"])}) for prompt in fields["prompts"])
        return cls(pairs, prompts, tuple(tuple(strings) for strings in fields["stops"]))


Ask = Callable[[Work], Answers]
"""Sends requests to all ranks, and returns their answers."""


class ModelScorer:
    """Answers requests with a model whose weights do not change."""

    def __init__(
        self,
        model: Zaya,
        coder: TextCoder,
        *,
        rope_base: float,
        context: int,
        alive: Callable[[], None] = lambda: None,
    ) -> None:
        """Prepare.

        Args:
            model: the model, on any device.
            coder: its tokenizer.
            rope_base: base of its rotary embedding.
            context: tokens of a sequence at most.
            alive: called before each pass.
        """
        self._model, self._coder, self._rope_base = model, coder, rope_base
        self._context, self._alive = context, alive

    def answer(self, work: Work, rank: int = 0, ranks: int = 1) -> Answers:
        """Return the answers to this rank's share of the requests."""
        answers: Answers = {}
        answers |= likelihoods(
            self._model, work.pairs, rope_base=self._rope_base, rank=rank, ranks=ranks, alive=self._alive
        )
        places = range(len(work.prompts))[rank::ranks]

        def stopper(index: int, prompt: Prompt) -> Stops:
            return StopStrings(self._coder.tokenizer, work.stops[places[index]])

        made = generate_batch(
            self._model,
            [work.prompts[prompt_index] for prompt_index in places],
            rope_base=self._rope_base,
            eos_ids=self._coder.end,
            most=BATCH,
            most_tokens=tokens_that_fit(self._model, self._context),
            stopper=stopper,
            alive=self._alive,
        )
        for result_item in made:
            prompt_index = places[result_item.index]
            answers[prompt_index] = until(self._coder.decode(result_item.tokens), work.stops[prompt_index])
        return answers
