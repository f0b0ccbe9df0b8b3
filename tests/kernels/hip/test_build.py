"""The cache of builds: kept, shared, damaged, unwritable; and compilers that are missing or broken."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from zslurm.kernels import muon
from zslurm.kernels.cache import CACHE_VARIABLE, cache_directory
from zslurm.kernels.dispatch import using
from zslurm.kernels.hip import build as builds
from zslurm.kernels.hip import driver
from zslurm.kernels.hip.build import build, code_of, source_of
from zslurm.kernels.hip.compilers import BuildError, compilers_for

SCRIPT = """#!/bin/sh
case "$*" in *--version*) echo "{version}"; exit 0;; esac
{body}
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of this test."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Put a C++ compiler in the place of the machine's; it writes a line to a file for each build."""

    def put(body: str = 'exec c++ "$@"', version: str = "1.0") -> Path:
        log = tmp_path / "builds"
        log.touch()
        program = tmp_path / "compiler"
        program.write_text(SCRIPT.format(version=version, body=f"echo build >> {log}\n{body}"))
        program.chmod(0o755)
        monkeypatch.setenv("CXX", str(program))
        return log

    return put


@pytest.fixture(autouse=True)
def no_temporary_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builds, "temporary_directories", [])


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Sources under the names of ours that take no second to compile."""
    folder = tmp_path / "sources"
    folder.mkdir()
    for name in ("muon", "other"):
        (folder / f"{name}.hip").write_text(f'#include "one.h"\nextern "C" int {name}() {{ return ONE; }}\n')
    (folder / "one.h").write_text("#pragma once\n#define ONE 1\n")
    monkeypatch.setattr(builds, "SOURCES", folder)
    return folder


@pytest.fixture
def fresh_kernels() -> Iterator[None]:
    """Forget what this process has loaded and what could not start, before and after."""
    driver.kernels.cache_clear()
    yield
    driver.kernels.cache_clear()
    for operation in muon.OPERATIONS:
        operation.try_again()


@pytest.mark.usefixtures("sources")
def test_a_build_is_kept(cache: Path, compiler: Callable[..., Path]) -> None:
    log = compiler()
    first = build("muon", "cpu")
    assert first.parent == cache
    assert build("muon", "cpu") == first
    assert log.read_text().count("build") == 1
    assert [file.name for file in cache.iterdir()] == [first.name], "nothing half written is left"
    compiler(version="2.0")
    assert build("muon", "cpu") != first, "another version is another build"


def test_another_source_is_another_build(
    cache: Path, compiler: Callable[..., Path], sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if only a header that it includes changed."""
    compiler()
    first = build("muon", "cpu")
    elsewhere = sources.rename(tmp_path / "elsewhere")
    monkeypatch.setattr(builds, "SOURCES", elsewhere)
    assert build("muon", "cpu") == first
    with (elsewhere / "one.h").open("a") as header:
        header.write("// changed\n")
    assert build("muon", "cpu") != first


def test_a_source_holds_its_headers_once() -> None:
    text = source_of("muon")
    assert text.count("constexpr unsigned LANES") == 1
    assert '#include "' not in text
    assert '#line 1 "portability.h"' in text


@pytest.mark.usefixtures("sources")
@pytest.mark.parametrize("damage", ["cut", "flipped", "empty"])
def test_a_damaged_file_is_built_again(cache: Path, compiler: Callable[..., Path], damage: str) -> None:
    log = compiler()
    file = build("muon", "cpu")
    whole = file.read_bytes()
    broken = {"cut": whole[:1000], "flipped": whole[:100] + b"\xff" + whole[101:], "empty": b""}[damage]
    file.write_bytes(broken)
    assert build("muon", "cpu") == file
    assert log.read_text().count("build") == 2
    assert code_of(file) is not None


def test_two_processes_build_at_once(cache: Path, compiler: Callable[..., Path], tmp_path: Path) -> None:
    """Both compile, neither having seen the other's file, and both end with a whole one."""
    meet = tmp_path / "meet"
    meet.mkdir()
    log = compiler(f'touch {meet}/$$; while [ "$(ls {meet} | wc -l)" -lt 2 ]; do sleep 0.05; done; exec c++ "$@"')
    script = "from zslurm.kernels.hip.build import build; print(build('muon', 'cpu'))"
    both = [
        subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=os.environ)
        for _ in range(2)
    ]
    printed = [process.communicate(timeout=300)[0].strip() for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert len(set(printed)) == 1
    assert log.read_text().count("build") == 2
    assert code_of(Path(printed[0])) is not None
    assert [file.name for file in cache.iterdir()] == [Path(printed[0]).name]


@pytest.mark.usefixtures("sources")
def test_a_cache_that_cannot_be_written(
    tmp_path: Path,
    compiler: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    log = compiler()
    (tmp_path / "file").touch()
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "file" / "cache"))
    _build_elsewhere(tmp_path / "file" / "cache", "Not a directory", log, caplog)


