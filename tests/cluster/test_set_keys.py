"""Keys of a profile are set in its text, and nothing else of it changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from zslurm.cluster.set_keys import CannotEdit, block, with_keys, write_keys
from zslurm.cluster.site import load_site
from zslurm.config import yaml12
from zslurm.core.errors import ConfigError, ZslurmError

PROFILE = """\
# our cluster
cluster:   # AMD
  name: ours
  gpus_per_node: 8   # all alike

  # what the doctor wants
  doctor:
    shm_gib: 16
    hbm_gb_s: 2000   # too low
  env: {A: b}
# end of the cluster

slurm:
  partition: gpu
"""


def test_a_key_is_replaced_and_another_added_with_all_comments_kept() -> None:
    edited = with_keys(
        PROFILE,
        {"doctor.hbm_gb_s": 3900, "doctor.gemm_tflops": 600.5, "measured": {"bucket_mb": {1: 64, 2: 128.0}}},
        "profile",
    )
    assert edited == PROFILE.replace(
        "    hbm_gb_s: 2000   # too low\n", "    hbm_gb_s: 3900\n    gemm_tflops: 600.5\n"
    ).replace("  env: {A: b}\n", "  env: {A: b}\n  measured:\n    bucket_mb: {1: 64, 2: 128}\n")
    again = with_keys(edited, {"measured": {"bucket_mb": {4: 256}}}, "profile")
    assert again == edited.replace("{1: 64, 2: 128}", "{4: 256}")


@pytest.mark.parametrize(
    "text", ["", "# nothing\n", "slurm: {partition: gpu}\n", "cluster:\n", "cluster:\n    name: x"]
)
def test_sections_that_are_missing_are_made(text: str) -> None:
    edited = with_keys(text, {"doctor.hbm_gb_s": 5}, "profile")
    assert yaml12.parse(edited, "profile").data["cluster"]["doctor"] == {"hbm_gb_s": 5}
    assert edited.startswith(text.rstrip("\n"))


@pytest.mark.parametrize(
    "text", ["cluster: {name: x}\n", "cluster: &anchor\n  name: x\n", "cluster:\n  doctor: {shm_gib: 16}\n"]
)
def test_a_section_in_braces_is_left_alone(text: str) -> None:
    with pytest.raises(CannotEdit, match="block of lines"):
        with_keys(text, {"doctor.hbm_gb_s": 5}, "profile")


def test_what_would_change_another_value_is_not_taken() -> None:
    with pytest.raises(CannotEdit, match="a form that is not edited here"):
        with_keys("cluster:\n  doctor:\n    note: |\n      a\n  name: [\n  x]\n  ", {"name": "y"}, "profile")


def test_words_that_yaml_reads_otherwise_are_quoted() -> None:
    values = {"measured.source": "a: b # c", "measured.date": "2026-11-23", "measured.device": "null"}
    assert yaml12.parse(block(values), "block").data["cluster"]["measured"] == {
        "source": "a: b # c",
        "date": "2026-11-23",
        "device": "null",
    }


@pytest.fixture
def profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    path = tmp_path / "zslurm" / "clusters" / "ours.yaml"
    path.parent.mkdir(parents=True)
    path.write_text(PROFILE)
    return path


def test_the_text_before_is_kept_beside_the_profile(profile: Path) -> None:
    assert write_keys("ours", {"doctor.hbm_gb_s": 3900}) == profile
    assert load_site("ours").cluster.doctor.hbm_gb_s == 3900
    assert profile.with_name("ours.yaml~").read_text() == PROFILE


def test_a_profile_that_would_not_be_valid_is_not_written(profile: Path) -> None:
    with pytest.raises(ConfigError, match="hbm_gb_s"):
        write_keys("ours", {"doctor.hbm_gb_s": -1})
    assert profile.read_text() == PROFILE


def test_a_shipped_profile_gets_one_of_the_users_that_extends_it(profile: Path) -> None:
    written = write_keys("mi300x-cx7", {"doctor.hbm_gb_s": 3900})
    assert written == profile.with_name("mi300x-cx7.yaml")
    assert written.read_text() == "cluster:\n  extends: mi300x-cx7\n  doctor: {hbm_gb_s: 3900}\n"
    assert load_site("mi300x-cx7").cluster.network == "cx7"


def test_a_directory_that_cannot_be_written_gets_one_line(profile: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, text: str) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("zslurm.cluster.set_keys.write_atomically", refuse)
    with pytest.raises(ZslurmError, match=r"ours.yaml: cannot be written: Permission denied"):
        write_keys("ours", {"doctor.hbm_gb_s": 3900})
