"""Root directories with other versions of Slurm: what is said if one cannot be made."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.on_slurm import versions


@pytest.fixture
def mmdebstrap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program in place of the real one, with an empty cache."""
    monkeypatch.setenv("ZSLURM_SLURM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(versions, "_PATH", str(tmp_path))
    return tmp_path / "mmdebstrap"


def write_program(path: Path, script: str) -> None:
    path.write_text(f"#!/bin/sh\nPATH=/usr/bin:/bin\n{script}\n")
    path.chmod(0o755)


def test_a_mirror_that_does_not_answer_is_one_line_and_leaves_nothing(
    mmdebstrap: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 0)
    write_program(
        mmdebstrap, 'for word; do case $word in *.part) mkdir "$word";; esac; done; echo E: no route >&2; exit 1'
    )
    assert versions.main(["24.11", "true"]) == 1
    (_, line) = capsys.readouterr().err.splitlines()
    assert line.startswith("no root directory of Debian trixie from http")
    assert line.endswith(": E: no route")
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["trixie.lock"]


def test_a_root_directory_is_made_once(mmdebstrap: Path, tmp_path: Path) -> None:
    write_program(mmdebstrap, 'for word; do case $word in *.part) mkdir "$word";; esac; done')
    assert versions.root_directory("26.05") == tmp_path / "cache" / "sid"
    mmdebstrap.unlink()
    assert versions.root_directory("26.05").is_dir()
    with pytest.raises(versions.NoRoot, match=r"^not installed: mmdebstrap \(apt-get install mmdebstrap\)$"):
        versions.root_directory("24.11")
