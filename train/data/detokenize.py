"""Text from tokens as they come, in whole characters.

A character may take several byte-level tokens, and a tokenizer may put a space in front of a word only when
something precedes it. So each piece is the difference of two decodings: of the tokens since the last whole
character, and of the same with the new ones; nothing is given out while the end is half a character. (The method
of Hugging Face's text-generation-inference.)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from tokenizers import Tokenizer

_HALF_A_CHARACTER = "\ufffd"
_BEFORE = 5  # tokens of the prompt that the first piece is decoded with


class TextStream:
    """The text of tokens that come one by one."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        """Begin behind the tokens of `prompt`."""
        self._tokenizer = tokenizer
        self._seen = list(prompt[-_BEFORE:])
        self._begin, self._given = 0, len(self._seen)

    def add(self, token: int) -> str:
        """Return the text that a token completes; nothing while the end is half a character."""
        self._seen.append(token)
        before = self._tokenizer.decode(self._seen[self._begin : self._given])
        text = self._tokenizer.decode(self._seen[self._begin :])
        if len(text) <= len(before) or text.endswith(_HALF_A_CHARACTER):
            return ""
        self._begin, self._given = self._given, len(self._seen)
        return str(text[len(before) :])

    def rest(self) -> str:
        """Return what is left at the end of the text: half a character."""
        before = self._tokenizer.decode(self._seen[self._begin : self._given])
        return str(self._tokenizer.decode(self._seen[self._begin :])[len(before) :])


def text_pieces(tokenizer: Tokenizer, prompt: Sequence[int], tokens: Iterable[int]) -> Iterator[str]:
    """Yield the text of `tokens`, which follow `prompt`, in pieces; together they are the text of all of them."""
    stream = TextStream(tokenizer, prompt)
    for token in tokens:
        if piece := stream.add(token):
            yield piece
    if remainder := stream.rest():
        yield remainder
