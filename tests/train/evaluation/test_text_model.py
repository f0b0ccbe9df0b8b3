"""What the harness asks in texts reaches the model in the tokens that transformers would see."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from zslurm.train.data.build.build import build
from zslurm.train.errors import DataError
from zslurm.train.evaluation.scoring import Answers, Work
from zslurm.train.evaluation.text_model import TextModel
from zslurm.train.hub import TokenizerFiles
from zslurm.train.inference.text import TextCoder

CONTEXT = 12


@pytest.fixture(scope="module")
def coder(tmp_path_factory: pytest.TempPathFactory) -> TextCoder:
    folder = tmp_path_factory.mktemp("data")
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 50)
    build([folder / "text.txt"], folder / "data", vocab_size=300)
    return TextCoder.open(TokenizerFiles(folder / "data" / "tokenizer.json"), 512)


class Asked(TextModel):
    """A model that keeps what it is asked, and finds a token's likelihood to be its place."""

    def __init__(self, coder: TextCoder, context: int = CONTEXT) -> None:
        super().__init__(coder, context, self._answer)
        self.work: list[Work] = []

    def _answer(self, work: Work) -> Answers:
        self.work.append(work)
        answers: Answers = {place: (-float(len(pair[1])), place == 0) for place, pair in enumerate(work.pairs)}
        return answers | {place: f"answer {place}" for place, _ in enumerate(work.prompts)}


def test_contexts_and_continuations_are_tokenized_together(coder: TextCoder) -> None:
    asked = Asked(coder)
    texts = [("the quick", " brown"), ("the quick ", "brown"), ("", "the quick")]
    likely = asked.log_likelihoods(texts)
    pairs = asked.work[0].pairs
    assert pairs[0] == pairs[1], "white space at the end of a context belongs to what follows"
    assert coder.decode(pairs[0][0] + pairs[0][1]) == "the quick brown"
    assert coder.decode(pairs[0][1]) == " brown"
    assert pairs[2] == ((coder.prefix,), coder.encode("the quick"))
    assert likely == [(-float(len(pair[1])), place == 0) for place, pair in enumerate(pairs)]
    assert asked.tokens == sum(len(context) + len(continuation) for context, continuation in pairs)


def test_a_long_context_loses_its_beginning(coder: TextCoder) -> None:
    asked = Asked(coder)
    asked.log_likelihoods([("the lazy dog " * 20 + "the", " quick")])
    ((context, continuation),) = asked.work[0].pairs
    assert len(context) + len(continuation) == CONTEXT + 1, "the last token is never read"
    assert coder.decode(context + continuation).endswith("dog the quick")


def test_a_text_is_read_in_disjoint_windows_of_the_contexts_length(coder: TextCoder) -> None:
    asked = Asked(coder)
    text = "the quick brown fox jumps over the lazy dog " * 3
    ids = coder.encode(text)
    short = coder.encode("the")
    assert len(ids) > 2 * CONTEXT
    assert asked.rolling_log_likelihoods([text, "the"]) == [-float(len(ids)), -float(len(short))]
    *windows, last = asked.work[0].pairs
    assert last == ((coder.prefix,), short)
    assert sum((continuation for _, continuation in windows), ()) == ids, "each token is predicted once"
    assert windows[0] == ((coder.prefix,), ids[:CONTEXT])
    assert windows[1] == ((ids[CONTEXT - 1],), ids[CONTEXT : 2 * CONTEXT])
    begin, end = windows[-1]
    assert begin + end == ids[-CONTEXT - 1 :], "the last window is as long as the others"


def prompt_of(coder: TextCoder, settings: Mapping[str, Any]) -> tuple[int, float, float, tuple[str, ...]]:
    asked = Asked(coder, context=1000)
    assert asked.continuations([("the quick", settings)]) == ["answer 0"]
    (work,) = asked.work
    (prompt,) = work.prompts
    assert prompt.ids == coder.encode("the quick")
    return prompt.max_new_tokens, prompt.temperature, prompt.top_p, work.stops[0]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, (256, 0.0, 1.0, ())),
        ({"until": "\n\n", "max_gen_toks": 8}, (8, 0.0, 1.0, ("\n\n",))),
        ({"until": ["a", "b"], "do_sample": False, "temperature": 0.7}, (256, 0.0, 1.0, ("a", "b"))),
        ({"temperature": 0.7, "top_p": 0.9, "max_new_tokens": 3}, (3, 0.7, 0.9, ())),
        ({"do_sample": True, "num_beams": 1, "top_k": None}, (256, 1.0, 1.0, ())),
    ],
    ids=str,
)
def test_generation_follows_the_tasks_settings(
    coder: TextCoder, settings: dict[str, Any], expected: tuple[Any, ...]
) -> None:
    assert prompt_of(coder, settings) == expected


def test_samples_of_one_question_have_seeds_of_their_own_and_prompts_leave_room(coder: TextCoder) -> None:
    asked = Asked(coder)
    settings = {"max_gen_toks": 4, "do_sample": True}
    asked.continuations([("the lazy dog " * 20, settings)] * 3 + [("", settings)])
    prompts = asked.work[0].prompts
    assert [len(prompt.ids) for prompt in prompts] == [CONTEXT - 4] * 3 + [1]
    assert len({prompt.seed for prompt in prompts}) == 4
    assert prompts[3].ids == (coder.prefix,)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_beams": 4}, r"generation_kwargs.num_beams: zslurm generates with until, .* export the model"),
        ({"max_gen_toks": CONTEXT}, r"max_gen_toks \(12\) leaves no room for a prompt in the context of 12"),
        ({"max_gen_toks": 0}, "must be at least 1"),
        ({"temperature": "warm"}, "generation_kwargs: could not convert"),
        ({"top_p": 2}, r"top_p \(2\) in \(0, 1\]"),
    ],
    ids=str,
)
def test_settings_that_cannot_be_followed_are_refused(
    coder: TextCoder, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        Asked(coder).continuations([("the", settings)])


def test_what_has_no_likelihood_is_refused(coder: TextCoder) -> None:
    with pytest.raises(DataError, match=r"a choice \(''\) adds no token to its question \(\.\.\.'the'\)"):
        Asked(coder).log_likelihoods([("the", "")])
    with pytest.raises(DataError, match=r"has \d+ tokens, the context 12"):
        Asked(coder).log_likelihoods([("the", " lazy dog" * 20)])
    with pytest.raises(DataError, match="is empty"):
        Asked(coder).rolling_log_likelihoods([""])
    nothing = Asked(coder)
    assert (nothing.log_likelihoods([]), nothing.continuations([]), nothing.work) == ([], [], [])
