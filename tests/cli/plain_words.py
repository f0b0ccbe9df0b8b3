"""The command line on bad input: what it must answer with, and what it must never print."""

from __future__ import annotations

import contextlib
import io
import re
import sys

from tests.cli.commands import Outcome
from zslurm.cli.main import main
from zslurm.core.errors import Exit

PYTHONS_WORDS = re.compile(
    r"Traceback|\b[A-Z][A-Za-z]*(?<!Out)Error\b|\b[A-Z]\w+Exception\b|NoneType|<class|object has no attribute|"
    r"indices must be|not subscriptable|not iterable|unhashable|keyword argument|positional argument|"
    r"invalid literal|could not convert|unsupported operand|not supported between|object of type|\[Errno|"
    r"codec can't|int_max_str_digits|recursion depth|out of range\b(?! of)|PosixPath\(|Exit\.[A-Z]"
)


def zslurm(*arguments: str) -> Outcome:
    """`main` in this process, with nothing on stdin."""
    out, messages = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="replace") for _ in range(2))
    before = sys.argv, sys.stdin
    sys.argv, sys.stdin = ["zslurm", *arguments], io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(messages):
            try:
                main()
            except SystemExit as ended:
                code = int(ended.code or 0)
    finally:
        sys.argv, sys.stdin = before
    printed = []
    for stream in (out, messages):
        stream.flush()
        stream.seek(0)
        printed.append(stream.read())
    return Outcome(code, *printed)


def problem_of(*arguments: str, on_stdout: bool = False) -> str | None:
    """What is wrong with how a command took bad input; None if nothing is.

    Args:
        arguments: those of zslurm.
        on_stdout: the command reports what it found wrong on stdout, and needs no message besides.
    """
    command = " ".join(argument if len(argument) < 80 else f"{argument[:80]}..." for argument in arguments)
    try:
        done = zslurm(*arguments)
    except BaseException as error:
        return f"{command!r}: raised {error!r}"[:600]
    if done.code not in set(Exit):
        return f"{command!r}: exit code {done.code}"
    if found := PYTHONS_WORDS.search(done.stderr + done.stdout):
        return f"{command!r}: {found[0]!r} in {(done.stderr + done.stdout)[:600]!r}"
    reported = any(line.startswith("zslurm: ") for line in done.stderr.splitlines())
    if done.code and not reported and not on_stdout:
        return f"{command!r}: exit code {done.code} without a message: {done.stderr[:300]!r}"
    return None
