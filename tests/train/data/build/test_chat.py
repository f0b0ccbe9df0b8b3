"""Conversations are rendered, encoded and masked as transformers does it; what cannot be is one line."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from tests.train.data.corpora import write_rows
from zslurm.train.data.build.build import build
from zslurm.train.data.build.chat import ChatTemplate, RefusedConversation
from zslurm.train.data.build.source_reader import Fields
from zslurm.train.data.build.tokenizer import train_tokenizer
from zslurm.train.data.bundle import Corpus
from zslurm.train.errors import DataError

FIELDS = Fields(chat_key="messages")
MARKED = """{{ bos_token }}{% for message in messages %}
<|turn|>{{ message['role'] }}
{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}<|end|>{% endgeneration %}

{% else %}{{ message['content'] }}<|end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|turn|>assistant
{% endif %}"""
PLAIN = MARKED.replace("{% generation %}", "").replace("{% endgeneration %}\n", "")
CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Two and two?"}, {"role": "assistant", "content": "Four."}],
    [
        {"role": "system", "content": "Be brief. Söhne & Töchter 😀"},
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "1"},
        {"role": "user", "content": "Zwölf?"},
        {"role": "assistant", "content": "12 élèves, with <b>tags</b>"},
    ],
    [{"role": "user", "content": "Nobody answers."}],
]


def folder(path: Path, template: str, **config: Any) -> Path:
    """A tokenizer's folder with a template."""
    path.mkdir()
    tokenizer = train_tokenizer([json.dumps(CHATS, ensure_ascii=False)] * 3, 300)
    tokenizer.add_special_tokens(["<|turn|>", "<|end|>"])
    tokenizer.save(str(path / "tokenizer.json"))
    body = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<bos>", "eos_token": "<eos>"}
    (path / "tokenizer_config.json").write_text(json.dumps(body | {"chat_template": template} | config))
    return path


def built(tmp_path: Path, template: str, chats: list[Any]) -> Corpus:
    source = write_rows(tmp_path / "chats.jsonl", [{"messages": chat} for chat in chats])
    summary = build([source], tmp_path / "out", tokenizer=folder(tmp_path / "tokenizer", template), fields=FIELDS)
    assert summary.tokens > summary.targets > 0
    return Corpus.open(tmp_path / "out")


def documents_of(corpus: Corpus) -> list[tuple[list[int], list[int]]]:
    (bundle,) = corpus.bundles
    edges = bundle.documents.astype(int).tolist()
    assert bundle.targets is not None
    return [
        (bundle.tokens[first:last].tolist(), bundle.targets[first:last].tolist())
        for first, last in pairwise(edges)
    ]


@pytest.mark.parametrize("template", [MARKED, PLAIN])
def test_tokens_and_mask_are_those_of_transformers(tmp_path: Path, template: str) -> None:
    """Without `{% generation %}` its mask is all zeros; ours is that of the marked template and its newline."""
    from transformers import AutoTokenizer

    corpus = built(tmp_path, template, CHATS[:2])
    theirs = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    newline = theirs.encode("\n", add_special_tokens=False)
    for chat, (tokens, targets) in zip(CHATS, documents_of(corpus), strict=False):
        expected = theirs.apply_chat_template(
            chat, chat_template=MARKED, return_dict=True, return_assistant_tokens_mask=True
        )
        mask = expected["assistant_masks"]
        assert sum(mask) > 3
        assert tokens == [*expected["input_ids"], corpus.header.end_token]
        if template is PLAIN:
            after = [i + 1 for i in range(len(mask) - 1) if mask[i] and not mask[i + 1]]
            assert all(expected["input_ids"][i : i + 1] == newline for i in after)
            mask = [int(bool(m) or i in after) for i, m in enumerate(mask)]
        assert targets == [*mask, mask[-1]]


def test_a_conversation_without_an_answer_is_left_out_and_counted(tmp_path: Path) -> None:
    corpus = built(tmp_path, MARKED, [*CHATS, []])
    assert corpus.document_count == 2
    assert json.loads((tmp_path / "out" / "build.json").read_text())["empty_documents"] == 2


def test_messages_of_a_parquet_column_are_those_of_lines_of_json(tmp_path: Path) -> None:
    """A column of Parquet gives every message the fields of all, null if there are none."""
    template = MARKED.replace("{{ bos_token }}", "{% if messages[0].tool is defined %}tools{% endif %}")
    tool = [{"role": "user", "content": "Now?", "tool": {"name": "clock"}}, {"role": "assistant", "content": "9"}]
    found = []
    for name in ("chats.jsonl", "chats.parquet"):
        source = write_rows(tmp_path / name, [{"messages": chat} for chat in [*CHATS[:2], tool, []]])
        where = folder(tmp_path / f"{name}-tokenizer", template)
        summary = build([source], tmp_path / f"{name}-out", tokenizer=where, fields=FIELDS)
        found.append((summary.tokens, summary.targets, documents_of(Corpus.open(tmp_path / f"{name}-out"))))
    assert found[0] == found[1]
    assert len(found[0][2]) == 3


def test_a_parquet_file_without_messages_is_named(tmp_path: Path) -> None:
    where = folder(tmp_path / "tokenizer", MARKED)
    for row, message in (
        ({"chat": CHATS[0]}, r"has no column 'messages'; its columns are chat \(name one with --chat-key\)"),
        ({"messages": 3}, r"column 'messages' holds int64, not lists of messages"),
        ({"messages": "Two?"}, r"row 0: 'messages' is a string, not a list of messages"),
        ({"messages": [{"content": "Two?"}]}, r"row 0: message 0 of 'messages' has no 'role'"),
        ({"messages": [{"role": None, "content": "Two?"}]}, r"row 0: message 0 of 'messages' has no 'role'"),
        ({"messages": ["Two?"]}, r"row 0: message 0 of 'messages' has no 'role'"),
    ):
        source = write_rows(tmp_path / "chats.parquet", [row])
        with pytest.raises(DataError, match=message):
            build([source], tmp_path / "out", tokenizer=where, fields=FIELDS)


