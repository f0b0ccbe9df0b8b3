"""What every rank does first: one variable of visible devices, and compilers' caches on its node."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.fake_sysfs import mi300x_pollara
from zslurm.hardware import compiler_caches
from zslurm.job.rank_setup import keep_one_of_visible


def test_one_of_the_variables_that_hide_gpus_stays(tmp_path: Path) -> None:
    mi300x_pollara(tmp_path)
    environ = {"ROCR_VISIBLE_DEVICES": "4,5", "HIP_VISIBLE_DEVICES": "4,5", "GPU_DEVICE_ORDINAL": "4,5", "A": "b"}
    (note,) = keep_one_of_visible(environ, tmp_path)
    assert environ == {"ROCR_VISIBLE_DEVICES": "4,5", "A": "b"}
    assert note == "HIP_VISIBLE_DEVICES, GPU_DEVICE_ORDINAL: not used, as ROCR_VISIBLE_DEVICES=4,5 is set too"
    single = {"CUDA_VISIBLE_DEVICES": "0", "ROCR_VISIBLE_DEVICES": ""}
    assert keep_one_of_visible(single, tmp_path) == [] and len(single) == 2
    nvidia = {"CUDA_VISIBLE_DEVICES": "0", "GPU_DEVICE_ORDINAL": "0"}
    assert keep_one_of_visible(nvidia, tmp_path / "none") == [] and len(nvidia) == 2, "no GPU of AMD is there"


def environ_of(parent: Path) -> dict[str, str]:
    return {"AITER_JIT_DIR": f"{parent}/aiter", "TRITON_CACHE_DIR": "/own/place", "LOCAL_RANK": "0"}


def test_the_nodes_directory_is_made_and_a_lock_that_a_killed_rank_left_goes(tmp_path: Path) -> None:
    parent = Path(compiler_caches.node_directory(str(tmp_path)))
    environ = environ_of(parent)
    assert compiler_caches.ready(environ) == [] and parent.stat().st_mode & 0o777 == 0o700
    stale, held, new = (parent / "aiter" / f"lock_{name}" for name in ("stale", "held", "new"))
    stale.parent.mkdir()
    for lock in (stale, held, new):
        lock.touch()
    os.utime(stale, (0, 0))
    with held.open() as file:
        os.utime(held, (0, 0))
        assert compiler_caches.ready(environ | {"LOCAL_RANK": "1"}) == []
        (note,) = compiler_caches.ready(environ)
        assert file.readable() and str(stale) in note
    assert [lock.exists() for lock in (stale, held, new)] == [False, True, True]


@pytest.mark.parametrize("kind", ["link", "writable by others"])
def test_a_directory_that_others_may_have_made_is_not_used(tmp_path: Path, kind: str) -> None:
    parent = Path(compiler_caches.node_directory(str(tmp_path)))
    if kind == "link":
        parent.symlink_to(tmp_path)
    else:
        parent.mkdir()
        parent.chmod(0o777)
    environ = environ_of(parent)
    (note,) = compiler_caches.ready(environ)
    assert "cannot be used, or others may write to it" in note
    assert environ == {"TRITON_CACHE_DIR": "/own/place", "LOCAL_RANK": "0"}


@pytest.mark.parametrize("built", [True, False])
def test_an_aiter_with_built_kernels_keeps_its_place(
    built: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With AITER_JIT_DIR it would import its modules from there alone, and compile all of them again."""
    package = tmp_path / "site" / "aiter"
    (package / "jit").mkdir(parents=True)
    (package / "__init__.py").write_text("raise SystemExit('it is not to be imported')")
    if built:
        (package / "jit" / "module_norm.so").touch()
    monkeypatch.syspath_prepend(str(package.parent))
    environ = environ_of(Path(compiler_caches.node_directory(str(tmp_path))))
    assert compiler_caches.ready(environ) == []
    assert ("AITER_JIT_DIR" in environ) is not built
    own_place = {"AITER_JIT_DIR": "/own/place"}
    compiler_caches.ready(own_place)
    assert own_place == {"AITER_JIT_DIR": "/own/place"}
