"""A Python program that has imported what it needs, and starts when a rank needs it.

    PYTHON OPTIONS warm_program.py DESCRIPTOR MODULES script|module TARGET

The program's Python runs this file by its path, so it imports nothing but the standard library. It executes the
import statements at the top level of the script or module, and imports what is in the file MODULES: the names of
the modules that the last start of the program had at its first step (`zslurm.progress.step` writes them). Modules
next to the script may do anything when they are imported, so they are not imported: the import statements in them
are executed instead.

Then it waits at a socket for the arguments, the environment and the output of a rank, and runs the program as
`python SCRIPT` or `python -m MODULE` would. An import statement that fails ends this process: the rank is then
started in the usual way, and shows the error. The same happens if an import has made a CUDA context or a process
group: these belong to a rank.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.machinery
import importlib.util
import json
import os
import runpy
import socket
import struct
import sys
import time
import types
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

_HEADER = struct.Struct("=Q")
_MOST_DESCRIPTORS = 3
_LATE = (("torch", "torch._dynamo"),)
"""Packages, and what they import only when they are used: here by the first optimizer or DDP."""
_MODULES_BEFORE: list[types.ModuleType] = []


def send(channel: socket.socket, message: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
    """Send a message, and descriptors with it.

    Raises:
        OSError: the other end is gone.
    """
    body = json.dumps(message).encode()
    socket.send_fds(channel, [_HEADER.pack(len(body))], list(descriptors))
    channel.sendall(body)


def receive(channel: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Return the next message and its descriptors; None if the other end is gone."""
    try:
        header, descriptors, _, _ = socket.recv_fds(channel, _HEADER.size, _MOST_DESCRIPTORS)
        header += _read(channel, _HEADER.size - len(header))
        body = _read(channel, _HEADER.unpack(header)[0])
    except (EOFError, ConnectionError):
        return None
    message: dict[str, Any] = json.loads(body)
    return message, descriptors


def _read(channel: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        new = channel.recv(min(size - len(data), 1 << 16))
        if not new:
            raise EOFError
        data += new
    return data


# --- imports ----------------------------------------------------------------------------------------------------


def import_statements(file: Path, root: Path, package: str = "") -> Iterator[tuple[ast.stmt, str]]:
    """Yield the import statements at the top level of a file that name installed modules, and their package.

    For a module below `root`, the directory of the program, those of its files follow instead. What is below `try`
    or `if` may be meant for another machine and is left out.
    """
    yield from _statements(file, root, package, set())


def _statements(file: Path, root: Path, package: str, seen: set[Path]) -> Iterator[tuple[ast.stmt, str]]:
    if file in seen:
        return
    seen.add(file)
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):  # the program will show it
        return
    for statement in tree.body:
        if isinstance(statement, ast.Import):
            for alias in statement.names:
                if inside := _files(root, alias.name):
                    for each_file in inside:
                        yield from _statements(each_file, root, package, seen)
                else:
                    yield ast.copy_location(ast.Import([alias]), statement), package
        elif isinstance(statement, ast.ImportFrom) and statement.module != "__future__":
            inside = _imported_from(statement, file, root, package)
            for each_file in inside:
                yield from _statements(each_file, root, package, seen)
            if not inside and not (statement.level and not package):
                yield statement, package


def _imported_from(statement: ast.ImportFrom, file: Path, root: Path, package: str) -> list[Path]:
    """Return the files of the program that `from ... import ...` reads; none if it names an installed module."""
    base, module = root, statement.module or ""
    if statement.level:
        if package:  # an installed package: the statement is executed as it is
            return []
        base = file.parents[statement.level - 1]
        files = _files(base, module) if module else []
    else:
        files = _files(root, module)
        if not files:
            return []
    folder = base.joinpath(*module.split(".")) if module else base
    return files + [path for alias in statement.names for path in _files(folder, alias.name)]


def _files(root: Path, name: str) -> list[Path]:
    """Return the files that importing `name` below a directory executes; none if it is not there."""
    files: list[Path] = []
    folder = root
    for name_part in name.split("."):
        module, folder = folder / f"{name_part}.py", folder / name_part
        if (folder / "__init__.py").is_file():
            files.append(folder / "__init__.py")
        elif module.is_file():
            return [*files, module]
        elif not folder.is_dir():
            return files
    return files


