"""Names that torch cannot resolve.

torch tries for 300 s to resolve the name at which the ranks meet, and each try leaves a warning in the rank's log.
Until it gives up, nothing else shows why the run does not begin.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from zslurm.aegis.logs.lines import clean, time_of

_FAILED = re.compile(
    r"socket\.cpp:\d+\] .*network addresses of \(\[?(?P<name>[^\s,\]]+)\]?, \d+\) cannot be retrieved"
    r" \((?P<reason>gai error: .+)\)\.?$"
)
_OF_TRIES = re.compile(r"\b(?:socket|TCPStore)\.cpp:\d+\]|^Exception raised from |^frame #\d+: |^\s*$")
"""What torch writes between two of them: that a series of tries timed out, with the frames of its stack."""
_RESOLVED = "client socket has failed to connect to "
"""The name has an address. Of IPv6 it may have none, which a warning before this line states."""
_TIMED_OUT = re.compile(
    r"client socket has timed out after .* while trying to connect to \(\[?(?P<name>[^\s,\]]+)"
)


class FailedLookups(NamedTuple):
    """The tries at the end of a log.

    Attributes:
        name: the name that was looked up.
        reason: why that failed, as the C library says.
        first: when the first of them failed, UNIX seconds.
        last: when the last of them failed.
    """

    name: str
    reason: str
    first: float
    last: float


def failed_lookups(lines: Sequence[bytes]) -> FailedLookups | None:
    """Return the tries with which a log ends; None if it ends with anything else, or without stamps."""
    first_failure: re.Match[str] | None = None
    times: list[float] = []
    for line in reversed(lines):
        text = clean(line)
        if _RESOLVED in text:
            break
        if (failed := _FAILED.search(text)) is not None:
            if first_failure is not None and failed["name"] != first_failure["name"]:
                break
            first_failure = first_failure or failed
            if (when := time_of(text)) is not None:
                times.append(when)
        elif _OF_TRIES.search(text) is None:
            break
    if first_failure is None or not times:
        return None
    return FailedLookups(first_failure["name"], first_failure["reason"], times[-1], times[0])


def is_unresolved(text: str, above: Iterable[str]) -> bool:
    """Return whether a line states that torch gave up a connection, because it could not resolve the name.

    `above` are the lines before it, the nearest first.
    """
    if (gave_up := _TIMED_OUT.search(text)) is None:
        return False
    for line in above:
        if _RESOLVED in line:
            return False
        if (failed := _FAILED.search(line)) is not None:
            return failed["name"] == gave_up["name"]
    return False
