"""Call the compilers that come as a library with torch: hipRTC on AMD's GPUs, NVRTC on NVIDIA's.

They have one interface under two prefixes. Neither needs a GPU, a driver, headers or a toolchain.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Iterator, Sequence
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_void_p
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any


class RtcError(Exception):
    """The library is missing, or cannot compile a source."""


@dataclass(frozen=True)
class Library:
    """An opened runtime compiler.

    Attributes:
        handle: the shared library.
        prefix: of its functions: hiprtc or nvrtc.
        code: what its functions call a code object: Code or CUBIN.
    """

    handle: Any
    prefix: str
    code: str

    def version(self) -> str:
        """Return its version and file: two installations are not taken for the same."""
        major, minor = c_int(), c_int()
        self._check(self._function("Version")(byref(major), byref(minor)), "states no version")
        return f"{self.prefix} {major.value}.{minor.value} {self.handle._name}"

    def compile(self, source: str, flags: Sequence[str]) -> bytes:
        """Return the code object of a source.

        Raises:
            RtcError: the source does not compile; with the compiler's first error.
        """
        program = c_void_p()
        self._check(
            self._function("CreateProgram")(byref(program), source.encode(), b"kernel.hip", 0, None, None),
            "takes no program",
        )
        try:
            options = (c_char_p * len(flags))(*(flag.encode() for flag in flags))
            if self._function("CompileProgram")(program, len(flags), options):
                lines = self._bytes_of(program, "ProgramLog").rstrip(b"\0").decode(errors="replace").splitlines()
                cause = next((line for line in lines if "error" in line), lines[0] if lines else "no message")
                raise RtcError(f"cannot compile the kernel: {cause.strip()}")
            return self._bytes_of(program, self.code)
        finally:
            self._function("DestroyProgram")(byref(program))

    def _bytes_of(self, program: c_void_p, what: str) -> bytes:
        size = c_size_t()
        self._check(self._function(f"Get{what}Size")(program, byref(size)), f"states no size of {what}")
        buffer = ctypes.create_string_buffer(max(1, size.value))
        self._check(self._function(f"Get{what}")(program, buffer), f"returns no {what}")
        return buffer.raw[: size.value]

    def _function(self, name: str) -> Any:
        try:
            return getattr(self.handle, self.prefix + name)
        except AttributeError as error:
            raise RtcError(f"{self.handle._name} has no {self.prefix}{name}") from error

    def _check(self, status: int, message: str) -> None:
        if status:
            raise RtcError(f"{message} (status {status})")


@cache
def open_library(name: str) -> Library:
    """Open hipRTC or NVRTC: the one that torch has loaded, or one next to torch's other libraries.

    Raises:
        RtcError: there is none.
    """
    stem, prefix, code = {
        "hipRTC": ("libhiprtc.so", "hiprtc", "Code"),
        "NVRTC": ("libnvrtc.so", "nvrtc", "CUBIN"),
    }[name]
    for path in library_files(stem):
        try:
            library = Library(ctypes.CDLL(path), prefix, code)
        except OSError:
            continue
        create = library._function("CreateProgram")
        create.argtypes = [POINTER(c_void_p), c_char_p, c_char_p, c_int, c_void_p, c_void_p]
        library._function("CompileProgram").argtypes = [c_void_p, c_int, c_void_p]
        for what in ("ProgramLog", code):
            library._function(f"Get{what}Size").argtypes = [c_void_p, c_void_p]
            library._function(f"Get{what}").argtypes = [c_void_p, c_void_p]
        return library
    raise RtcError(f"no {stem} that can be loaded")


def loaded(stem: str) -> list[str]:
    """Return the files of this name, of any version, that this process has loaded: torch's own first."""
    import torch

    return mapped(Path("/proc/self/maps").read_text(), stem, Path(torch.__file__).parent)


def mapped(maps: str, stem: str, torch_folder: Path) -> list[str]:
    """Return the files of a name in the text of /proc/self/maps, in the order in which to take them.

    Several may be loaded, as when another package brings its own copy: first come those in torch/lib, then those
    of packages next to torch, as AMD's wheels of ROCm are, then the others, by their place in memory.
    """
    fields = (line.split(maxsplit=5) for line in maps.splitlines())
    files = dict.fromkeys(Path(row[5]) for row in fields if len(row) == 6)
    # What was replaced or removed on disk is there as "FILE (deleted)", and cannot be opened by that name.
    named = [file for file in files if file.name.startswith(stem) and not file.name.endswith(" (deleted)")]
    near = (torch_folder / "lib", torch_folder.parent)

    def distance(file: Path) -> int:
        return next((position for position, folder in enumerate(near) if file.is_relative_to(folder)), len(near))

    return [str(file) for file in sorted(named, key=distance)]


def library_files(stem: str) -> Iterator[str]:
    """Yield possible paths of a runtime compiler's library: what is loaded, what torch brings, the system's."""
    yield from loaded(stem)
    import torch

    folder = Path(torch.__file__).parent
    # A wheel has its libraries in torch/lib, or in packages of NVIDIA's next to torch.
    for where in (folder / "lib", *sorted((folder.parent / "nvidia").glob("*/lib"))):
        yield from (str(file) for file in sorted(where.glob(f"{stem}*"), reverse=True))
    try:
        # of AMD's own wheels
        rocm_sdk = importlib.import_module("rocm_sdk")

        yield from (str(file) for file in rocm_sdk.find_libraries(stem.removeprefix("lib").removesuffix(".so")))
    except (ImportError, LookupError):
        pass
    yield stem
