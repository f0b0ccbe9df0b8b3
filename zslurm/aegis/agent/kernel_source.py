"""Where lines of the kernel log come from: /dev/kmsg, journalctl, or a file. Only what is new since a position.

Each source gives what came since the last call, and never waits. It is opened at its end, or at the position that
a source of the same kind was at before, in this process or in another: the number of a record and its boot, the
inode and offset of a file, the time of the journal. /dev/kmsg gives one record for each read
(Documentation/ABI/testing/dev-kmsg): `6,339,5140900,-;text`, then lines ` KEY=value`. What user space wrote there
has another facility than the kernel's 0, and is left out. journalctl needs no root where the user is in the group
systemd-journal or adm.
"""

from __future__ import annotations

import glob
import os
import re
import shutil
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from zslurm.core.files import read_text

_CHUNK = 1 << 16
_LONGEST_LINE = 1 << 16
_MOST_RECORDS = 2000
"""Lines of one call: a storm of them must not hold the sensor; the rest comes with the next."""

_MOST_AGAIN = 16 << 20
"""Bytes of a file that are read again, at most: the newest."""

Position = Mapping[str, int | float | str]
"""Where a source is; each kind has its own keys."""

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_ESCAPED = re.compile(rb"\\x([0-9a-f]{2})")
_PREFIX = re.compile(
    r"(?:<\d+>)?"  # level, raw
    r"(?:\[ *\d+\.\d+\] \S+ kernel: "  # journalctl -o short-monotonic
    r"|(?:\w{3} [ \d]\d [\d:]{8}|\d{4}-\S+) \S+ kernel: )?"  # syslog, journalctl -o short or short-iso
    r"(?:kernel: )?(?:\[ *\d+\.\d+\] ?)?"  # dmesg
)


class Unavailable(Exception):
    """The kernel log cannot be read; the message says why."""


class Ended(Unavailable):
    """The source is of no more use: another must be opened."""


class Source(ABC):
    """Gives new lines of the kernel log."""

    @abstractmethod
    def lines(self) -> list[str]:
        """What came since the last call, oldest first.

        Raises:
            Unavailable: it cannot be read now.
            Ended: nor ever again.
        """

    @abstractmethod
    def position(self) -> Position:
        """Where the next call goes on, such that a source that is opened there misses nothing."""

    @abstractmethod
    def close(self) -> None:
        """Let go of what is open."""


def text_of(line: str) -> str:
    """The kernel's own words of a line, without time, host and level."""
    prefix = _PREFIX.match(line)
    return line[prefix.end() :] if prefix else line


