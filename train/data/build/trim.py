"""Answer-preserving trimming: a chain of thought loses its middle; prompt and final answer stay and fit.

An example is prompt, reasoning, answer. Cut at the end, it teaches reasoning without an answer; left out, the
hardest examples go. So what is too much is taken from the reasoning, and from nothing else.

What is published: the ZAYA1-8B report (arXiv 2605.05365) names the scheme, answer-preserving trimming, and that
with it reasoning data are part of training from pretraining on. What we chose, because the sources at hand do not
give it:

    reasoning       what is between the tags of the last answer, <think> and </think> by default; the tags stay
    what goes       one run of tokens out of its middle: equally many tokens of its beginning and of its end stay
    where           at ends of lines if the kept parts lose at most a quarter by that, else between tokens
                    that do not divide a character
    no mark takes its place: it would be learned
    too little      if prompt and answer without it are too long, or there is no reasoning, nothing is taken: the
                    example is left whole and counted, and data.long_documents of the run decides

Every kept token is one of the original tokens: no text is encoded again.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from zslurm.train.data.build.tokenizer import TextTokens

_SLACK = 4  # of what is kept of one side, at most this part is given up for a whole line


@dataclass(frozen=True)
class Trimming:
    """What `--trim-answers` asks for.

    Attributes:
        context: of the phase; documents have at most one token more.
        opening: tag that reasoning begins after.
        closing: tag that it ends before.
    """

    context: int
    opening: str = "<think>"
    closing: str = "</think>"

    def reasoning(self, text: str, answer: tuple[int, int] | None = None) -> tuple[int, int] | None:
        """Return [first, last) of the characters of the reasoning; None if there is none.

        `answer` is the range of the last answer in the text; it may begin with reasoning, because templates put
        the opening tag into the prompt. It ends at the last closing tag: whatever follows that is the final
        answer.
        """
        start, end = answer or (0, len(text))
        last = text.rfind(self.closing, start, end)
        first = text.find(self.opening, start, last) if last >= 0 else -1
        if last < 0 or (first < 0 and answer is None):
            return None
        return (start if first < 0 else first + len(self.opening), last)


def removal(text: str, tokens: TextTokens, reasoning: tuple[int, int] | None, excess: int) -> slice | None:
    """Return which tokens to take away so that there are `excess` fewer, or a few more; None: it cannot be done.

    Only tokens that hold nothing but reasoning are taken.
    """
    if reasoning is None:
        return None
    starts, ends = tokens.offsets[:, 0], tokens.offsets[:, 1]
    inside = np.flatnonzero((starts >= reasoning[0]) & (ends <= reasoning[1]) & (ends > starts))
    if len(inside) < excess:
        return None
    first, last = int(inside[0]), int(inside[-1]) + 1
    if last - first != len(inside):
        return None  # tokens that are nothing of the text are among them
    kept = len(inside) - excess
    clean = [
        index for index in range(first, last + 1) if index in (first, last) or starts[index] >= ends[index - 1]
    ]
    lines = {index for index in clean if index in (first, last) or text[ends[index - 1] - 1] == "\n"}
    begin = _down_to(first + kept // 2, first, clean, lines)
    end = _up_to(last - (kept - kept // 2), last, clean, lines)
    return slice(begin, end)


def _down_to(place: int, least: int, clean: list[int], lines: set[int]) -> int:
    """Return the border at or below `place` at which the beginning ends."""
    most_loss = (place - least) // _SLACK
    line = next((end for end in range(place, place - most_loss - 1, -1) if end in lines and end > least), None)
    return line if line is not None else max(end for end in clean if end <= place)


def _up_to(place: int, most: int, clean: list[int], lines: set[int]) -> int:
    """Return the border at or above `place` at which the end begins."""
    most_loss = (most - place) // _SLACK
    line = next((end for end in range(place, place + most_loss + 1) if end in lines and end < most), None)
    return line if line is not None else min(end for end in clean if end >= place)
