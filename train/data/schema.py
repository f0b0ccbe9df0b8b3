"""The token bundle: what is in a corpus directory, decided once.

    tokenizer.json               the Hugging Face tokenizer that made every bundle next to it
    tokens-00000-of-00003.h5     bundles; in name order their tokens are one stream
    ...
    build.json                   how the corpus was built, for people and for recognising the same build

A bundle is an HDF5 file with contiguous (neither chunked nor compressed) little-endian datasets, which a reader
maps into memory at their offset in the file (datasets of 2 KiB and more start on a page):

    /tokens       <u2 [tokens], or <u4 if vocab_size > 65,536
                  token ids, document after document, each followed by the end-of-document token
    /documents    <u8 [documents + 1]
                  document d is tokens[documents[d] : documents[d + 1]]; attribute `crc32`: of its bytes
    /checksums    <u4 [ceil(tokens / block_tokens)]
                  CRC32 (zlib's) of the bytes of each block of /tokens; attribute `block_tokens`

and, if some tokens are not to be learned (the prompts of fine-tuning data), two more:

    /targets      <u1 [tokens]
                  1 if the token counts as a target of the loss, 0 if it does not
    /target_checksums    <u4 [ceil(tokens / block_tokens)]
                  CRC32 of each block of /targets

and these attributes of the root group (texts of fixed length; all metadata carry HDF5's checksums):

    format             "zslurm-tokens"
    version            1, or 2 with /targets, which older readers would not heed; a newer one is refused
    vocab_size         every token id is below it
    tokenizer_sha256   of tokenizer.json's bytes, in hex
    end_token          id of the end-of-document token
    tokens, documents  the counts
    source             where the text came from, for people

Cost: 2 or 4 bytes per token (one more with /targets), 8 per document, 4 per 1,048,576 tokens.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from zslurm.checkpoint_tools.quantities import counted
from zslurm.train.errors import DataError

FORMAT = "zslurm-tokens"
VERSION = 2
UNMASKED_VERSION = 1
BLOCK_TOKENS = 1 << 20
ALIGNMENT = 4096  # bytes
TOKENIZER_FILE = "tokenizer.json"
BUILD_FILE = "build.json"
BUNDLE_NAME = re.compile(r"tokens-(?P<part>\d{5,})-of-(?P<parts>\d{5,})\.h5")
AGAIN = "copy it again or build the data again"
BUILD_HINT = "build the data with `zslurm data build`"


@dataclass(frozen=True)
class BundleHeader:
    """What every bundle of one corpus has in common."""

    vocab_size: int
    tokenizer_sha256: str
    end_token: int
    source: str = ""

    def __post_init__(self) -> None:
        if not 0 <= self.end_token < self.vocab_size:
            raise DataError(f"end-of-document token {self.end_token} is not below vocab_size {self.vocab_size}")

    @property
    def token_dtype(self) -> np.dtype[np.unsignedinteger]:
        """Return the narrowest format of a token id."""
        return np.dtype("<u2" if self.vocab_size <= 1 << 16 else "<u4")

    def other_tokenizer(self, theirs: BundleHeader) -> str | None:
        """Return how `theirs` shows another tokenizer, as `end_token 2, not 1`; None if it shows none."""
        for field in ("tokenizer_sha256", "vocab_size", "end_token"):
            own_value, other_value = str(getattr(self, field)), str(getattr(theirs, field))
            if own_value != other_value:
                return f"{field} {other_value[:12]}, not {own_value[:12]}"
        return None


def bundle_name(part: int, parts: int) -> str:
    """Return the file name of bundle `part` (from 0) of `parts`."""
    return f"tokens-{part:05d}-of-{parts:05d}.h5"


def bundle_paths(directory: Path) -> list[Path]:
    """Return the bundles of a corpus directory in stream order.

    Raises:
        DataError: there are none, some are missing, or two sets are mixed.
    """
    named = {path: match for path in directory.iterdir() if (match := BUNDLE_NAME.fullmatch(path.name))}
    if not named:
        raise DataError(f"{directory}: holds no tokens-NNNNN-of-NNNNN.h5; {BUILD_HINT}")
    totals = sorted({int(match["parts"]) for match in named.values()})
    if len(totals) > 1:
        raise DataError(
            f"{directory}: mixes corpora of {' and '.join(map(str, totals))} bundles; "
            "keep each in its own directory"
        )
    expected = [directory / bundle_name(part, totals[0]) for part in range(totals[0])]
    missing = [path.name for path in expected if path not in named]
    if missing:
        raise DataError(
            f"{directory}: {missing[0]} is missing ({len(missing)} of {counted(totals[0], 'bundle')} "
            f"{'is' if len(missing) == 1 else 'are'}); {AGAIN}"
        )
    return expected
