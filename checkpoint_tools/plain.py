"""Files that other hands may have damaged, in plain words: no message names Python's errors or types.

`load_json` is the JSON reader of the whole repository where a file may hold anything: whatever is wrong with it is
one ValueError with a message for people. `in_words` gives such a message for an error that Python raised while a
document of an unexpected form was taken apart.

It is here because checkpoint_tools is usable alone: train and zslurm take it from here.
"""

from __future__ import annotations

import json
from typing import Any


class Unexpected(ValueError):
    """A document is not of the expected form; the message is for people."""


def load_json(data: bytes | str) -> Any:
    """Parse JSON.

    Raises:
        Unexpected: it is not UTF-8 text, not JSON, or nested or sized beyond what these files hold.
    """
    try:
        return json.loads(data)
    except (RecursionError, ValueError) as cause:
        raise Unexpected(in_words(cause)) from cause


def in_words(cause: Exception) -> str:
    """Return what an error of reading means for the file that was read, as the end of a sentence."""
    if isinstance(cause, Unexpected):
        return str(cause)
    if isinstance(cause, UnicodeDecodeError):
        return f"it is not UTF-8 text (byte {cause.start})"
    if isinstance(cause, json.JSONDecodeError):
        return f"it is not JSON ({cause.msg}, line {cause.lineno} column {cause.colno})"
    if isinstance(cause, KeyError):
        return f"the key {json.dumps(str(cause.args[0]) if cause.args else '')} is missing"
    if isinstance(cause, RecursionError):
        return "it is nested too deeply"
    if isinstance(cause, OSError):
        return cause.strerror or "it cannot be read"
    if isinstance(cause, ValueError) and "integer string conversion" in str(cause):
        return "it holds a number of too many digits"
    return "its content is not of the expected form"
