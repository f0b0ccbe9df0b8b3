"""Commands of zslurm that need not wait for its imports: forked from a process that has them behind it.

    python -P tests/command_server.py FD [MODULE...]    what `CommandServer` starts; tests/forked/client.py asks it

A command gets the arguments, the variables, the working directory and the open files of whoever asks for it, and
runs the console script's `main`: what differs from `python -P -m zslurm` is the start of Python alone. Variables
that Python itself reads when it starts (PYTHONPATH and its like) reach only what the command starts.

Ranks of a run can begin so as well: tests/forked has what makes `python -m zslurm.job.rank` ask the server. The
process that asked then stands for the one that works: it passes signals on and ends as that one does, and if it
is killed, the other one is.
"""

from __future__ import annotations

import contextlib
import marshal
import os
import resource
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

PACKAGES = ("cli", "cluster", "config", "doctor", "plan", "report", "run", "slurm", "submit")
"""Of zslurm: all of their modules are imported before the first command, and none of them imports torch."""


class Commands:
    """Commands that are forked from a server, which another process may have started."""

    def __init__(self, path: Path) -> None:
        """Take the server's socket."""
        self.path = path

    def run(
        self,
        arguments: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: Path,
        input: str = "",
        timeout: float,
        module: str | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run `zslurm ARGUMENTS`, or `python -m MODULE ARGUMENTS`, with `subprocess.run`'s result.

        Raises:
            subprocess.TimeoutExpired: it took too long, and was killed.
        """
        import tempfile

        from tests.forked.client import ask

        with contextlib.ExitStack() as files:
            streams = [files.enter_context(tempfile.TemporaryFile("w+")) for _ in range(3)]
            streams[0].write(input)
            streams[0].seek(0)
            descriptors = [stream.fileno() for stream in streams]
            try:
                code = ask(
                    str(self.path),
                    list(arguments),
                    dict(env),
                    str(cwd),
                    descriptors,
                    module=module,
                    timeout=timeout,
                )
            except TimeoutError:
                raise subprocess.TimeoutExpired(["zslurm", *arguments], timeout) from None
            outputs = []
            for stream in streams[1:]:
                stream.seek(0)
                outputs.append(stream.read())
        return subprocess.CompletedProcess(["zslurm", *arguments], code, *outputs)


class CommandServer(Commands):
    """The process from which commands are forked, as this user or another one."""

    def __init__(
        self,
        python: Path,
        script: Path,
        path: Path,
        env: Mapping[str, str],
        *,
        modules: Sequence[str] = (),
        user: int | None = None,
        group: int | None = None,
        ends: int = subprocess.PIPE,
    ) -> None:
        """Start it; its first command waits for its imports.

        Args:
            python: the interpreter.
            script: this file, where the user can read it.
            path: of the socket that is made.
            env: its whole environment; a command has its own.
            modules: what it imports besides `PACKAGES`.
            user: whose process it is; this one's if not given.
            group: the user's group.
            ends: an open file with whose end the server ends, if `close` does not do it.
        """
        super().__init__(path)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
            path.chmod(0o666)
            listener.listen()
            self._process = subprocess.Popen(
                [python, "-P", script, str(listener.fileno()), *modules],
                env=dict(env), stdin=ends, stdout=subprocess.DEVNULL, pass_fds=[listener.fileno()],
                user=user, group=group, extra_groups=None if user is None else [], umask=0o022,
                start_new_session=True,
            )  # fmt: skip

    def close(self) -> None:
        """End it, with the last command that still runs; none is waited for."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self.path.unlink(missing_ok=True)


def _serve(listener: socket.socket, modules: Sequence[str]) -> None:
    """Fork a command for each connection.

    When the process that started this one is gone, no more are taken, and this one ends with the last command.
    """
    import gc
    import importlib
    import pkgutil

    for package in (importlib.import_module(f"zslurm.{name}") for name in PACKAGES):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            importlib.import_module(module.name)
    for name in modules:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    asked: dict[socket.socket, int] = {}
    """The process ids of commands, by the connections of clients that are still there."""
    ends: dict[int, tuple[int, socket.socket]] = {}
    """The ids and the connections, by a file that is readable when the command has ended."""
    listening: list[Any] = [listener, sys.stdin]
    while listening or ends:
        for ready in select.select([*listening, *asked, *ends], [], [])[0]:
            if ready is sys.stdin:
                listener.close()
                listening.clear()
            elif ready is listener:
                connection, _ = listener.accept()
                with contextlib.suppress(OSError, EOFError):  # the client may have gone already
                    pid = _begin(connection, [listener, *asked], list(ends))
                    asked[connection], ends[os.pidfd_open(pid)] = pid, (pid, connection)
                    connection.sendall(f"{pid}\n".encode())
            elif ready in asked:  # its client has gone: the command is killed with it
                os.kill(asked.pop(ready), signal.SIGKILL)
            elif ready in ends:
                os.close(ready)
                pid, connection = ends.pop(ready)
                asked.pop(connection, None)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                with connection, contextlib.suppress(OSError):
                    connection.sendall(f"{code}\n".encode())


def _begin(connection: socket.socket, sockets: Sequence[socket.socket], files: Sequence[int]) -> int:
    """Fork the command that a connection asks for, without what the server has open; returns its process id."""
    _, descriptors, _, _ = socket.recv_fds(connection, 1, 3)
    with connection.makefile("rb") as file:
        request = marshal.load(file)
    if (pid := os.fork()) == 0:
        for each in (connection, *sockets):
            each.close()
        for number in files:
            os.close(number)
        for target, descriptor in enumerate(descriptors):
            os.dup2(descriptor, target)
            os.close(descriptor)
        _command(request)
    for descriptor in descriptors:
        os.close(descriptor)
    return pid


def _command(request: dict[str, Any]) -> NoReturn:
    """What `python -P -m zslurm ARGUMENTS` does once it has imported all it needs, or `python -m MODULE`."""
    import atexit
    import runpy
    import threading
    import time
    import traceback

    import zslurm
    from zslurm.cli.main import main

    os.environ.clear()
    os.environ.update(request["env"])
    time.tzset()
    os.chdir(request["cwd"])
    os.sched_setaffinity(0, request["cores"])
    for number, limits in request["limits"]:
        resource.setrlimit(number, limits)
    for number, is_ignored in request["ignored"]:
        default = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        signal.signal(number, signal.SIG_IGN if is_ignored else default)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    sys.argv = [str(Path(zslurm.__file__).with_name("__main__.py")), *request["arguments"]]
    module, code = request["module"], 1
    try:
        if module is None:
            main()
        else:
            sys.orig_argv = [sys.executable, "-m", module, *request["arguments"]]
            _customize(request["env"].get("PYTHONPATH", ""))
            sys.modules.pop(module, None)  # its body runs once more, as `__main__`
            runpy.run_module(module, run_name="__main__", alter_sys=True)
            code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        traceback.print_exc()
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(code)


def _customize(paths: str) -> None:
    """Find modules on PYTHONPATH and import its sitecustomize as Python does when it starts, but for our own."""
    import importlib

    others = [path for path in paths.split(os.pathsep) if path and not path.endswith("forked/hook")]
    if others:
        sys.path[:0] = others
        sys.modules.pop("sitecustomize", None)
        try:
            importlib.import_module("sitecustomize")
        except ModuleNotFoundError as error:
            if error.name != "sitecustomize":
                raise


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as its:
        _serve(its, sys.argv[2:])
