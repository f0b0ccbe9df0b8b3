"""Run one command with limits, in separate namespaces: the program that `sandbox.py` starts for every sample.

    python -I -S launcher.py SETTINGS COMMAND...      SETTINGS: JSON, see `main`

    users               a namespace that lets an ordinary user make the others; root becomes a user with nothing
    network             an empty one: no interface but a loopback that is down
    processes           when the command ends, whatever it has started is killed by the kernel
    mounts              everything is read-only but /tmp, /dev/shm and the working folder, small ones in memory
    limits              address space of each process, processor time, processes, size of files

It writes one line to the descriptor `status`: `ready` before the command starts, or why it cannot be. Only the
standard library is used, and as little of it as possible (no pathlib): it starts once for each sample.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import sys
from typing import Any, NoReturn

_NEWNS, _NEWUTS, _NEWIPC, _NEWUSER, _NEWPID, _NEWNET = (
    0x00020000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000,
)  # fmt: skip
_NOSUID, _NODEV, _REC, _PRIVATE = 2, 4, 0x4000, 1 << 18
_PDEATHSIG, _SUBREAPER, _NO_NEW_PRIVS = 1, 36, 38
_SYS_MOUNT_SETATTR = 442  # the same on all architectures; Linux 5.12
_AT_FDCWD, _AT_RECURSIVE, _ATTR_RDONLY = -100, 0x8000, 1
_NOBODY = 65534
_FIRST_OWN_USER, _OWN_USERS = 1_879_048_192, 1 << 22  # numbers that no directory of users hands out; one for a pid


def main() -> NoReturn:
    """Run as a program.

    Settings: `folder` (files of it are copied into the working folder), `isolate`, `network`, `time_s`, `memory`
    (bytes), `processes`, `file` (bytes), `status`.
    """
    settings, command = json.loads(sys.argv[1]), sys.argv[2:]
    status = settings["status"]
    libc = ctypes.CDLL(None, use_errno=True)
    user = _user()
    try:
        if settings["isolate"]:
            libc.prctl(_PDEATHSIG, signal.SIGKILL)
            _isolate(libc, settings)
            # The first process of the new namespace: all others in it end with it.
            inner = os.fork()
            if inner:
                _forward(inner, status)
            libc.prctl(_PDEATHSIG, signal.SIGKILL)
            _mounts(libc, settings, user)
        else:
            # No namespace ends what the command has started: this process does, also when it is asked to end.
            signal.signal(signal.SIGTERM, _end_all)
            libc.prctl(_PDEATHSIG, signal.SIGTERM)
            libc.prctl(_SUBREAPER, 1)
        child = os.fork()
        if not child:
            libc.prctl(_PDEATHSIG, signal.SIGKILL)
            _limit(libc, settings, user)
            os.write(status, b"ready\n")
            os.close(status)
            os.execvp(command[0], command)
    except OSError as error:
        os.write(status, f"{error.strerror or error} ({error.filename or 'system call'})\n".encode())
        os._exit(120)
    os.close(status)
    code = _reap(child)
    if not settings["isolate"]:
        _kill_the_rest()
    os._exit(code)


def _user() -> int:
    """Return the user that the command runs as: this one; for root a number that nothing else uses.

    Linux counts processes by user: programs that run at the same time would use up each other's limit.
    """
    if os.getuid():
        return os.getuid()
    own = _FIRST_OWN_USER + os.getpid() % _OWN_USERS
    with open("/proc/self/uid_map", encoding="ascii") as file:
        spans = [list(map(int, line.split())) for line in file]
    return own if any(first <= own < first + count for first, _, count in spans) else _NOBODY


def _isolate(libc: ctypes.CDLL, settings: dict[str, Any]) -> None:
    """Enter new namespaces; an ordinary user needs one of users for the right to make the others."""
    uid, gid = os.getuid(), os.getgid()
    spaces = _NEWNS | _NEWPID | _NEWIPC | _NEWUTS | (0 if settings["network"] else _NEWNET)
    _check(libc.unshare(spaces | (_NEWUSER if uid else 0)), "unshare")
    if uid:
        _write("/proc/self/setgroups", "deny")
        _write("/proc/self/uid_map", f"{uid} {uid} 1\n")
        _write("/proc/self/gid_map", f"{gid} {gid} 1\n")


def _mounts(libc: ctypes.CDLL, settings: dict[str, Any], uid: int) -> None:
    """Make everything read-only, and small folders in memory over those that programs write to."""
    gid = _NOBODY if os.getuid() == 0 else os.getgid()
    _check(libc.mount(b"none", b"/", None, _REC | _PRIVATE, None), "mount /")
    attributes = (ctypes.c_uint64 * 4)(_ATTR_RDONLY, 0, 0, 0)
    path, size = ctypes.c_char_p(b"/"), ctypes.c_size_t(ctypes.sizeof(attributes))
    changed = libc.syscall(_SYS_MOUNT_SETATTR, _AT_FDCWD, path, _AT_RECURSIVE, attributes, size)
    _check(changed, "mount_setattr /")
    folder = settings["folder"]
    files = {name: _contents(os.path.join(folder, name)) for name in os.listdir(folder)}
    options = f"size={settings['file']},mode=0700,uid={uid},gid={gid}".encode()
    for place in ("/tmp", "/dev/shm"):
        if os.path.isdir(place):
            _check(libc.mount(b"tmpfs", place.encode(), b"tmpfs", _NOSUID | _NODEV, options), f"mount {place}")
    if not settings["network"]:
        _check(libc.mount(b"proc", b"/proc", b"proc", _NOSUID | _NODEV, None), "mount /proc")
    os.makedirs("/tmp/work", mode=0o700)
    for name, content in files.items():
        with open(os.path.join("/tmp/work", name), "wb") as file:
            file.write(content)
    for each in ("/tmp/work", *(os.path.join("/tmp/work", name) for name in files)):
        os.chown(each, uid, gid)
    os.chdir("/tmp/work")


def _limit(libc: ctypes.CDLL, settings: dict[str, Any], user: int) -> None:
    """Set the limits of the command's processes, and drop what a root user may do."""
    os.setsid()
    if settings["isolate"] and os.getuid() == 0:
        os.setgroups([])
        os.setresgid(_NOBODY, _NOBODY, _NOBODY)
        os.setresuid(user, user, user)
        libc.prctl(_PDEATHSIG, signal.SIGKILL)  # which a change of the user takes away
    libc.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0)
    seconds = int(settings["time_s"]) + 1
    for kind, most in (
        (resource.RLIMIT_AS, settings["memory"]),
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_FSIZE, settings["file"]),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, 256),
        (resource.RLIMIT_NPROC, settings["processes"]),
    ):
        # A second more until SIGKILL, so that it is SIGXCPU that ends what computes for too long.
        highest, hard = most + (kind == resource.RLIMIT_CPU), resource.getrlimit(kind)[1]
        highest = highest if hard == resource.RLIM_INFINITY else min(highest, hard)
        resource.setrlimit(kind, (min(most, highest), highest))
    if not settings["isolate"]:
        os.chdir(settings["folder"])


def _reap(child: int) -> int:
    """Wait for the command; return its exit code, 128 and more for a signal."""
    while True:
        pid, status = os.wait()
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


def _forward(inner: int, status: int) -> NoReturn:
    os.close(status)
    os._exit(_reap(inner))


def _end_all(number: int, frame: object) -> NoReturn:
    """Handle SIGTERM: end the command and what it has started."""
    _kill_the_rest()
    os._exit(128 + number)


def _kill_the_rest() -> None:
    """Kill what the command left behind, which is this process's by now."""
    while True:
        with open(f"/proc/self/task/{os.getpid()}/children", encoding="ascii") as file:
            children = [int(word) for word in file.read().split()]
        if not children:
            return
        for child in children:
            os.kill(child, signal.SIGKILL)
        for child in children:
            os.waitpid(child, 0)


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), what)


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="ascii") as file:
        file.write(text)


def _contents(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


if __name__ == "__main__":
    main()
