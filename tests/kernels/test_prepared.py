"""Kernels that were built before a process started: who trusts them, and who warns of building others."""

from __future__ import annotations

from pathlib import Path

import pytest

from zslurm.kernels import prepared
from zslurm.kernels.hip import build as hip_build
from zslurm.kernels.hip.build import build, code_of
from zslurm.kernels.prepared import PREPARED_VARIABLE, note_build, use_prepared, warn_of_builds


def directory(path: Path, mode: int = 0o700) -> Path:
    path.mkdir()
    path.chmod(mode)
    return path


def test_triton_reads_what_was_prepared_unless_its_cache_is_configured(tmp_path: Path) -> None:
    own = directory(tmp_path / "own")
    environ = {PREPARED_VARIABLE: str(own)}
    use_prepared(environ)
    assert "TRITON_CACHE_DIR" not in environ, "an empty directory must not hide the user's warm cache"
    (own / "triton" / "KEY").mkdir(parents=True)
    use_prepared(environ)
    assert environ["TRITON_CACHE_DIR"] == f"{own}/triton"
    configured = {PREPARED_VARIABLE: str(own), "TRITON_CACHE_DIR": "/fast/cache"}
    use_prepared(configured)
    assert configured["TRITON_CACHE_DIR"] == "/fast/cache"


@pytest.mark.parametrize("kind", ["missing", "writable by others", "a link", "not named"])
def test_code_from_a_directory_that_others_may_have_made_does_not_run(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "kernels"
    if kind == "writable by others":
        directory(path, 0o777)
    elif kind == "a link":
        path.symlink_to(directory(tmp_path / "elsewhere"))
    environ = {PREPARED_VARIABLE: "" if kind == "not named" else str(path)}
    use_prepared(environ)
    assert "TRITON_CACHE_DIR" not in environ


def test_code_objects_are_read_from_what_was_prepared_and_added_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cached = build("muon", "cpu")
    own = directory(tmp_path / "own")
    monkeypatch.setenv(PREPARED_VARIABLE, str(own))
    assert build("muon", "cpu") == cached, "the user's own cache has it"
    monkeypatch.setenv("ZSLURM_KERNEL_CACHE", str(tmp_path / "empty"))
    file = build("muon", "cpu")
    assert file.parent == own / "hip"
    assert code_of(file) == code_of(cached)
    monkeypatch.setattr(hip_build, "note_build", lambda name: pytest.fail(f"{name} is built again"))
    assert build("muon", "cpu") == file


def test_a_rank_warns_once_that_it_compiles(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(prepared, "_warns", False)
    monkeypatch.setenv(PREPARED_VARIABLE, "/tmp/zslurm-kernels-7")
    note_build("_before")
    assert not caplog.records, "a process that builds kernels on purpose does not warn"
    warn_of_builds()
    note_build("_first")
    note_build("_second")
    (record,) = caplog.records
    assert record.getMessage() == (
        "this rank compiles kernels, which delays its first steps: _first first; "
        "/tmp/zslurm-kernels-7 does not have it"
    )
