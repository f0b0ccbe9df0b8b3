"""Scalars mean what YAML 1.2 says, every value knows its line, and bad YAML is one line with its place."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zslurm.config.yaml12 import MAX_DIGITS, parse, read
from zslurm.core.errors import ConfigError, NotFound


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("24:00:00", "24:00:00"),
        ("no", "no"),
        ("on", "on"),
        ("2026-11-21", "2026-11-21"),
        ("1_000", "1_000"),
        ("<<", "<<"),
        ("010", 10),
        ("0o17", 15),
        ("0x1F", 31),
        ("8e12", 8e12),
        (".5", 0.5),
        ("-.INF", -math.inf),
        ("FALSE", False),
        ("~", None),
        ("", None),
        ("'010'", "010"),
        ("|-\n  8e12", "8e12"),
    ],
)
def test_a_scalar_means_what_yaml_12_says(text: str, value: object) -> None:
    found = parse(f"key: {text}\n", "file").data["key"]
    assert found == value
    assert type(found) is type(value)


def test_not_a_number_is_a_number() -> None:
    assert math.isnan(parse(".nan", "file").data)


_PRINTABLE = st.text(st.characters(exclude_categories=["Cc", "Cs", "Cn", "Zl", "Zp"], exclude_characters="\ufeff"))
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | _PRINTABLE,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_PRINTABLE, inner, max_size=4),
    max_leaves=12,
)


@given(_JSON)
def test_every_json_document_is_yaml_and_means_the_same(value: Any) -> None:
    text = json.dumps(value, ensure_ascii=False, indent=1)
    assert parse(text, "file").data == json.loads(text)


@given(_PRINTABLE)
def test_a_quoted_word_is_always_that_word(word: str) -> None:
    quoted = "'" + word.replace("'", "''") + "'"
    assert parse(f"key: {quoted}", "file").data == {"key": word}


def test_every_key_and_item_knows_its_line() -> None:
    text = "# a comment\nrun:\n  name: x\n\nphases:\n  - lr: 1\n  - lr: 2\n    tokens: 3\nflow: {a: [1,\n  2]}\n"
    assert parse(text, "file").lines == {
        (): 2,
        ("run",): 2,
        ("run", "name"): 3,
        ("phases",): 5,
        ("phases", 0): 6,
        ("phases", 0, "lr"): 6,
        ("phases", 1): 7,
        ("phases", 1, "lr"): 7,
        ("phases", 1, "tokens"): 8,
        ("flow",): 9,
        ("flow", "a"): 9,
        ("flow", "a", 0): 9,
        ("flow", "a", 1): 10,
    }


def test_an_alias_repeats_its_anchor_without_sharing_it() -> None:
    data = parse("a: &shared {x: [1]}\nb: *shared\n", "file").data
    assert data == {"a": {"x": [1]}, "b": {"x": [1]}}
    assert data["a"]["x"] is not data["b"]["x"]


def test_an_empty_file_holds_nothing() -> None:
    assert parse("# only a comment\n", "file").data is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: [1, 2\nc: 3\n", "run.yaml:3: not valid YAML: expected ',' or ']', but got ':': c: 3"),
        ("a: 1\n  b: 2\n", "run.yaml:2: not valid YAML: mapping values are not allowed here: b: 2"),
        ("a: 'x\n", "run.yaml:2: not valid YAML: found unexpected end of stream: end of file"),
        ("a:\n\t- b\n", "run.yaml:2: not valid YAML: found character '\\t' that cannot start any token: - b"),
        ("a: @b\n", "run.yaml:1: not valid YAML: found character '@' that cannot start any token: a: @b"),
        ("a: *b\n", "run.yaml:1: not valid YAML: found undefined alias 'b': a: *b"),
        ("a: 1\n---\nb: 2\n", "run.yaml:2: not valid YAML: but found another document: ---"),
        ("a:\n  b: 1\n  c: 2\n  b: 3\n", 'run.yaml:4: the key "b" is given a second time; keep one'),
        ("a: &x\n  b: *x\n", "run.yaml:1: an alias refers to the mapping or list that it is in"),
        ("a: 1\n? [b]\n: 2\n", "run.yaml:2: a key must be a word, not a list or a mapping"),
        ("a: !!python/object/apply:os.getcwd []\n", "run.yaml:1: not valid YAML: tags are not supported: "),
        ("a: !!str 010\n", "run.yaml:1: not valid YAML: tags are not supported: a: !!str 010"),
        (f"a:\n  b: {'7' * (MAX_DIGITS + 1)}\n", f"run.yaml:2: a number of more than {MAX_DIGITS} digits"),
        (f"a: 0x{'f' * 9999}\n", f"run.yaml:1: a number of more than {MAX_DIGITS} digits"),
        ("[" * 5000, "run.yaml: not valid YAML: lists or mappings are nested too deeply"),
        ('a: "\0"\n', "run.yaml: not valid YAML: unacceptable character #x0000"),
    ],
)
def test_bad_yaml_is_one_line_with_its_place(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        read(tmp_path / "run.yaml")
    line = str(caught.value).replace(f"{tmp_path}/", "")
    assert line.startswith(message)
    assert "\n" not in line


def test_what_cannot_be_read_says_why(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"none\.yaml: no such file$"):
        read(tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match=r"cannot be read: Is a directory$"):
        read(tmp_path)
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"binary\.yaml: not a text file in UTF-8$"):
        read(tmp_path / "binary.yaml")
