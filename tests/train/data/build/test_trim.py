"""Trimmed examples fit the context; they lose the middle of their reasoning and nothing else, for any texts."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.train.data.build.test_chat import MARKED, folder
from tests.train.data.corpora import texts_of, write_rows
from zslurm.train.data.build.build import build
from zslurm.train.data.build.chat import ChatTemplate
from zslurm.train.data.build.encode import Encoded, Encoder
from zslurm.train.data.build.source_reader import Cursor, Fields, Raw, RecordBatch, SourceReader
from zslurm.train.data.build.sources import SourceFile, SourceKind
from zslurm.train.data.build.tokenizer import end_token_id, load_tokenizer
from zslurm.train.data.build.trim import Trimming
from zslurm.train.data.bundle import Corpus
from zslurm.train.errors import DataError

PAIRS = Fields(prompt_key="prompt", completion_key="completion")
CHATS = Fields(chat_key="messages")
TEXT = st.text(st.characters(codec="utf-8", exclude_characters="<>|"), max_size=60)
LONG = st.lists(st.one_of(TEXT, st.just("\n"), st.just("so 7 * 6 = 42.\n")), max_size=25).map("".join)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder(tmp_path_factory.mktemp("data") / "tokenizer", MARKED)


@cache
def loaded(path: Path) -> Any:
    return load_tokenizer(path / "tokenizer.json")


def encoded(tokenizer: Path, fields: Fields, row: dict[str, Any], trimming: Trimming | None) -> Encoded:
    """What the build makes of one line."""
    file = SourceFile(Path("a.jsonl"), SourceKind.JSON_LINES, 1, 0)
    chat = ChatTemplate.of_tokenizer(tokenizer) if fields.chat_key else None
    reader = SourceReader([file], fields, chat=chat)
    encoder = Encoder(reader, tokenizer / "tokenizer.json", end_token_id(loaded(tokenizer)), trimming)
    (found,) = encoder(RecordBatch([Raw(file, Cursor(0), json.dumps(row).encode())], 1))
    return found


def check(tokenizer: Path, fields: Fields, row: dict[str, Any], parts: tuple[str, str, str], context: int) -> None:
    """Everything before and after the reasoning is there byte for byte, and a beginning and an end of it."""
    before, reasoning, after = parts
    whole = encoded(tokenizer, fields, row, None)
    found = encoded(tokenizer, fields, row, Trimming(context))
    text = loaded(tokenizer).decode(found.tokens.tolist()[:-1], skip_special_tokens=False)
    assert len(found.tokens) == len(whole.tokens) - found.removed
    assert found.targets is not None and whole.targets is not None
    assert int((1 - found.targets.astype(int)).sum()) == int((1 - whole.targets.astype(int)).sum()), "prompts stay"
    assert text.startswith(before) and text.endswith(after)
    kept = text[len(before) : len(text) - len(after)]
    if len(whole.tokens) <= context + 1:
        assert (found.removed, found.too_long, kept) == (0, False, reasoning)
    elif found.removed:
        assert len(found.tokens) <= context + 1
        assert not found.too_long
        cuts = [n for n in range(len(kept) + 1) if reasoning.startswith(kept[:n]) and reasoning.endswith(kept[n:])]
        assert cuts, "one run is gone"
    else:
        assert found.too_long and kept == reasoning
        least = len(whole.tokens) - len(loaded(tokenizer).encode(reasoning, add_special_tokens=False).ids)
        assert least > context - 3, "prompt and answer alone are too long, but for tokens that are half a tag's"


@settings(max_examples=120, deadline=None)
@given(prompt=TEXT, reasoning=LONG, answer=TEXT, context=st.integers(8, 200), opened=st.booleans())
def test_every_final_answer_of_a_pair_stays_byte_for_byte(
    tokenizer: Path, prompt: str, reasoning: str, answer: str, context: int, opened: bool
) -> None:
    opening = "<think>" if opened else ""
    row = {"prompt": prompt, "completion": f"{opening}{reasoning}</think>{answer}"}
    check(tokenizer, PAIRS, row, (prompt + opening, reasoning, f"</think>{answer}"), context)


@settings(max_examples=60, deadline=None)
@given(question=TEXT, earlier=LONG, reasoning=LONG, answer=TEXT, context=st.integers(40, 300))
def test_every_final_answer_of_a_conversation_stays_and_so_do_the_turns_before(
    tokenizer: Path, question: str, earlier: str, reasoning: str, answer: str, context: int
) -> None:
    first = f"<think>{earlier}</think>{answer}"
    messages = [
        {"role": "user", "content": question},
        {"role": "assistant", "content": first},
        {"role": "user", "content": question},
        {"role": "assistant", "content": f"<think>{reasoning}</think>{answer}"},
    ]
    turn = f"<|turn|>user\n{question}<|end|>\n<|turn|>assistant\n"
    before = f"<bos>{turn}{first}<|end|>\n{turn}<think>"
    after = f"</think>{answer}<|end|>\n"
    check(tokenizer, CHATS, {"messages": messages}, (before, reasoning, after), context)


def test_lines_stay_whole_where_that_costs_little(tokenizer: Path) -> None:
    lines = [f"step {number}: it holds.\n" for number in range(40)]
    row = {"prompt": "Why?\n", "completion": f"<think>{''.join(lines)}</think>Because."}
    found = encoded(tokenizer, PAIRS, row, Trimming(300))
    text = loaded(tokenizer).decode(found.tokens.tolist()[:-1])
    kept = text.removeprefix("Why?\n<think>").removesuffix("</think>Because.").splitlines(keepends=True)
    assert set(kept) <= set(lines)
    first, last = lines.index(kept[0]), lines.index(kept[-1])
    assert (first, last) == (0, 39)
    assert 0.7 * 301 < len(found.tokens) <= 301
    both = np.array([lines.index(line) for line in kept])
    assert abs((both < 20).sum() - (both >= 20).sum()) <= 2, "as much of the beginning as of the end"


def test_text_without_reasoning_is_left_whole_and_counted(tmp_path: Path) -> None:
    """A plain text may have reasoning too, but only after an opening tag: what is before may be the prompt."""
    texts = ["no tags at all " * 40, "half a tag</think> " * 40, f"Q<think>{'so ' * 60}</think>A", "short"]
    source = write_rows(tmp_path / "a.jsonl", [{"text": text} for text in texts])
    summary = build([source], tmp_path / "out", vocab_size=300, trimming=Trimming(40))
    assert (summary.trimmed_documents, summary.too_long_documents) == (1, 2)
    found = texts_of(Corpus.open(tmp_path / "out"))
    assert [found[i] for i in (0, 1, 3)] == [texts[i] for i in (0, 1, 3)]
    assert found[2].startswith("Q<think>so ") and found[2].endswith("so </think>A")
    again = build([source], tmp_path / "out", vocab_size=300, trimming=Trimming(40))
    assert (again.reused, again.trimmed_documents, again.removed_tokens) == (True, 1, summary.removed_tokens)
    with pytest.raises(DataError, match=r"built with other settings \(trim_answers\)"):
        build([source], tmp_path / "out", vocab_size=300, trimming=Trimming(41))


def test_other_tags_and_none(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "a.jsonl", [{"text": f"Q[[{'so ' * 60}]]A"}])
    assert (
        build([source], tmp_path / "out", vocab_size=300, trimming=Trimming(40, "[[", "]]")).trimmed_documents == 1
    )
    with pytest.raises(DataError, match=r"must not be empty \(--reasoning-tags\)"):
        build([source], tmp_path / "other", vocab_size=300, trimming=Trimming(40, "", "]]"))
