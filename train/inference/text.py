"""Text to tokens and back, as the weights' data were made or a published model's settings have it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer

from zslurm.train.data.build.tokenizer import load_tokenizer
from zslurm.train.data.detokenize import TextStream
from zslurm.train.errors import DataError
from zslurm.train.hub import TokenizerFiles
from zslurm.train.hub.tokenizer_files import token_ids


@dataclass(frozen=True)
class TextCoder:
    """A tokenizer with what a scorer or generator has to know of it.

    Attributes:
        tokenizer: encodes and decodes.
        special: special tokens are recognised in texts, and added if the tokenizer's own file asks for it.
        prefix: token before a text that has none: the beginning-of-text token, or else the first end token.
        end: tokens that end a text.
        vocabulary: of the model.
    """

    tokenizer: Tokenizer
    special: bool
    prefix: int
    end: tuple[int, ...]
    vocabulary: int

    @classmethod
    def open(
        cls, files: TokenizerFiles, vocabulary: int, end: tuple[int, ...] = (), begin: int | None = None
    ) -> TextCoder:
        """Open a tokenizer; its end and beginning tokens are found by name if they are not given.

        Raises:
            DataError, HubError: it is no tokenizer, or not this model's.
        """
        tokenizer = load_tokenizer(files.file)
        tokenizer.encode_special_tokens = not files.adds_special_tokens
        ids_of_files = token_ids(files) if not end else None
        end = end or (ids_of_files.end if ids_of_files is not None else ())
        begin = ids_of_files.begin if begin is None and ids_of_files is not None else begin
        return cls(tokenizer, files.adds_special_tokens, end[0] if begin is None else begin, end, vocabulary)

    def encode(self, text: str, *, whole: bool = True) -> tuple[int, ...]:
        """Return the tokens of a text; of one that begins no text with `whole` false.

        Raises:
            DataError: the model has no such token.
        """
        return self._known(self.tokenizer.encode(text, add_special_tokens=self.special and whole).ids)

    def encode_all(self, texts: Iterable[str]) -> dict[str, tuple[int, ...]]:
        """Return the tokens of many texts by these; each different one is encoded once.

        Raises:
            DataError: the model has no such token.
        """
        different = list(dict.fromkeys(texts))
        encoded = self.tokenizer.encode_batch_fast(different, add_special_tokens=self.special)
        return {text: self._known(encoding.ids) for text, encoding in zip(different, encoded, strict=True)}

    def _known(self, ids: Sequence[int]) -> tuple[int, ...]:
        if ids and max(ids) >= self.vocabulary:
            raise DataError(
                f"the tokenizer has token {max(ids)}, the model {self.vocabulary}: it is another model's"
            )
        return tuple(ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of tokens, without special ones."""
        return str(self.tokenizer.decode(list(ids)))

    def pairs(self, texts: Sequence[tuple[str, str]]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Return the tokens of contexts and of what follows each, equal to the tokens of both together.

        White space at the end of the context counts to what follows, since tokens rarely end with it (the rule of
        lm-evaluation-harness). Without a context there is the token that begins a text.
        """
        kept = {context: context.rstrip() for context, _ in texts}
        joined = [context + continuation for context, continuation in texts if context]
        encoded = self.encode_all([*joined, *filter(None, kept.values())])
        return [self._pair(context, kept[context], continuation, encoded) for context, continuation in texts]

    def _pair(
        self, context: str, kept: str, continuation: str, known: Mapping[str, tuple[int, ...]]
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        if not context:
            ids = self.encode(continuation, whole=False)
            return ((self.prefix,), ids) if ids[:1] != (self.prefix,) else (ids[:1], ids[1:])
        both = known[context + continuation]
        begin = len(known[kept]) if kept else 0
        if not begin:
            return (self.prefix,), both
        return both[:begin], both[begin:]


class StopStrings:
    """Ends a text that holds one of some strings; for `train.inference.batch_generation`.

    It looks at the text in whole characters as it comes, and only at as much of its end as a string may begin in.
    """

    def __init__(self, tokenizer: Tokenizer, strings: Iterable[str]) -> None:
        """Look for these strings in what the tokens say."""
        self._strings = tuple(string for string in strings if string)
        self._longest = max(map(len, self._strings), default=0)
        self._stream = TextStream(tokenizer, ())
        self._end = ""

    def __call__(self, token: int) -> bool:
        """Add a token; return whether the text holds one of the strings now."""
        if not self._strings:
            return False
        piece = self._stream.add(token)
        text = self._end + piece
        self._end = text[-self._longest :]
        return any(string in text for string in self._strings)


def until(text: str, strings: Iterable[str]) -> str:
    """Return a text up to the first of any of these strings."""
    for string in strings:
        if string:
            text = text.split(string, 1)[0]
    return text