class Follower:
    """Cuts a stream of bytes into lines. One without end is cut where it is too long."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, chunk: bytes) -> list[str]:
        """The lines that a chunk completes."""
        *whole, self._rest = (self._rest + chunk).split(b"\n")
        if len(self._rest) > _LONGEST_LINE:
            whole, self._rest = [*whole, self._rest], b""
        return [line[:_LONGEST_LINE].decode("utf-8", errors="replace").rstrip("\r") for line in whole]

    @property
    def waiting(self) -> int:
        """Bytes of the line that is not complete yet."""
        return len(self._rest)

    def reset(self) -> None:
        """Forget the beginning of a line."""
        self._rest = b""


class LogFile(Source):
    """A file that grows, is rotated (renamed, and made anew) or truncated: `tail -n 0 -F`.

    One that is not there yet is read from its beginning once it is. One that was rotated since a position is found
    beside its name, by its inode; where it is gone, the file that bears the name now is read from its beginning.
    """

    def __init__(self, path: Path, at: Position | None = None) -> None:
        """
        Args:
            path: of the file.
            at: a position of before; None: its end.
        """
        self._path = path
        self._follower = Follower()
        self._fd: int | None = None
        self._read = 0
        with suppress(Unavailable):
            if at is None or "inode" not in at:
                self._open()
                self._seek(None)
            else:
                self._open_at(at)

    def _open_at(self, at: Position) -> None:
        """Raises Unavailable: there is no file."""
        wanted = (at.get("device"), at.get("inode"))
        for path in (self._path, *sorted(self._path.parent.glob(f"{glob.escape(self._path.name)}?*"))):
            with suppress(OSError):
                status = path.stat()
                if (status.st_dev, status.st_ino) == wanted:
                    self._open(path)
                    offset = at.get("offset")
                    self._seek(offset if isinstance(offset, int) and 0 <= offset <= status.st_size else 0)
                    return
        self._open()
        self._seek(0)

    def _seek(self, offset: int | None) -> None:
        """Go there, or to the end; never so far before it that reading on would take for ever."""
        assert self._fd is not None
        end = os.lseek(self._fd, 0, os.SEEK_END)
        self._read = end if offset is None else max(offset, end - _MOST_AGAIN)
        os.lseek(self._fd, self._read, os.SEEK_SET)

    def position(self) -> Position:
        if self._fd is None:
            return {"device": 0, "inode": 0, "offset": 0}
        status = os.fstat(self._fd)
        offset = self._read - self._follower.waiting
        return {"device": status.st_dev, "inode": status.st_ino, "offset": offset}

    def lines(self) -> list[str]:
        found: list[str] = []
        if self._fd is None:
            self._open()
        found += self._drain()
        if self._was_replaced():
            found += self._drain()  # what came between the last look and the rename
            self.close()
            self._open()
            found += self._drain()
        return found

    def _open(self, path: Path | None = None) -> None:
        try:
            self._fd = os.open(path or self._path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise Unavailable(f"{self._path}: {error.strerror}") from error
        self._read = 0
        self._follower.reset()

    def _drain(self) -> list[str]:
        assert self._fd is not None
        found: list[str] = []
        try:
            if os.fstat(self._fd).st_size < self._read:
                self._read = os.lseek(self._fd, 0, os.SEEK_SET)
                self._follower.reset()
            while len(found) < _MOST_RECORDS and (chunk := os.read(self._fd, _CHUNK)):
                self._read += len(chunk)
                found += self._follower.feed(chunk)
        except OSError as error:
            self.close()
            raise Unavailable(f"{self._path}: {error.strerror}") from error
        return [text_of(line) for line in found]

    def _was_replaced(self) -> bool:
        """Whether another file bears the name by now; while none does, the old one is read on."""
        assert self._fd is not None
        try:
            there = self._path.stat()
        except OSError:
            return False
        mine = os.fstat(self._fd)
        return (there.st_dev, there.st_ino) != (mine.st_dev, mine.st_ino)

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


class Kmsg(Source):
    """/dev/kmsg."""

    def __init__(self, path: Path, at: Position | None = None) -> None:
        """
        Args:
            path: of the device.
            at: a position of before; None, or one of another boot: its end.

        Raises:
            Unavailable: it may not be opened (kernel.dmesg_restrict, or a container without it).
        """
        self._path = path
        self._boot = read_text(_BOOT_ID) or ""
        self._next: bytes | None = None
        known = at.get("record") if at is not None and at.get("boot") == self._boot else None
        self._record = -1
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise Unavailable(f"{path}: {error.strerror}") from error
        try:
            os.lseek(self._fd, 0, os.SEEK_SET)  # the oldest record; only reading tells the number of the newest
            self._skip(known if isinstance(known, int) else None)
        except (OSError, Unavailable) as error:
            self.close()
            raise Unavailable(f"{path}: {error.strerror if isinstance(error, OSError) else error}") from error

    def _skip(self, known: int | None) -> None:
        """Read on behind a record, or to the end.

        Raises:
            Unavailable: it cannot be read.
        """
        while (record := self._take()) is not None:
            number = record_number(record)
            if known is not None and number is not None and number > known:
                self._next = record
                return
            self._record = self._record if number is None else number

    def _take(self) -> bytes | None:
        """The next record; None where there is none yet.

        Raises:
            Unavailable: it cannot be read.
        """
        while True:
            try:
                return os.read(self._fd, _CHUNK) or None
            except BlockingIOError:
                return None
            except BrokenPipeError:  # records were overwritten before they were read: the next read goes on behind
                continue
            except OSError as error:
                raise Unavailable(f"{self._path}: {error.strerror}") from error

    def lines(self) -> list[str]:
        found: list[str] = []
        for _ in range(_MOST_RECORDS):
            record, self._next = self._next or self._take(), None
            if record is None:
                break
            number = record_number(record)
            self._record = self._record if number is None else number
            if (text := parse_record(record)) is not None:
                found.append(text)
        return found

    def position(self) -> Position:
        return {"boot": self._boot, "record": self._record}

    def close(self) -> None:
        with suppress(OSError):
            os.close(self._fd)


def record_number(record: bytes) -> int | None:
    """The number of a record of /dev/kmsg, its second field; None for garbage."""
    fields = record.partition(b";")[0].split(b",")
    return int(fields[1]) if len(fields) > 1 and fields[1].isdigit() else None


def parse_record(record: bytes) -> str | None:
    """The kernel's words in a record of /dev/kmsg; None for what user space wrote, and for garbage."""
    head, separator, rest = record.partition(b";")
    priority = head.split(b",")[0]
    if not separator or not priority.isdigit() or int(priority) >> 3:
        return None
    text = rest.split(b"\n")[0]
    return _ESCAPED.sub(lambda match: bytes([int(match[1], 16)]), text).decode("utf-8", errors="replace")


