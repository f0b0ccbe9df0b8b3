"""Files that other hands may have damaged, in plain words: no message names Python's errors or types.

`load_json` is the JSON reader of the repository for files that may hold anything: whatever is wrong with it is
one ValueError with a message for people. `in_words` gives such a message for an error that Python raised while a
document of an unexpected form was taken apart. `reason_of` gives the reason of any error in one line.

It is here because checkpoint_tools is usable by itself: train and zslurm import it from here.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import traceback
from pathlib import Path
from typing import Any

StrPath = str | os.PathLike[str]
"""A path as a caller may give it: functions that others call take text as well as a `pathlib.Path`."""


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
    if isinstance(cause, UnicodeEncodeError):
        return f"it is not UTF-8 text (character {cause.start})"
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


_LONGEST_REASON = 500
# What torch writes after the message of an error of its C++ code: the stack.
_STACK = re.compile(r"\s*(\nException raised from |\nC\+\+ (CapturedTraceback|stack trace)).*", re.DOTALL)
_MISTAKES = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    NameError,
    NotImplementedError,
    RecursionError,
    TypeError,
)


def reason_of(error: BaseException) -> str:
    """Describe why something failed, in one line for people.

    An error of the operating system is the path and the system's message; other errors are their message. No class
    of Python is named, except that of a mistake in a program (a KeyError, a TypeError, ...): there it is what a
    report of the mistake needs, with the line of the program.
    """
    if isinstance(error, OSError):
        reason = _refusal(error)
    elif isinstance(error, (subprocess.TimeoutExpired, subprocess.CalledProcessError)):
        reason = _ended(error)
    elif isinstance(error, (RecursionError, UnicodeError, json.JSONDecodeError)):
        reason = in_words(error)
    elif isinstance(error, _MISTAKES):
        frames = traceback.extract_tb(error.__traceback__)
        where = f" at {'/'.join(Path(frames[-1].filename).parts[-2:])}:{frames[-1].lineno}" if frames else ""
        reason = f"internal error ({type(error).__name__}: {error}{where})"
    else:
        reason = _STACK.sub("", str(error))
    return shorten(" ".join(reason.split()), _LONGEST_REASON) or _words_of_class(error)


def _refusal(error: OSError) -> str:
    if error.args and isinstance(error.args[0], list):  # shutil.Error: (source, destination, why) of each file
        source, _, why = error.args[0][0]
        return f"{source}: {re.sub(r'^.Errno -?[0-9]+. ', '', str(why)).partition(': ')[0]}"
    what = error.strerror or str(error) or _words_of_class(error)
    return f"{error.filename}: {what}" if isinstance(error.filename, str | Path) else what


def _ended(error: subprocess.TimeoutExpired | subprocess.CalledProcessError) -> str:
    command = error.cmd if isinstance(error.cmd, str) else str(error.cmd[0])
    if isinstance(error, subprocess.TimeoutExpired):
        return f"{command} did not end within {error.timeout:g} s"
    code = error.returncode
    return f"{command} ended with exit code {code}" if code >= 0 else f"{command} was killed by signal {-code}"


def _words_of_class(error: BaseException) -> str:
    """Name an error without a message: `ConnectionResetError` is `connection reset error`."""
    return " ".join(re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", type(error).__name__)).lower()


def shorten(text: str, most: int = 60) -> str:
    """Return the text, or its beginning if it is longer than `most` characters: a message stays one line."""
    return text if len(text) <= most else f"{text[: most - 3]}..."
