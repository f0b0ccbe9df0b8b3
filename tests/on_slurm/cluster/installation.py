"""A Python with zslurm in it that an ordinary user can run.

The checkout may lie below a directory that only root may enter (a CI clone, a home of mode 0700), and so may
the virtual environment or the interpreter. Then all of it is mirrored below the cluster's directory.
"""

from __future__ import annotations

import compileall
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.checkout import ROOT

CHECKOUT = ROOT

RunAsUser = Callable[[Sequence[str]], "subprocess.CompletedProcess[str]"]

_CAN_READ_ALL = """
import os, sys
for root in sys.argv[1:]:
    for directory, _, files in os.walk(root, onerror=lambda error: sys.exit(str(error))):
        for name in files:
            with open(os.path.join(directory, name), "rb"):
                pass
import pydantic, zslurm
"""


@dataclass(frozen=True)
class Installation:
    """How the ordinary user runs our code: `python -m zslurm`, as console scripts name root's own python."""

    python: Path
    sources: Path
    """The directory that holds zslurm and the folders that it links to."""


def find_or_make(directory: Path, run_as_user: RunAsUser) -> Installation:
    """This checkout and interpreter if the user can use them, else a mirror of them in `directory`."""
    direct = Installation(Path(sys.executable), CHECKOUT)
    return direct if _is_for_all(direct, run_as_user) else mirror(directory, run_as_user)


_usable: dict[Installation, bool] = {}


def _is_for_all(direct: Installation, run_as_user: RunAsUser) -> bool:
    """Return whether the ordinary user, who is the same on all clusters of this machine, can run this checkout."""
    if direct not in _usable:
        for name in _packages():  # here and once: the user may not, and would compile anew in each command
            compileall.compile_dir(CHECKOUT / name, quiet=2)
        packages = [str(CHECKOUT / name) for name in _packages()]
        probe = run_as_user([str(direct.python), "-c", _CAN_READ_ALL, *packages])
        _usable[direct] = probe.returncode == 0
    return _usable[direct]


def mirror(directory: Path, run_as_user: RunAsUser) -> Installation:
    """Copy the sources and link the environment into `directory`, readable by everyone.

    Raises:
        RuntimeError: the ordinary user cannot run the result; the message says why.
    """
    directory.mkdir(mode=0o755)
    sources = directory / "sources"
    sources.mkdir(mode=0o755)
    for name in _packages():
        _mirror_tree(CHECKOUT / name, sources / name, copy=True)
    shutil.copy(CHECKOUT / "pyproject.toml", sources)

    environment = directory / "venv"
    _mirror_tree(Path(sys.prefix), environment)
    for path in environment.glob("lib/python*/site-packages/*.pth"):
        lines = path.read_text(encoding="utf-8").splitlines()
        if str(CHECKOUT) in lines:  # the line that makes the checkout importable
            _rewrite(path, "\n".join(str(sources) if line == str(CHECKOUT) else line for line in lines) + "\n")

    base = Path(sys.base_prefix)
    if run_as_user([str(Path(sys.executable).resolve()), "-c", ""]).returncode != 0:
        _mirror_tree(base, directory / "python")
        python = environment / "bin" / Path(sys.executable).name
        python.unlink()
        python.symlink_to(directory / "python" / Path(sys.executable).resolve().relative_to(base))
        config = environment / "pyvenv.cfg"
        _rewrite(config, config.read_text(encoding="utf-8").replace(str(base), str(directory / "python")))

    installation = Installation(environment / "bin" / Path(sys.executable).name, sources)
    probe = run_as_user([str(installation.python), "-c", _CAN_READ_ALL, str(sources)])
    if probe.returncode != 0:
        raise RuntimeError(f"the ordinary user cannot run {installation.python}: {probe.stderr.strip()}")
    return installation


def _packages() -> list[str]:
    """Folders of the checkout that a user's Python reads: zslurm, what it links to, and the tests."""
    links = [path.name for path in (CHECKOUT / "zslurm").iterdir() if path.is_symlink()]
    return ["zslurm", *sorted(links), "tests"]


def _mirror_tree(source: Path, target: Path, *, copy: bool = False) -> None:
    """Mirror a tree so that everyone can read it, by hard links if they will do: a venv is a gigabyte."""
    linked = not copy and _run("cp", "-al", source, target).returncode == 0
    if not linked:  # or it is on another file system
        shutil.rmtree(target, ignore_errors=True)
        _run("cp", "-a", source, target).check_returncode()
    private = ("!", "-perm", "-004", "-o", "-perm", "-100", "!", "-perm", "-001")
    for name in _run("find", target, "-type", "f", "(", *private, ")").stdout.splitlines():
        file = Path(name)
        if linked:  # its mode is the original's
            content, mode = file.read_bytes(), file.stat().st_mode
            file.unlink()
            file.write_bytes(content)
            file.chmod(mode)
        file.chmod(file.stat().st_mode | 0o444 | (0o111 if file.stat().st_mode & 0o100 else 0))
    _run("find", target, "-type", "d", "-exec", "chmod", "755", "{}", "+").check_returncode()


def _run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True)


def _rewrite(path: Path, text: str) -> None:
    """Replace a file's text without touching the original that it may be a hard link of."""
    mode = path.stat().st_mode
    path.unlink()
    path.write_text(text, encoding="utf-8")
    path.chmod(mode | 0o444)