class Journal(Source):
    """`journalctl -k -f`."""

    def __init__(
        self, program: str, environ: Mapping[str, str], timeout_s: float, at: Position | None = None
    ) -> None:
        """
        Args:
            program: journalctl.
            environ: its environment.
            timeout_s: after which it counts as hanging.
            at: a position of before; None: its end.

        Raises:
            Unavailable: this user may not see the kernel's lines, or journalctl does not answer.
        """
        self._follower = Follower()
        self._process: subprocess.Popen[bytes] | None = None
        self._at = time.time()
        since = None if at is None else at.get("since")
        new = ["-n", "0"]
        if isinstance(since, int | float) and 0 < since <= self._at:
            new, self._at = ["--no-tail", f"--since=@{int(since)}"], float(since)
        form = ["--no-pager", "--output=short-monotonic"]
        try:
            said = subprocess.run(
                [program, "-k", "-n", "1", *form], env=dict(environ), stdin=subprocess.DEVNULL,
                capture_output=True, timeout=timeout_s, check=False,
            )  # fmt: skip
            if b" kernel: " not in said.stdout:
                words = (said.stderr or said.stdout).decode("utf-8", errors="replace").strip().splitlines()
                raise Unavailable(
                    f"journalctl shows no line of the kernel: {words[-1] if words else 'it is empty'}"
                )
            self._process = subprocess.Popen(
                [program, "-k", "-f", *new, *form], env=dict(environ), stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            )  # fmt: skip
        except subprocess.TimeoutExpired as error:
            raise Unavailable(f"journalctl said nothing within {timeout_s:g} s") from error
        except OSError as error:
            raise Unavailable(f"journalctl cannot be run: {error.strerror}") from error
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)

    def lines(self) -> list[str]:
        assert self._process is not None and self._process.stdout is not None
        began = time.time()
        found: list[str] = []
        while len(found) < _MOST_RECORDS:
            try:
                chunk = os.read(self._process.stdout.fileno(), _CHUNK)
            except BlockingIOError:
                break
            if not chunk:
                raise Ended("journalctl has ended")
            found += self._follower.feed(chunk)
        self._at = began
        return [text_of(line) for line in found]

    def position(self) -> Position:
        return {"since": self._at}

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            assert self._process.stdout is not None
            self._process.stdout.close()
            self._process = None


def open_source(
    setting: str, node: str, root: Path, environ: Mapping[str, str], timeout_s: float, at: Position | None = None
) -> Source:
    """The source that a setting names.

    Args:
        setting: `auto`, or a file (`%n`: the node).
        node: name of this node.
        root: where /dev is; see `sysfs.sysroot`.
        environ: to find journalctl in, and to run it with.
        timeout_s: after which journalctl counts as hanging.
        at: a position of before, of the same setting; None: the end.

    Raises:
        Unavailable: nothing can be read, with the reason for each way that was tried.
    """
    if setting != "auto":
        return LogFile(Path(setting.replace("%n", node)), at)
    try:
        return Kmsg(root / "dev/kmsg", at)
    except Unavailable as error:
        why = str(error)
    program = shutil.which("journalctl", path=environ.get("PATH", os.defpath)) if root == Path("/") else None
    if program is None:
        raise Unavailable(f"{why}; no journalctl")
    try:
        return Journal(program, environ, timeout_s, at)
    except Unavailable as error:
        raise Unavailable(f"{why}; {error}") from error
