"""Text that comes token by token is the text of all tokens, and never half a character."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from zslurm.train.data.build.tokenizer import train_tokenizer
from zslurm.train.data.detokenize import text_pieces


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(["def naïve(x): return x\n" * 20, "für 12 €, 東京 🙂"], 300)


@settings(max_examples=100, deadline=None)
@given(prompt=st.text(max_size=8), text=st.text(max_size=30))
def test_pieces_are_the_whole_text(tokenizer: Tokenizer, prompt: str, text: str) -> None:
    before, tokens = (tokenizer.encode(part, add_special_tokens=False).ids for part in (prompt, text))
    pieces = list(text_pieces(tokenizer, before, tokens))
    assert "".join(pieces) == tokenizer.decode(tokens)
    assert all(pieces)


def test_no_piece_is_half_a_character(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("a🙂b", add_special_tokens=False).ids
    assert len(tokens) > 3
    assert list(text_pieces(tokenizer, [], tokens)) == ["a", "🙂", "b"]


def test_a_character_that_never_ends_is_given_out_at_the_end(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("a🙂", add_special_tokens=False).ids[:-1]
    assert "".join(text_pieces(tokenizer, [], tokens)) == tokenizer.decode(tokens)