def test_a_row_without_messages_is_named(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "chats.parquet", [{"messages": CHATS[0]}, {"messages": None}])
    with pytest.raises(DataError, match=r"row 1: 'messages' is null, not a list of messages"):
        build([source], tmp_path / "out", tokenizer=folder(tmp_path / "tokenizer", MARKED), fields=FIELDS)


def test_where_the_template_is(tmp_path: Path) -> None:
    several = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": MARKED}]
    where = folder(tmp_path / "tokenizer", "", chat_template=several, eos_token={"content": "</s>"})
    found = ChatTemplate.of_tokenizer(where)
    assert (found.source, dict(found.tokens)) == (MARKED, {"bos_token": "<bos>", "eos_token": "</s>"})
    (where / "chat_template.jinja").write_text(PLAIN)
    assert ChatTemplate.of_tokenizer(where / "tokenizer.json").source == PLAIN
    (tmp_path / "mine.jinja").write_text("mine")
    assert ChatTemplate.of_tokenizer(where, tmp_path / "mine.jinja").source == "mine"


def test_what_cannot_be_a_template_is_named(tmp_path: Path) -> None:
    where = folder(tmp_path / "tokenizer", "{% for %}")
    with pytest.raises(DataError, match=r"tokenizer_config\.json: is no chat template: line 1: "):
        ChatTemplate.of_tokenizer(where)
    (where / "tokenizer_config.json").write_text("{}")
    with pytest.raises(DataError, match=r"has no chat template, neither chat_template\.jinja nor"):
        ChatTemplate.of_tokenizer(where)
    (where / "tokenizer_config.json").write_text("{")
    with pytest.raises(DataError, match=r"tokenizer_config\.json: is not a tokenizer's configuration"):
        ChatTemplate.of_tokenizer(where)


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content.nothing.there }}", "'str object' has no attribute 'nothing'"),
        ("{{ 1 / 0 }}", "ZeroDivisionError: division by zero"),
        ("{{ messages.append(1) }}", "access to attribute 'append' of 'list' object is unsafe"),
        ("{{ ''.__class__.__mro__ }}", "access to attribute '__class__' of 'str' object is unsafe"),
        (
            "{% for m in messages %}{{ loop.revindex }}{{ m.content }}{% endfor %}",
            "rendered differently when it ",
        ),
    ],
)
def test_a_template_that_fails_is_one_line_with_the_record(tmp_path: Path, template: str, reason: str) -> None:
    with pytest.raises(DataError) as caught:
        built(tmp_path, template, CHATS[:1])
    message = str(caught.value)
    assert "\n" not in message
    assert (
        f"{tmp_path}/chats.jsonl:1: the chat template ({tmp_path}/tokenizer/tokenizer_config.json) fails: "
        in message
    )
    assert reason in message
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("messages", "complaint"),
    [
        ("hello", "'messages' is a string, not a list of messages"),
        ([{"content": "hello"}], "message 0 of 'messages' has no 'role'"),
        (["hello"], "message 0 of 'messages' has no 'role'"),
    ],
)
def test_what_is_no_conversation_is_named(tmp_path: Path, messages: Any, complaint: str) -> None:
    with pytest.raises(DataError, match=rf"chats\.jsonl:1: {complaint}"):
        built(tmp_path, MARKED, [messages])


def test_options_that_do_not_go_together(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "chats.jsonl", [{"messages": CHATS[0]}])
    with pytest.raises(DataError, match="need the tokenizer of a chat template"):
        build([source], tmp_path / "out", vocab_size=300, fields=FIELDS)
    with pytest.raises(DataError, match="give the key of their messages, too"):
        build([source], tmp_path / "out", vocab_size=300, chat_template=tmp_path / "mine.jinja")
    where = folder(tmp_path / "tokenizer", MARKED)
    with pytest.raises(DataError, match=r"chats\.jsonl:1: has no 'chat'; its keys: 'messages' \(set --chat-key\)"):
        build([source], tmp_path / "out", tokenizer=where, fields=Fields(chat_key="chat"))


def test_templates_see_what_those_of_transformers_see() -> None:
    messages = [{"role": "user", "content": "<é>"}, {"role": "assistant", "content": "x"}]
    source = (
        "{% for m in messages %}{% if m.role == 'user' %}{{ m | tojson }}{% continue %}{% endif %}"
        "{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    )
    template = ChatTemplate(source, (), "here")
    assert template.render(messages) == ('{"role": "user", "content": "<é>"}x', ((34, 35),))
    with pytest.raises(RefusedConversation, match="'strftime_now' is undefined"):
        ChatTemplate("{{ strftime_now('%Y') }}", (), "here").render(messages)


def test_the_end_token_is_not_put_twice(tmp_path: Path) -> None:
    corpus = built(tmp_path, "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}", [CHATS[0]])
    ((tokens, targets),) = documents_of(corpus)
    assert np.array(tokens).tolist().count(corpus.header.end_token) == 2
    assert (tokens[-1], targets[-1]) == (corpus.header.end_token, 1)
    assert Tokenizer.from_file(str(corpus.tokenizer_path())).decode(tokens) == "Two and two?Four."
