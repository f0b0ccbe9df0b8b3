"""What is done to generated answers before they are compared: a chain of the filters of lm-evaluation-harness.

Each takes the samples of one document, a list of strings, and returns such a list.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from zslurm.train.sections.section import Count, Section

_PLAIN: dict[str, Callable[[str], str]] = {
    "remove_whitespace": str.strip,
    "lowercase": str.lower,
    "uppercase": str.upper,
}


def _is_a_pattern(value: str) -> str:
    try:
        re.compile(value)
    except re.error as error:
        raise ValueError(f"{value!r} is no regular expression: {error}") from error
    return value


class Filter(Section):
    """One filter, by the name of its function; the other settings are the function's."""

    function: Literal[
        "regex",
        "take_first",
        "take_first_k",
        "majority_vote",
        "remove_whitespace",
        "lowercase",
        "uppercase",
        "map",
    ]
    regex_pattern: Annotated[str, AfterValidator(_is_a_pattern)] = r"#### (\-?[0-9\.\,]+)"
    group_select: int = 0
    fallback: str = "[invalid]"
    k: Count | None = None
    mapping_dict: dict[str, str] = Field(default_factory=dict)
    default_value: str | None = None

    @model_validator(mode="after")
    def _has_what_it_needs(self) -> Filter:
        if self.function == "take_first_k" and self.k is None:
            raise ValueError("k is missing, which take_first_k needs")
        return self

    def apply(self, samples: Sequence[str]) -> list[str]:
        """Return what becomes of a document's samples."""
        if self.function == "take_first":
            return list(samples[:1])
        if self.function == "take_first_k":
            return list(samples[: self.k])
        if self.function == "majority_vote":
            return [Counter(samples).most_common(1)[0][0]]
        if self.function == "map":
            return [self.mapping_dict.get(each, self.default_value or "") for each in samples]
        if self.function == "regex":
            return [self._found(each) for each in samples]
        return [_PLAIN[self.function](each) for each in samples]

    def _found(self, text: str) -> str:
        """Return the match that is selected; of a pattern with several groups the first that took part."""
        matches: list[Any] = re.findall(self.regex_pattern, text)
        try:
            match = matches[self.group_select]
        except IndexError:
            return self.fallback
        if isinstance(match, tuple):
            match = next((group for group in match if group), self.fallback)
        return str(match).strip()


def filtered(filters: Sequence[Filter], samples: Sequence[str]) -> list[str]:
    """Return what a chain makes of a document's samples."""
    found = list(samples)
    for each in filters:
        found = each.apply(found)
    return found
