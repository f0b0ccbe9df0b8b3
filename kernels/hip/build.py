"""Build a HIP source for an architecture, once per source, compiler version and architecture.

    $ZSLURM_KERNEL_CACHE, or $XDG_CACHE_HOME/zslurm/kernels, or ~/.cache/zslurm/kernels
        muon-gfx942-3f09c1e2b7a85d64.code       the code object, and behind it its SHA-256

The name holds a digest of the source with all that it includes, and of the compiler's version and flags. A file is
written under another name, synced and renamed: processes that build the same at once write the same bytes one
after the other, and no one reads half a file. A file whose digest is wrong is built again. In a job that
prepared kernels on its nodes (`kernels/prepared.py`) they are in that directory instead. If the directory
cannot be written, or anyone may write to it, a temporary one is used for this process, with one warning.
"""

from __future__ import annotations

import atexit
import hashlib
import logging
import os
import re
import secrets
import shutil
import stat
import tempfile
from pathlib import Path

from zslurm.kernels.cache import cache_directory
from zslurm.kernels.hip.compilers import BuildError, Compiler, compilers_for
from zslurm.kernels.prepared import hip_directory, note_build

_log = logging.getLogger(__name__)

SOURCES = Path(__file__).parent
_MAGIC = (b"\x7fELF", b"__CLANG_OFFLOAD_BUNDLE__", b"CCOB")
_DIGEST_BYTES = hashlib.sha256().digest_size
temporary_directories: list[Path] = []


def build(name: str, arch: str) -> Path:
    """Return the file with the code object of kernels/hip/NAME.hip, built if it is not in the cache.

    Raises:
        BuildError: no compiler for this architecture works; with the cause of each.
    """
    source = source_of(name)
    causes = []
    for reach in compilers_for(arch):
        try:
            compiler = reach()
            return _cached(f"{name}-{arch}-{_key(source, compiler)}.code", source, compiler)
        except BuildError as error:
            causes.append(str(error))
    raise BuildError("; ".join(causes))


def source_of(name: str) -> str:
    """Return the text of a source with the headers of this folder in place of their #include lines."""
    return _inlined(f"{name}.hip", set())


def code_of(file: Path) -> bytes | None:
    """Return the code object in a file of the cache; None if the file is not there or is damaged."""
    try:
        content = file.read_bytes()
    except OSError:
        return None
    code, digest = content[:-_DIGEST_BYTES], content[-_DIGEST_BYTES:]
    return code if hashlib.sha256(code).digest() == digest else None


def _inlined(file: str, seen: set[str]) -> str:
    """Return a file with its own headers in it, each once; lines keep their numbers in messages."""
    seen.add(file)
    lines = [f'#line 1 "{file}"']
    for number, line in enumerate((SOURCES / file).read_text().splitlines(), start=1):
        header = re.fullmatch(r'#include "(.+)"', line)
        if header is None:
            lines.append("" if line == "#pragma once" else line)
        elif header[1] not in seen:
            lines += [_inlined(header[1], seen), f'#line {number + 1} "{file}"']
    return "\n".join(lines) + "\n"


def _key(source: str, compiler: Compiler) -> str:
    text = f"{compiler.name}\n{compiler.version}\n{source}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _cached(name: str, source: str, compiler: Compiler) -> Path:
    """Return the file of a build, made if it is in no directory that is trusted."""
    prepared = hip_directory()
    directory = prepared or cache_directory()
    cause = "anyone may write to it" if _anyone_writes(directory) else None
    trusted = [folder for folder in (prepared, cache_directory()) if folder and not _anyone_writes(folder)]
    for folder in [*temporary_directories, *trusted]:
        if code_of(folder / name) is not None:
            return folder / name
    note_build(name)
    code = compiler.compile(source)
    if not code.startswith(_MAGIC):
        raise BuildError(f"{compiler.name} ended well but made no code object")
    if cause is None:
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            return _publish(directory / name, code)
        except OSError as error:
            cause = error.strerror or str(error)
    return _publish(_temporary_directory(f"{directory}: {cause}") / name, code)


def _publish(file: Path, code: bytes) -> Path:
    """Write a code object so that the file is whole whenever it is there."""
    partial = file.with_name(f".{file.name}.{os.getpid()}-{secrets.token_hex(4)}")
    try:
        with partial.open("xb") as out:
            out.write(code + hashlib.sha256(code).digest())
            out.flush()
            os.fsync(out.fileno())
        partial.replace(file)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
    return file


def _anyone_writes(directory: Path) -> bool:
    """Return whether all users may write here, and so run code as this one."""
    try:
        return bool(directory.stat().st_mode & stat.S_IWOTH)
    except OSError:
        return False


def _temporary_directory(cause: str) -> Path:
    """Return a directory for this process, removed when it ends; the first call warns."""
    if not temporary_directories:
        _log.warning(f"kernels are built again in every process, in a temporary directory ({cause})")
        temporary_directories.append(Path(tempfile.mkdtemp(prefix="zslurm-kernels-")))
        atexit.register(shutil.rmtree, temporary_directories[0], ignore_errors=True)
    return temporary_directories[0]
