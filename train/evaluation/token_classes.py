"""Classes of tokens by what they are as text: what experts may specialise in without knowing any data set.

Each id of a vocabulary is decoded by itself and has one class, the first that fits:

    special      an added token, or one that is no text
    bytes        a part of a character
    space        nothing but blanks and line ends
    number       digits, no letters
    punctuation  neither letters nor digits
    other script letters, none of them Latin
    word start   letters after a blank
    word part    all others

Cost: one decoding of each id, some microseconds, once in a process.
"""

from __future__ import annotations

import unicodedata
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TOKEN_CLASSES = (
    "special",
    "bytes",
    "space",
    "number",
    "punctuation",
    "other script",
    "word start",
    "word part",
)
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_BEGIN = "a"
"""Text before the token: decoders drop a blank at the beginning."""


def class_of(text: str) -> str:
    """Return the class of a token by its text."""
    if not text:
        return "special"
    if _REPLACEMENT in text:
        return "bytes"
    if text.isspace():
        return "space"
    letters = [c for c in text if c.isalpha()]
    if not letters:
        return "number" if any(c.isdigit() for c in text) else "punctuation"
    if not any("LATIN" in unicodedata.name(c, "") for c in letters):
        return "other script"
    return "word start" if text[0].isspace() else "word part"


@lru_cache(maxsize=2)
def token_classes(path: Path, vocab_size: int) -> NDArray[np.uint8]:
    """Return the number in TOKEN_CLASSES of each id below `vocab_size`, uint8; ids without a token are special.

    Raises:
        DataError: the file is missing or not a tokenizer.
    """
    from zslurm.train.data.build.tokenizer import load_tokenizer  # its library takes a while to load

    tokenizer = load_tokenizer(path)
    added = set(tokenizer.get_added_tokens_decoder())
    classes = np.zeros(vocab_size, np.uint8)
    tokens = sorted(set(tokenizer.get_vocab(with_added_tokens=True).values()) - added)
    inside = [token for token in tokens if token < vocab_size]
    for token, text in zip(inside, _texts(tokenizer, inside), strict=True):
        classes[token] = TOKEN_CLASSES.index(class_of(text))
    return classes


def _texts(tokenizer: Tokenizer, tokens: list[int]) -> list[str]:
    """Return what each token adds to a text."""
    before = tokenizer.encode(_BEGIN, add_special_tokens=False).ids
    begin = tokenizer.decode(before)
    decoded = tokenizer.decode_batch([[*before, token] for token in tokens], skip_special_tokens=False)
    return [text.removeprefix(begin) for text in decoded]
