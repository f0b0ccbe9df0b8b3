"""Who asks a server (tests/command_server.py) to fork a command, and stands for it.

    python -I -S tests/forked/client.py SOCKET ARGUMENTS...      `zslurm ARGUMENTS...`, for shells

A run of the tests has thousands of them: this imports only what Python has built in, as most of what a forked
command costs is what its client imports.
"""

import _signal  # type: ignore[import-not-found]
import _socket
import marshal
import os
import resource
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

LIMITS = (
    resource.RLIMIT_CORE, resource.RLIMIT_FSIZE, resource.RLIMIT_MEMLOCK, resource.RLIMIT_NOFILE,
    resource.RLIMIT_NPROC,
)  # fmt: skip
PASSED_ON = (_signal.SIGTERM, _signal.SIGINT, _signal.SIGHUP, _signal.SIGUSR1, _signal.SIGUSR2)


def ask(
    server: str,
    arguments: list[str],
    env: dict[str, str],
    cwd: str,
    descriptors: "Sequence[int]",
    *,
    module: str | None = None,
    timeout: float | None = None,
    began: "Callable[[int], object]" = lambda pid: None,
) -> int:
    """Have a command run with three open files; returns its exit code, of a signal the negative number.

    Args:
        server: the path of its socket.
        arguments: of the command, or of `module`.
        env: its whole environment.
        cwd: its working directory.
        descriptors: its standard input, output and errors.
        module: run as `python -m MODULE` instead of zslurm.
        timeout: seconds until it is killed.
        began: called with its process id.

    Raises:
        TimeoutError: it took too long, and was killed.
    """
    connection = _socket.socket(_socket.AF_UNIX)
    try:
        connection.connect(server)
        rights = b"".join(number.to_bytes(4, sys.byteorder) for number in descriptors)
        connection.sendmsg([b"\n"], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, rights)])
        request = {
            "arguments": arguments,
            "env": env,
            "cwd": cwd,
            "module": module,
            "cores": list(os.sched_getaffinity(0)),
            "limits": [(number, resource.getrlimit(number)) for number in LIMITS],
            "ignored": [(number, _signal.getsignal(number) == _signal.SIG_IGN) for number in PASSED_ON],
        }
        connection.sendall(marshal.dumps(request))
        if not (pid := _line(connection)):
            raise RuntimeError("the server of commands ended before the command began: see its messages above")
        began(int(pid))
        connection.settimeout(timeout)
        try:
            return int(_line(connection))
        except TimeoutError:
            os.kill(int(pid), _signal.SIGKILL)
            raise
    finally:
        connection.close()


def _line(connection: _socket.socket) -> bytes:
    line = b""
    while not line.endswith(b"\n") and (more := connection.recv(1)):
        line += more
    return line


def stand_for(server: str, arguments: list[str], module: str | None = None) -> int:
    """Be, for everybody else, the command that the server forks: signals are passed on; returns its exit code."""

    def began(pid: int) -> None:
        def pass_on(signum: int, frame: object) -> None:
            try:  # noqa: SIM105
                os.kill(pid, signum)
            except ProcessLookupError:
                pass

        for signum in PASSED_ON:
            _signal.signal(signum, pass_on)

    here = os.getcwd()  # noqa: PTH109
    return ask(server, arguments, dict(os.environ), here, (0, 1, 2), module=module, began=began)


if __name__ == "__main__":
    code = stand_for(sys.argv[1], sys.argv[2:])
    sys.exit(code if code >= 0 else 128 - code)
