"""Batches of prompts: the tokens of each prompt are those that it gets without the others."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from tests.train.models import ROPE_BASE, scrambled, tiny_config
from zslurm.train.inference import batch_generation
from zslurm.train.inference.batch_generation import Continuation, Prompt, generate_batch
from zslurm.train.model.cache import Cache
from zslurm.train.model.generate import generate
from zslurm.train.model.zaya import Zaya

MODEL = scrambled(tiny_config(), dtype=torch.float32)


def drawn(length: int, seed: int) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(0, MODEL.config.vocab_size, (length,), generator=generator).tolist())


def alone(prompt: Prompt, eos_ids: tuple[int, ...] = ()) -> list[int]:
    return list(
        generate(
            MODEL,
            prompt.ids,
            max_new_tokens=prompt.max_new_tokens,
            temperature=prompt.temperature,
            top_p=prompt.top_p,
            seed=prompt.seed,
            eos_ids=eos_ids,
            rope_base=ROPE_BASE,
        )
    )


def together(prompts: list[Prompt], **settings: object) -> list[Continuation]:
    made = list(generate_batch(MODEL, prompts, rope_base=ROPE_BASE, **settings))  # type: ignore[arg-type]
    return sorted(made, key=lambda each: each.index)


PROMPTS = [
    Prompt(drawn(length, length), max_new_tokens=new)
    for length, new in [(1, 9), (40, 3), (2, 30), (33, 1), (5, 40), (70, 20), (3, 3), (17, 17)]
]


@pytest.mark.parametrize("most", [1, 3, 8])
def test_greedy_tokens_are_those_of_one_prompt_alone(most: int) -> None:
    made = together(PROMPTS, most=most)
    assert [each.tokens for each in made] == [alone(prompt) for prompt in PROMPTS]
    assert {each.ended for each in made} == {"length"}


def test_draws_depend_on_the_prompt_and_its_seed_alone() -> None:
    prompts = [
        Prompt(drawn(4 + row % 3, row % 3), 12, temperature=1.3, top_p=(1.0, 0.8)[row % 2], seed=row)
        for row in range(7)
    ]
    made = together(prompts, most=4)
    assert [each.tokens for each in made] == [alone(prompt) for prompt in prompts]
    assert [each.tokens for each in together(prompts[::-1], most=2)][::-1] == [each.tokens for each in made]
    assert len({tuple(each.tokens) for each in made}) > 1


def test_an_end_token_ends_the_text_and_is_no_part_of_it() -> None:
    eos = alone(PROMPTS[4])[5]
    for each, prompt in zip(together(PROMPTS, most=4, eos_ids=(eos,)), PROMPTS, strict=True):
        expected = alone(prompt, (eos,))
        assert each.tokens == [token for token in expected if token != eos]
        assert each.ended == ("end" if eos in expected else "length")


def test_a_text_ends_where_its_own_stopper_ends_it() -> None:
    def stopper(index: int, prompt: Prompt) -> object:
        left = iter(range(index, -1, -1))
        return lambda token: next(left, 0) == 0

    made = together(PROMPTS, most=3, stopper=stopper)
    assert [len(each.tokens) for each in made] == [
        min(row + 1, prompt.max_new_tokens) for row, prompt in enumerate(PROMPTS)
    ]
    assert made[0].ended == "stop"


def test_no_batch_takes_more_memory_than_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    rooms = []
    new_cache = Zaya.new_cache

    def counted(self: Zaya, batch: int, room: int) -> Cache:
        rooms.append(batch * room)
        return new_cache(self, batch, room)

    monkeypatch.setattr(Zaya, "new_cache", counted)
    made = together(PROMPTS, most=8, most_tokens=96)
    assert max(rooms) <= 96
    monkeypatch.undo()
    assert [each.tokens for each in made] == [alone(prompt) for prompt in PROMPTS]


def test_prompts_of_very_different_lengths_are_not_read_token_by_token(monkeypatch: pytest.MonkeyPatch) -> None:
    passes = []
    prompts = [Prompt(drawn(length, length), 2) for length in (3, 200, 202)]
    expected = [alone(prompt) for prompt in prompts]
    decode = Zaya.decode

    def counted(self: Zaya, tokens_BS: Tensor, *given: object, **settings: object) -> Tensor:
        passes.append(tuple(tokens_BS.shape))
        return decode(self, tokens_BS, *given, **settings)  # type: ignore[arg-type]

    monkeypatch.setattr(Zaya, "decode", counted)
    assert [each.tokens for each in together(prompts)] == expected
    assert passes == [(1, 3), (1, 1), (2, 200), (2, 1), (2, 1), (2, 1)]


def test_prompts_are_read_as_they_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_generation, "_WINDOW", 2)
    read = []

    def prompts() -> Iterator[Prompt]:
        for prompt in PROMPTS:
            read.append(prompt)
            yield prompt

    made = generate_batch(MODEL, prompts(), rope_base=ROPE_BASE, most=2)
    next(made)
    assert len(read) == 4
    assert len(list(made)) == len(PROMPTS) - 1


def test_a_long_prompt_is_read_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zslurm.train.inference.batch_generation.PREFILL_TOKENS", 16)
    made = together(PROMPTS, most=3)
    assert [each.tokens for each in made] == [alone(prompt) for prompt in PROMPTS]


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (Prompt((), 3), "empty"),
        (Prompt((1,), 0), "no token"),
        (Prompt(drawn(30, 1), 100), "there is room for 64"),
    ],
)
def test_what_cannot_be_continued_is_refused(prompt: Prompt, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        together([PROMPTS[0], prompt], most_tokens=64)
