"""The wheel: what is in it, what is not, and that it works in a place where nothing else of ours is."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from tests.checkout import ROOT
from zslurm.core.extras import EXTRA_OF


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this working tree, built with what the environment has: nothing is fetched."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*command, "--wheel-dir", str(folder), str(ROOT)], check=True)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_it_holds_every_file_of_our_packages(names: set[str]) -> None:
    for package in ("zslurm", "train", "kernels", "checkpoint_tools", "sbatch_templates"):
        files = {
            str(path.relative_to(ROOT))
            for path in (ROOT / package).rglob("*")
            if path.is_file() and "__pycache__" not in path.parts
        }
        assert files
        assert {file if package == "zslurm" else f"zslurm/{file}" for file in files} <= names


def test_templates_recipes_and_types_are_there(names: set[str]) -> None:
    for name in (
        "zslurm/sbatch_templates/train.sbatch.j2",
        "zslurm/sbatch_templates/local.sh.j2",
        "zslurm/train/recipes/zaya1-tiny.yaml",
        "zslurm/aegis/logs/signatures.yaml",
        "zslurm/cluster/profiles/mi300x-pollara.yaml",
        "zslurm/cluster/rccl/rules.yaml",
        "zslurm/cluster/rccl/variables.yaml",
        "zslurm/py.typed",
    ):
        assert name in names


def test_nothing_else_is_there(names: set[str]) -> None:
    tops = {name.split("/")[0] for name in names}
    (metadata,) = {top for top in tops if top.endswith(".dist-info")}
    assert tops == {"zslurm", metadata}, "one import name, that no other package and no file of a user has"
    assert not [name for name in names if "__pycache__" in name or name.endswith(".pyc")]


def test_it_works_beside_modules_with_the_names_of_its_parts(wheel: Path, tmp_path: Path) -> None:
    """Another package called kernels, installed before, and files of the working directory."""
    site, here = tmp_path / "site", tmp_path / "here"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(site)]
    here.mkdir()
    for name in ("train.py", "kernels.py", "checkpoint_tools.py"):
        (here / name).write_text("raise SystemExit('the wrong module was imported')\n")
    (site / "kernels").mkdir(parents=True)
    (site / "kernels" / "__init__.py").write_text("OTHER = True\n")
    subprocess.run([*command, str(wheel)], check=True)
    environment = {**os.environ, "PYTHONPATH": str(site)}

    def run(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, *arguments], cwd=here, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    imports = "import zslurm.train.config, zslurm.kernels, zslurm.checkpoint_tools as tools"
    place = run("-c", f"{imports}; print(zslurm.__file__, zslurm.train.__file__, tools.__file__)")
    assert all(Path(file).is_relative_to(site / "zslurm") for file in place.split())
    assert (site / "kernels" / "__init__.py").read_text() == "OTHER = True\n"
    template = run("-m", "zslurm", "config", "template", "show", "train")
    assert template == (ROOT / "sbatch_templates" / "train.sbatch.j2").read_text()
    assert "export NCCL_PXN_DISABLE=0\n" in run("-m", "zslurm", "cluster", "env", "--cluster", "mi300x-pollara")
    schema = json.loads(run("-m", "zslurm", "config", "schema"))
    assert {"run", "model", "phases", "slurm"} <= set(schema["properties"])


def test_a_torch_that_is_there_is_kept() -> None:
    """Clusters have their own build of torch: any from 2.9 on satisfies us, whatever its local version."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    wanted = {name: line for name, lines in extras.items() for line in lines if line.startswith("torch")}
    assert wanted == {"train": "torch>=2.9"}


def test_a_login_node_gets_no_torch() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = {re.split("[^a-z0-9-]", line.lower())[0] for line in project["dependencies"]}
    assert not names & set(EXTRA_OF), "what has an extra is not installed without it"
    extras = project["optional-dependencies"]
    for package, extra in EXTRA_OF.items():
        brings = {re.split("[^a-z0-9-]", line.lower())[0] for line in extras[extra]}
        assert package.replace("_", "-") in brings or package == "triton", "torch brings its own triton"


def test_the_tests_have_one_torch() -> None:
    """Recorded numbers hold for it."""
    assert "torch==2.13.0" in (ROOT / "constraints.txt").read_text().splitlines()
