"""Tokenizers: train a byte-level BPE, load one, encode text on several threads.

Byte-level BPE (Radford et al. 2019, GPT-2) has all 256 bytes in its vocabulary, so that every text is encoded
without loss: decoding gives it back byte for byte. Special tokens come first, in the order of ZAYA1's Gemma
tokenizer: pad 0, eos 1, bos 2. Text that happens to spell one ("<eos>" in a source file) stays text.

Training is deterministic: the same texts in the same order give the same file, on any number of threads.
"""

from __future__ import annotations

import hashlib
import os
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from zslurm.checkpoint_tools.plain import in_words
from zslurm.train.errors import DataError

SPECIAL_TOKENS = ("<pad>", "<eos>", "<bos>")
SMALLEST_VOCABULARY = len(SPECIAL_TOKENS) + 256
END_TOKENS = ("<eos>", "</s>", "<|endoftext|>", "<|end_of_text|>")  # Gemma, Llama 2, GPT-2, Llama 3


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE of at most `vocab_size` entries (fewer if the texts have no more pairs).

    Raises:
        DataError: `vocab_size` has no room for the bytes and the special tokens.
    """
    if vocab_size < SMALLEST_VOCABULARY:
        raise DataError(
            f"a vocabulary of {vocab_size} is too small: {len(SPECIAL_TOKENS)} special tokens and 256 bytes "
            f"need {SMALLEST_VOCABULARY}"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def load_tokenizer(path: Path) -> Tokenizer:
    """Read a tokenizer.json, set to encode plain text: no special tokens, truncation or padding.

    Raises:
        DataError: the file is missing or not a tokenizer.
    """
    try:
        content = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise DataError(f"{path}: no such file; a tokenizer is a Hugging Face tokenizer.json") from None
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read: {in_words(error)}") from error
    try:
        tokenizer = Tokenizer.from_str(content)
    except Exception as error:  # the library raises plain Exception
        raise DataError(f"{path}: is not a Hugging Face tokenizer.json: {error}") from error
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # of the library's Rust code; it cannot be imported
            raise
        raise DataError(f"{path}: is not a Hugging Face tokenizer.json: the library cannot build it") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    return tokenizer


def vocabulary_size(tokenizer: Tokenizer) -> int:
    """Return one more than the largest id (a vocabulary may have holes)."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1


def end_token_id(tokenizer: Tokenizer, name: str | None = None) -> int:
    """Return the id of the end-of-document token: `name`, or the first of END_TOKENS that the tokenizer has.

    Raises:
        DataError: it has none of them.
    """
    names = END_TOKENS if name is None else (name,)
    for candidate in names:
        if (token := tokenizer.token_to_id(candidate)) is not None:
            return token
    raise DataError(f"the tokenizer has no {' or '.join(names)}: name its end-of-document token (--end-token)")


def encode(tokenizer: Tokenizer, texts: Sequence[str]) -> list[NDArray[np.uint32]]:
    """Token ids of each text, uint32 [tokens] each, in parallel over the texts (see `encoding_threads`)."""
    encodings = tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
    return [np.frombuffer(array("I", encoding.ids), dtype=np.uint32) for encoding in encodings]


class TextTokens(NamedTuple):
    """A text's tokens, uint32 [tokens], and the characters of each, [start, end), int64 [tokens, 2]."""

    ids: NDArray[np.uint32]
    offsets: NDArray[np.int64]


def encode_with_offsets(tokenizer: Tokenizer, text: str) -> TextTokens:
    """Return the tokens of a text, as `encode` does, and the range of each in it."""
    encoding = tokenizer.encode(text, add_special_tokens=False)
    ids = np.frombuffer(array("I", encoding.ids), dtype=np.uint32)
    return TextTokens(ids, np.array(encoding.offsets, np.int64).reshape(-1, 2))


def file_sha256(path: Path) -> str:
    """SHA-256 of a file's bytes, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def encoding_threads(threads: int | None = None) -> Iterator[None]:
    """Let the tokenizer use several threads inside; outside it is as it was before, or single-threaded.

    The library reads TOKENIZERS_PARALLELISM at each call. Outside it is never left unset: a process that forks
    after encoding would be warned about, and its child could wait for a thread pool that was not forked.

    The default is as many as the cores that this process may run on. The pool is made once per process, so that
    the first count stays.
    """
    saved = {
        "TOKENIZERS_PARALLELISM": os.environ.get("TOKENIZERS_PARALLELISM", "false"),
        "RAYON_NUM_THREADS": os.environ.get("RAYON_NUM_THREADS"),
    }
    os.environ["TOKENIZERS_PARALLELISM"] = "false" if threads == 1 else "true"
    if threads is not None:
        os.environ["RAYON_NUM_THREADS"] = str(threads)
    try:
        yield
    finally:
        for name, value in saved.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
