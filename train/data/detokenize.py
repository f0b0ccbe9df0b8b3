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


def text_pieces(tokenizer: Tokenizer, prompt: Sequence[int], tokens: Iterable[int]) -> Iterator[str]:
    """Yield the text of `tokens`, which follow `prompt`, in pieces; together they are the text of all of them."""
    seen = list(prompt[-_BEFORE:])
    begin, given = 0, len(seen)
    for token in tokens:
        seen.append(token)
        before = tokenizer.decode(seen[begin:given])
        text = tokenizer.decode(seen[begin:])
        if len(text) > len(before) and not text.endswith(_HALF_A_CHARACTER):
            yield text[len(before) :]
            begin, given = given, len(seen)
    rest = tokenizer.decode(seen[begin:])[len(tokenizer.decode(seen[begin:given])) :]
    if rest:
        yield rest
