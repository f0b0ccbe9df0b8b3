"""Find the name that was meant by a variable that no library reads.

Only a slip of the pen counts: one word that no name has and that is nearly one of theirs (TIMOUT), the words of a
name in another order, with another prefix, or with an underscore too few or too many. Similarity alone does not:
NCCL_RMA_DISABLE is as near to NCCL_SHM_DISABLE as a slip would be, and is a name of its own.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Set

# What difflib gives TIMOUT for TIMEOUT is 0.92, AGLO for ALGO and NCLL for NCCL 0.75, GIN for GID 0.67.
_NEAR = 0.75
_PREFIXES = ("NCCL", "RCCL", "TORCH_NCCL", "HSA")


def meant_by(name: str, known: Set[str]) -> str | None:
    """Return the known name that `name` is a slip of; None where it is known itself, or a slip of none."""
    if name in known:
        return None
    words = name.split("_")
    return (
        _other_prefix(words, known)
        or _first(known, lambda other: other.replace("_", "") == name.replace("_", ""))
        or _first(known, lambda other: sorted(other.split("_")) == sorted(words))
        or _one_word_off(words, known)
    )


def _first(known: Set[str], fits: Callable[[str], bool]) -> str | None:
    return min((name for name in known if fits(name)), default=None)


def _other_prefix(words: list[str], known: Set[str]) -> str | None:
    rest = "_".join(words[1:])
    return next((found for prefix in _PREFIXES if (found := f"{prefix}_{rest}") in known), None)


def _one_word_off(words: list[str], known: Set[str]) -> str | None:
    """The nearest name that differs in a single word, which no name has."""
    vocabulary = {word for name in known for word in name.split("_")}
    strange = [index for index, word in enumerate(words) if word not in vocabulary]
    if len(strange) != 1:
        return None
    at = strange[0]
    near: dict[str, float] = {}
    for name in known:
        others = name.split("_")
        if len(others) == len(words) and others[:at] == words[:at] and others[at + 1 :] == words[at + 1 :]:
            near[name] = difflib.SequenceMatcher(None, words[at], others[at]).ratio()
    best = max(sorted(near), key=lambda name: near[name], default=None)
    return best if best is not None and near[best] >= _NEAR else None
