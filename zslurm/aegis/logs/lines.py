"""Logical lines of a log: out of bytes that many writers left, whatever else is among them.

A line ends at a line feed or at a carriage return, so that every state of a progress bar is a separate line.
Bytes that are no text become replacement characters. A line that is longer than MAX_LINE is cut into pieces that
overlap, so memory stays bounded and a fault in the midst of it is still found. What others put in front of a
writer's message (srun's label, time stamps, syslog's host, colours, a progress bar) is not part of it: `body_of`.
"""

from __future__ import annotations

import gzip
import re
import time
import zlib
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

MAX_LINE = 8192
"""Bytes of a line that are looked at at once."""
OVERLAP = 2048
"""Bytes that two pieces of a longer line share: more than any signature needs."""
_READ = 1 << 20
_MAX_BLOCK = 1 << 21


class Block(NamedTuple):
    """Some whole lines, or a part of a long one.

    Attributes:
        data: the bytes.
        number: of the line that `data` begins with, from 1.
    """

    data: bytes
    number: int


class Blocks:
    """Cuts a stream of bytes into blocks of complete lines."""

    def __init__(self) -> None:
        self._begun = bytearray()
        self._number = 1

    def feed(self, data: bytes) -> Iterator[Block]:
        """Take more bytes; yields what is complete."""
        self._begun += data
        end = max(self._begun.rfind(b"\n"), self._begun.rfind(b"\r")) + 1
        if end:
            yield self._take(end)
        while len(self._begun) > _MAX_BLOCK:  # one line without an end
            yield self._take(_MAX_BLOCK, keep=OVERLAP)

    def close(self) -> Iterator[Block]:
        """No more will come: what is left is a line as well."""
        if self._begun:
            yield self._take(len(self._begun))

    def _take(self, end: int, keep: int = 0) -> Block:
        block = Block(bytes(self._begun[:end]), self._number)
        del self._begun[: end - keep]
        self._number += block.data.count(b"\n")
        return block


def chunks_of(path: Path) -> Iterator[bytes]:
    """Yield the bytes of a file, unpacked if its name ends in .gz; a packed file that is cut off ends if it does.

    Raises:
        OSError: it cannot be read.
    """
    if path.suffix != ".gz":
        with path.open("rb") as file:
            while chunk := file.read(_READ):
                yield chunk
        return
    with gzip.open(path) as packed:
        try:
            while chunk := packed.read(_READ):
                yield chunk
        except (EOFError, zlib.error, gzip.BadGzipFile):
            return


def as_chunks(lines: Iterable[bytes]) -> Iterator[bytes]:
    """Lines with or without their line break as bytes that `Blocks.feed` takes."""
    for line in lines:
        yield line if line.endswith(b"\n") else line + b"\n"


_COLOURS = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_])")
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")


def clean(data: bytes) -> str:
    """Return a line as text: without colours, control characters and what is at its end."""
    text = data.decode("utf-8", "replace")
    if "\x1b" in text:
        text = _COLOURS.sub("", text)
    return _CONTROLS.sub(" ", text).rstrip()


# srun --label, torchrun and Megatron, PyTorch's loggers, Ray, mpirun, pdsh, and markdown that somebody pasted.
_LABELS = re.compile(
    r"(?:\d{1,6}: |\[?(?:default|rank|Rank )\d{1,6}\]?:(?: (?! ))?|\((?:\w+ )?pid=\d+[^)]{0,60}\) "
    r"|\[\d+,\d+\]<std(?:out|err)>: ?|(?:node|worker|nid|compute|host|gpu|cn|gn|ip-)[\w.-]*\d: |> )+"
)
_FRAMES = re.compile(r"^\s*(?:\+ )?\|\s")
_BAR = re.compile(r"^[^|\n]{0,80}?\d{1,3}%\|[^|\n]{0,400}\|[^\[\n]{0,60}(?:\[[^\]\n]{0,80}\])?[,:]?\s*")
_STAMP = re.compile(
    r"^\s*(?:"
    r"\[?\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?\]?(?: \w[\w.-]* kernel:)?[:,]?"
    r"|[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d \S+ [\w./-]+(?:\[\d+\])?:"
    r"|\[\s*\d+\.\d{6}\](?: ?\[ *[TC]?\d+\])?|\[[A-Z][a-z]{2} [A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d \d{4}\]"
    r"|kern\s*:\w+\s*:|kern\.\w+ kernel:|kernel:|<\d+>"
    r"|(?:stdout|stderr) [FP](?= )"  # containers
    r"|\[(?:pod/)?[a-z][\w.-]*/[\w./-]+\](?= )"  # kubectl logs --prefix
    r"|[\w.<>]+:[\w<>]+:\d+ - "  # loguru, what is left of it
    r"|\[[\w.]+\]\[(?:ERROR|CRITICAL)\] - "  # hydra
    r"|\[[a-z][\w.-]*:\d+\](?= )"  # Open MPI
    r"|(?:\[\w+\] )?\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d+ (?=- )"
    r"|(?:- [\w.]+ )?- (?:ERROR|CRITICAL|FATAL) - "
    r"|(?:ERROR|CRITICAL):[\w.]+:"
    r"|\[(?:ERROR|CRITICAL|FATAL)\] ?(?:\[[\w./-]+(?::\d+)?(?::\w+)?\])?"
    r"|\[?[EF]\d{3,4} \d\d:\d\d:\d\d\.\d+ [^\]\n]{1,80}\]"
    r"|\[?(?:ERROR|CRITICAL|FATAL)\]?(?:[:\s-]|$)"
    r")\s*"
)