@pytest.mark.usefixtures("sources")
@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
def test_a_cache_of_another_user(
    cache: Path, compiler: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    """What an administrator built is used, and what is missing is built in a temporary directory."""
    log = compiler()
    kept = build("other", "cpu")
    cache.chmod(0o755)
    log.write_text("")
    log.chmod(0o666)
    closed = [folder for folder in cache.parents if not folder.stat().st_mode & 0o001]
    try:
        for folder in closed:
            folder.chmod(0o711)
        os.seteuid(65534)
        assert build("other", "cpu") == kept
        assert not caplog.records
        _build_elsewhere(cache, "Permission denied", log, caplog)
    finally:
        os.seteuid(0)
        for folder in closed:
            folder.chmod(0o700)


@pytest.mark.usefixtures("sources")
def test_a_cache_that_anyone_may_write_to(
    cache: Path, compiler: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    """Code that another user put there would run."""
    log = compiler()
    file = build("muon", "cpu")
    cache.chmod(0o777)
    log.write_text("")
    assert build("muon", "cpu") != file
    caplog.clear()
    builds.temporary_directories.clear()
    log.write_text("")
    _build_elsewhere(cache, "anyone may write to it", log, caplog)


def _build_elsewhere(cache: Path, cause: str, log: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        file = build("muon", "cpu")
        assert build("muon", "cpu") == file
    assert cache not in file.parents
    assert log.read_text().count("build") == 1
    assert [record.getMessage() for record in caplog.records] == [
        f"kernels are built again in every process, in a temporary directory ({cache}: {cause})"
    ]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            "echo 'kernel.hip:3: error: no such thing' >&2; exit 1",
            "ended with status 1: kernel.hip:3: error: no such",
        ),
        ("kill -SEGV $$", "ended with signal 11: no message"),
        ("exit 0", "ended well but wrote nothing"),
        ('while [ "$1" != -o ]; do shift; done; echo nonsense > "$2"', "ended well but made no code object"),
    ],
)
def test_a_broken_compiler(cache: Path, compiler: Callable[..., Path], body: str, message: str) -> None:
    compiler(body)
    with pytest.raises(BuildError, match=f"compiler {message}"):
        build("muon", "cpu")
    assert not cache.exists()


def test_a_compiler_that_does_not_end(
    cache: Path, compiler: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler("exec sleep 1000")
    monkeypatch.setattr("zslurm.kernels.hip.compilers.TIMEOUT_S", 1)
    with pytest.raises(BuildError, match="compiler did not end within 1 s"):
        build("muon", "cpu")


@pytest.mark.parametrize("arch", ["gfx942", "sm_90", "cpu"])
def test_no_compiler_at_all(arch: str, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("zslurm.kernels.hip.rtc.library_files", lambda stem: iter(()))
    message = {
        "gfx942": "hipRTC: no libhiprtc.so that can be loaded; no hipcc in PATH",
        "sm_90": "NVRTC: no libnvrtc.so that can be loaded; no nvcc in PATH",
        "cpu": r"no c\+\+ in PATH",
    }[arch]
    with pytest.raises(BuildError, match=f"^{message}$"):
        build("muon", arch)
    assert len(compilers_for(arch)) == message.count(";") + 1


@pytest.mark.usefixtures("fresh_kernels")
def test_an_operation_runs_without_its_kernel(
    cache: Path, compiler: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    """By the reference, with one warning that states the cause."""
    compiler("echo 'fatal error: out of registers' >&2; exit 1")
    with using("muon", "hip"), caplog.at_level(logging.WARNING):
        for _ in range(3):
            master = torch.ones(1, 4, 4)
            muon.update([master], torch.ones(1, 4, 4), decay=0.5, rate=0.25)
            assert torch.equal(master, torch.full((1, 4, 4), 0.25))
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.startswith("muon.update runs without hip, which cannot start here (BuildError: ")
    assert "ended with status 1: fatal error: out of registers" in message


def test_where_builds_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.delenv(CACHE_VARIABLE)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_directory() == Path("/home/someone/.cache/zslurm/kernels")
    monkeypatch.setenv("XDG_CACHE_HOME", "/scratch/cache")
    assert cache_directory() == Path("/scratch/cache/zslurm/kernels")
    monkeypatch.setenv(CACHE_VARIABLE, "~/kernels")
    assert cache_directory() == Path("/home/someone/kernels")
