"""A trained tokenizer is lossless, deterministic, and has the special tokens where ZAYA1's has them."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from zslurm.train.data.build.tokenizer import (
    encode,
    encoding_threads,
    end_token_id,
    file_sha256,
    load_tokenizer,
    train_tokenizer,
    vocabulary_size,
)
from zslurm.train.errors import DataError

TEXT = [Path(subprocess.__file__).read_text(), Path(hashlib.__file__).read_text()]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    train_tokenizer(TEXT, 600).save(str(path))
    return load_tokenizer(path)


def test_special_tokens_come_first(tokenizer: Tokenizer) -> None:
    assert [tokenizer.id_to_token(i) for i in range(3)] == ["<pad>", "<eos>", "<bos>"]
    assert end_token_id(tokenizer) == 1
    assert vocabulary_size(tokenizer) == 600


@given(text=st.text())
def test_any_text_comes_back(tokenizer: Tokenizer, text: str) -> None:
    (ids,) = encode(tokenizer, [text])
    assert tokenizer.decode(ids.tolist(), skip_special_tokens=False) == text
    assert not len(ids) or ids.min() > 2


def test_text_that_spells_a_special_token_stays_text(tokenizer: Tokenizer) -> None:
    (ids,) = encode(tokenizer, ["a = '<eos>'"])
    assert 1 not in ids
    assert tokenizer.decode(ids.tolist()) == "a = '<eos>'"


def test_the_tokenizer_has_learned(tokenizer: Tokenizer) -> None:
    (ids,) = encode(tokenizer, TEXT[:1])
    assert len(ids) < 0.6 * len(TEXT[0].encode())


def test_training_is_deterministic_on_any_number_of_threads(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from zslurm.train.data.build.tokenizer import *\n"
        "texts = [Path(p).read_text() for p in sys.argv[3:]]\n"
        "with encoding_threads(int(sys.argv[1])): train_tokenizer(texts, 600).save(sys.argv[2])"
    )
    paths = [tmp_path / f"{threads}.json" for threads in (1, 2, 3)]
    sources = [subprocess.__file__, hashlib.__file__]
    for threads, path in enumerate(paths, start=1):
        subprocess.run([sys.executable, "-c", code, str(threads), str(path), *sources], check=True)
    assert len({file_sha256(path) for path in paths}) == 1


def test_the_environment_is_left_safe_for_forks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    monkeypatch.delenv("RAYON_NUM_THREADS", raising=False)
    with encoding_threads(2):
        assert os.environ["TOKENIZERS_PARALLELISM"] == "true"
        assert os.environ["RAYON_NUM_THREADS"] == "2"
    assert os.environ["TOKENIZERS_PARALLELISM"] == "false"
    assert "RAYON_NUM_THREADS" not in os.environ


def test_bad_tokenizers(tmp_path: Path, tokenizer: Tokenizer) -> None:
    with pytest.raises(DataError, match=r"none\.json: no such file"):
        load_tokenizer(tmp_path / "none.json")
    (tmp_path / "bad.json").write_text('{"model": 3}')
    with pytest.raises(DataError, match=r"bad\.json: is not a Hugging Face tokenizer"):
        load_tokenizer(tmp_path / "bad.json")
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe")
    with pytest.raises(DataError, match=r"binary\.json: cannot be read"):
        load_tokenizer(tmp_path / "binary.json")
    with pytest.raises(DataError, match=r"vocabulary of 258 is too small.* need 259"):
        train_tokenizer(TEXT, 258)
    with pytest.raises(DataError, match="no <end>"):
        end_token_id(tokenizer, "<end>")


def test_a_file_that_makes_the_library_panic_is_refused_in_one_line(tmp_path: Path) -> None:
    model = {
        "type": "BPE",
        "vocab": {"a": 0, "b": 1, "ab": 2},
        "merges": [["a", "b"]],
        "continuing_subword_prefix": "##",
    }
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": model}))
    with pytest.raises(
        DataError, match=r"tokenizer.json: is not a Hugging Face tokenizer.json: the library cannot"
    ):
        load_tokenizer(path)
