"""Caches in pages: any mixture of next tokens of any sequences gives what the whole sequences give."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.train.models import ROPE_BASE, scrambled, tiny_config
from zslurm.train.inference.forward import Decoder
from zslurm.train.inference.pages import PAGE_TOKENS, NoPageLeft, Pages
from zslurm.train.model.head import logits
from zslurm.train.model.zaya import Zaya

VOCABULARY = tiny_config().vocab_size


def drawn(length: int, seed: int) -> list[int]:
    return torch.randint(0, VOCABULARY, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@torch.inference_mode()
def whole(model: Zaya, tokens: list[int]) -> torch.Tensor:
    return model(torch.tensor([tokens]), rope_base=ROPE_BASE)[0][0]


@torch.inference_mode()
def next_logits(decoder: Decoder, slots: list[int], tokens: list[list[int]]) -> list[torch.Tensor]:
    x_TD = decoder.hidden(slots, tokens)
    return list(logits(x_TD, decoder.pages.model.embedding.weight).split([len(each) for each in tokens]))


@pytest.fixture(scope="module", params=[{}, {"conv_widths": (1, 1)}, {"experts_per_token": 2}], ids=str)
def model(request: pytest.FixtureRequest) -> Zaya:
    return scrambled(tiny_config(**request.param))


def by_the_layers(pages: Pages) -> Pages:
    """As on a GPU: without the faster way for single tokens."""
    pages.step = None
    return pages


@pytest.mark.parametrize("stepped", [True, False])
def test_sequences_of_different_lengths_go_on_together(model: Zaya, stepped: bool) -> None:
    texts = [drawn(length, length) for length in (1, 7, PAGE_TOKENS, 3 * PAGE_TOKENS + 5)]
    more = [drawn(6, 50 + row) for row in range(len(texts))]
    pages = Pages(model, slots=len(texts))
    decoder = Decoder(pages if stepped else by_the_layers(pages), ROPE_BASE)
    slots = [pages.add() for _ in texts]
    expected = [whole(model, text + end) for text, end in zip(texts, more, strict=True)]
    for found, text, right in zip(next_logits(decoder, slots, texts), texts, expected, strict=True):
        torch.testing.assert_close(found, right[: len(text)])
    for step in range(6):
        found = torch.cat(next_logits(decoder, slots, [[end[step]] for end in more]))
        right = torch.stack([right[len(text) + step] for text, right in zip(texts, expected, strict=True)])
        torch.testing.assert_close(found, right)


@settings(deadline=None, max_examples=15)
@given(st.data())
def test_any_cut_of_any_sequences_gives_the_same(data: st.DataObject) -> None:
    model = _MODEL
    texts = [drawn(data.draw(st.integers(1, 80)), row) for row in range(data.draw(st.integers(1, 4)))]
    pages = Pages(model, slots=len(texts))
    decoder = Decoder(pages if data.draw(st.booleans()) else by_the_layers(pages), ROPE_BASE)
    slots, done = [pages.add() for _ in texts], [0] * len(texts)
    found: list[list[torch.Tensor]] = [[] for _ in texts]
    while rows := [row for row, text in enumerate(texts) if done[row] < len(text)]:
        chosen = data.draw(st.lists(st.sampled_from(rows), min_size=1, unique=True))
        cuts = [data.draw(st.integers(1, len(texts[row]) - done[row])) for row in chosen]
        parts = [texts[row][done[row] : done[row] + cut] for row, cut in zip(chosen, cuts, strict=True)]
        for row, cut, made in zip(
            chosen, cuts, next_logits(decoder, [slots[r] for r in chosen], parts), strict=True
        ):
            found[row].append(made)
            done[row] += cut
    for row, text in enumerate(texts):
        torch.testing.assert_close(torch.cat(found[row]), whole(model, text))


_MODEL = scrambled(tiny_config())


@pytest.mark.parametrize("length", [5, PAGE_TOKENS, PAGE_TOKENS + 3])
def test_a_fork_shares_full_pages_and_changes_nothing_of_its_origin(model: Zaya, length: int) -> None:
    begin, ends = drawn(length, 1), [drawn(4, seed) for seed in (2, 3, 4)]
    pages = Pages(model, slots=4)
    decoder = Decoder(pages, ROPE_BASE)
    origin = pages.add()
    next_logits(decoder, [origin], [begin])
    forks = [pages.fork(origin) for _ in ends[:2]]
    partial = length % PAGE_TOKENS > 0
    assert pages.used_pages == length // PAGE_TOKENS + 3 * partial
    for found, end in zip(next_logits(decoder, [*forks, origin], ends), ends, strict=True):
        torch.testing.assert_close(found, whole(model, begin + end)[length:])
    for slot in (origin, *forks):
        pages.free(slot)
    assert pages.used_pages == 0


def test_freed_pages_are_handed_out_again() -> None:
    pages = Pages(_MODEL, slots=2, most_tokens=4 * PAGE_TOKENS)
    decoder = Decoder(pages, ROPE_BASE)
    for seed in range(6):
        slots, texts = (
            [pages.add(), pages.add()],
            [drawn(2 * PAGE_TOKENS, seed), drawn(PAGE_TOKENS + 1, 10 + seed)],
        )
        for found, text in zip(next_logits(decoder, slots, texts), texts, strict=True):
            torch.testing.assert_close(found, whole(_MODEL, text))
        for slot in slots:
            pages.free(slot)
    assert pages.pages == 4


def test_beyond_the_limit_nothing_is_taken() -> None:
    pages = Pages(_MODEL, slots=2, most_tokens=2 * PAGE_TOKENS)
    decoder = Decoder(pages, ROPE_BASE)
    kept, refused = pages.add(), pages.add()
    begin = drawn(PAGE_TOKENS, 1)
    next_logits(decoder, [kept], [begin])
    with pytest.raises(NoPageLeft):
        decoder.hidden([refused], [drawn(PAGE_TOKENS + 1, 2)])
    assert pages.used_pages == 1
    assert pages.free_pages == 1
    (found,) = next_logits(decoder, [kept], [[3]])
    torch.testing.assert_close(found, whole(_MODEL, [*begin, 3])[PAGE_TOKENS:])