def do_imports(kind: str, target: str) -> None:
    """Execute the import statements of a program.

    Raises:
        Exception: what an import raises.
    """
    file, package, root = Path(target), "", Path(sys.path[0] or ".")
    if kind == "module":
        files = _files(root, f"{target}.__main__") or _files(root, target)
        if files:  # find_spec would import the package
            for each_file in files:
                _import_all(import_statements(each_file, root), each_file)
            return
        spec = importlib.util.find_spec(target)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{target}.__main__")
        if spec is None or spec.origin is None:
            raise ModuleNotFoundError(f"No module named {target}")
        file = Path(spec.origin)
        package = "" if root.absolute() in file.absolute().parents else spec.parent or ""
    _import_all(import_statements(file, root, package), file)


def _import_all(statements: Iterable[tuple[ast.stmt, str]], file: Path) -> None:
    for statement, of in statements:
        code = compile(ast.Module([statement], []), str(file), "exec", dont_inherit=True)
        exec(code, {"__name__": "zslurm_warm", "__package__": of or None})


def import_known(names: Sequence[str], root: Path) -> None:
    """Import modules that a program has imported before, but not those next to it."""
    for name in names:
        with contextlib.suppress(Exception, SystemExit):  # whatever they do; the program imports them anyway
            if name not in sys.modules and not _is_of_program(name, root):
                importlib.import_module(name)


def _is_of_program(name: str, root: Path) -> bool:
    spec = importlib.util.find_spec(name.partition(".")[0])  # of a submodule this would import its package
    if spec is None or spec.origin is None or not Path(spec.origin).is_absolute():
        return spec is None
    inside = Path(spec.origin).parent
    return root in (inside, *inside.parents) and not {"site-packages", "dist-packages"} & set(inside.parts)


def known_modules(file: Path) -> list[str]:
    """Return the modules that the last start of the program had; without a record what torch imports late."""
    try:
        return file.read_text(encoding="utf-8").splitlines()
    except OSError:
        return [late for package, late in _LATE if package in sys.modules]


def held() -> str | None:
    """Return what the imports have made that belongs to a rank; None if nothing."""
    cuda, distributed = sys.modules.get("torch.cuda"), sys.modules.get("torch.distributed")
    if cuda is not None and cuda.is_initialized():
        return "a GPU was initialized"
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return "a process group was made"
    return None


# --- the program ------------------------------------------------------------------------------------------------


def run(kind: str, target: str, arguments: Sequence[str]) -> None:
    """Run the program in this process's `__main__`, as Python itself would."""
    if kind == "module":
        sys.argv = ["-m", *arguments]
        _MODULES_BEFORE.append(sys.modules["__main__"])  # its functions run until the program ends
        sys.modules["__main__"] = types.ModuleType("__main__")
        runpy._run_module_as_main(target)  # type: ignore[attr-defined]  # what `python -m` calls
        return
    sys.argv = [target, *arguments]
    path = str(Path(target).absolute())
    main = types.ModuleType("__main__")
    main.__file__ = path
    main.__dict__["__builtins__"] = __builtins__
    main.__dict__["__cached__"] = None
    main.__loader__ = importlib.machinery.SourceFileLoader("__main__", path)
    sys.modules["__main__"] = main
    exec(compile(Path(target).read_bytes(), path, "exec", dont_inherit=True), main.__dict__)


def main(argv: Sequence[str]) -> None:
    """Import, wait, and run."""
    descriptor, modules, kind, target = int(argv[0]), Path(argv[1]), argv[2], argv[3]
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = str(Path(target).resolve().parent) if kind == "script" else str(Path.cwd())
    channel = socket.socket(fileno=descriptor)
    began = time.monotonic()
    do_imports(kind, target)
    import_known(known_modules(modules), Path(sys.path[0]).absolute())
    if (why := held()) is not None:
        sys.exit(f"importing the modules of {target} is no preparation: {why}")
    send(channel, {"ready": True, "seconds": time.monotonic() - began})
    received = receive(channel)
    if received is None:  # nobody needs it
        sys.exit(0)
    message, descriptors = received
    channel.close()
    sys.stdout.flush()
    sys.stderr.flush()
    for number, source in enumerate(descriptors, 1):
        os.dup2(source, number)
        os.close(source)
    os.environ.clear()
    os.environ.update(message["environ"])
    run(kind, target, message["arguments"])


if __name__ == "__main__":
    main(sys.argv[1:])