def without_labels(text: str) -> str:
    """Return a line without the labels of who wrote it, its indentation kept."""
    label = _LABELS.match(text)
    return text[label.end() :] if label else text


def body_of(text: str) -> str:
    """Return only the message of the writer, without labels, progress bar and stamps in front of them."""
    while True:
        remainder = _FRAMES.sub("", without_labels(text.lstrip() if text[:1].isspace() else text), count=1)
        if "%|" in remainder:
            remainder = _BAR.sub("", remainder, count=1)
        remainder = _message_of(_STAMP.sub("", remainder, count=1))
        if remainder == text:
            return text
        text = remainder


_KEYED = re.compile(
    r'^\{.{0,400}?"(?:log|msg|message|MESSAGE|text|error)"\s*:\s*"((?:[^"\\]|\\.)*)"'
    r'|^(?:\S+=\S+ ){0,8}level=\S+ (?:\S+=\S+ ){0,8}?msg="((?:[^"\\]|\\.)*)"'
)
_ESCAPES = re.compile(r'\\(?:[nrt]|(["\\/]))')


def _message_of(text: str) -> str:
    """Return only the message of a line that is a JSON object or logfmt, as containers and journald write."""
    if text[:1] != "{" and "msg=" not in text:
        return text
    match_of_key = _KEYED.match(text)
    return (
        _ESCAPES.sub(lambda escape: escape[1] or " ", match_of_key[1] or match_of_key[2] or "").rstrip()
        if match_of_key
        else text
    )


_ISO = re.compile(r"(\d{4}-\d\d-\d\d)[T ](\d\d:\d\d:\d\d)(?:[.,](\d{1,6})\d*)?(Z|[+-]\d\d:?\d\d)?")
_SYSLOG = re.compile(r"\b([A-Z][a-z]{2}) ([ \d]\d) (\d\d):(\d\d):(\d\d)(?: (\d{4}))?\b")
_GLOG = re.compile(r"\[?[EWIF](\d{1,2}?)(\d\d) (\d\d):(\d\d):(\d\d)(?:\.(\d{1,6}))?")
_MONTHS = {name: n for n, name in enumerate("Jan Feb Mar Apr May Jun Jul Aug Sep Oct Nov Dec".split(), 1)}
_TIME_WITHIN = 160
_DAY_S = 86_400.0


def time_of(text: str, about: float | None = None) -> float | None:
    """Return when a line was written, by its own stamp; None if it has none.

    Understood are ISO 8601 (Slurm, Python's logging, journalctl, dmesg), syslog, dmesg -T and the stamps of glog
    and PyTorch. Without an offset the time is this machine's, without a year the last one before `about` (UNIX
    seconds; default: now). The seconds since boot of dmesg are no time.
    """
    head = text[:_TIME_WITHIN]
    if match := _ISO.search(head):
        zone = (match[4] or "").replace("Z", "+00:00")
        return _stamp(f"{match[1]}T{match[2]}.{(match[3] or '0'):0<6}{zone}")
    if (match := _GLOG.search(head)) and 1 <= int(match[1]) <= 12:
        month, day, *clock = (int(match[n]) for n in range(1, 6))
        return _of_the_year(month, day, clock, match[6] or "0", about)
    if (match := _SYSLOG.search(head)) and match[1] in _MONTHS:
        month, day, clock = _MONTHS[match[1]], int(match[2]), [int(match[n]) for n in (3, 4, 5)]
        if match[6]:
            return _stamp(f"{match[6]}-{month:02}-{day:02}T{clock[0]:02}:{clock[1]:02}:{clock[2]:02}")
        return _of_the_year(month, day, clock, "0", about)
    return None


def _stamp(iso: str) -> float | None:
    try:
        return datetime.fromisoformat(iso).timestamp()
    except (ValueError, OverflowError):
        return None


def _of_the_year(month: int, day: int, clock: list[int], fraction: str, about: float | None) -> float | None:
    """Return a time of the year that is in the past as seen from `about`: a log holds no future times."""
    about = time.time() if about is None else about
    year = datetime.fromtimestamp(about, UTC).year
    for candidate in (year, year - 1):
        iso = f"{candidate}-{month:02}-{day:02}T{clock[0]:02}:{clock[1]:02}:{clock[2]:02}.{fraction:0<6}"
        when = _stamp(iso)
        if when is not None and when <= about + _DAY_S:
            return when
    return None
