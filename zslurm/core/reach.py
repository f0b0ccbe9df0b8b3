"""Whether a TCP port of another machine answers, refuses, or nothing comes back."""

from __future__ import annotations

import errno
import socket
from typing import Literal, get_args

Reach = Literal["answers", "refuses", "nothing", "unknown"]
"""A connection was accepted; it was refused, so the machine lives and nothing listens there; nothing came back; or
the question could not be asked."""

CONNECT_S = 1.25
"""Seconds that a connection gets: Linux sends a lost request again after one, and gets its answer at once."""

_NOTHING = {errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN}
_REFUSED = {errno.ECONNREFUSED, errno.ECONNRESET}


def reach(host: str, port: int, timeout_s: float) -> Reach:
    """Connect to a port and hang up; nothing is sent."""
    try:
        with socket.create_connection((host, port), timeout_s):
            return "answers"
    except TimeoutError:
        return "nothing"
    except OSError as error:
        return "nothing" if error.errno in _NOTHING else "refuses" if error.errno in _REFUSED else "unknown"


def reach_of(value: object) -> Reach:
    """Return what another process reported; `unknown` for what is no such word."""
    return next((word for word in get_args(Reach) if word == value), "unknown")
