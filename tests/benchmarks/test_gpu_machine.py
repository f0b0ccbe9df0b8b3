"""`make gpu` on a machine with few packages and no network: with those packages and those of `make gpu-wheels`."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

import pytest

from benchmarks.gpu import command
from tests.checkout import ROOT

ON_THE_MACHINE = (
    *(
        "torch",
        "triton",
        "typer",
        "rich",
        "psutil",
        "pyyaml",
        "jinja2",
        "h5py",
        "numpy",
        "safetensors",
        "tokenizers",
    ),
    *("transformers", "hypothesis", "pytest", "pytest-timeout"),
)
"""Packages of the machine on which the first GPU is expected, with what they need themselves."""
PARTS_ON_A_GPU = """
import sys, torch
from benchmarks.gpu.parts import PARTS

torch.cuda.is_available, torch.cuda.device_count = (lambda: True), (lambda: 1)
import tests.train.model.reference  # the peer of train_step, which that part imports after its own model
for name, part in PARTS.items():
    if name == "tests":
        continue
    try:
        rows = list(part.run(torch.device("cuda", 0)))
    except (AssertionError, AttributeError, RuntimeError, SystemExit) as error:
        print(f"{name}: {error}".replace("\\n", " "))
    else:
        print(f"{name}: {rows[-1]['problem']}")
"""
FIRST_CALL = "not compiled with CUDA|without ATen_cuda|torch._C' has no attribute '_cuda|driver"
"""What torch says at its first call of the driver, built for CPUs and for CUDA."""


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a Python with the packages of such a machine."""
    folder = tmp_path_factory.mktemp("machine") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    link_packages(ON_THE_MACHINE, next(folder.glob("lib/python*/site-packages")))
    return folder / "bin" / "python"


@pytest.fixture(scope="module")
def carried(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the packages that `make gpu-wheels` names."""
    recipe = (ROOT / "Makefile").read_text().partition("\ngpu-wheels:")[2].partition("\n\n")[0]
    packages = recipe.partition("constraints.txt ")[2].split()
    assert packages
    folder = tmp_path_factory.mktemp("carried")
    link_packages(packages, folder)
    return folder


def link_packages(names: Iterable[str], folder: Path) -> None:
    """Link packages, and what they need, from this environment into a folder."""
    for each in with_requirements(names):
        for entry in {file.parts[0] for file in each.files or () if file.parts[0] not in ("..", "__pycache__")}:
            target = folder / entry
            if not target.is_symlink():
                target.symlink_to(Path(str(each.locate_file(entry))))


def with_requirements(names: Iterable[str]) -> list[Distribution]:
    """Return installed packages with what they need, without their extras."""
    todo, seen = list(names), dict[str, Distribution]()
    while todo:
        name = re.sub(r"[-_.]+", "-", todo.pop()).lower()
        if name in seen:
            continue
        try:
            seen[name] = distribution(name)
        except PackageNotFoundError:  # for another system
            continue
        required = (line for line in seen[name].requires or () if "extra ==" not in line)
        todo += [match[0] for line in required if (match := re.match(r"[\w.-]+", line))]
    return list(seen.values())


def environment(cache: Path, *packages: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "ZSLURM", "COV"))}
    return kept | {"PYTHONPATH": ":".join(map(str, packages)), "ZSLURM_KERNEL_CACHE": str(cache)}


def test_every_part_reaches_its_first_call_of_the_driver(bare_python: Path, carried: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [bare_python, "-c", PARTS_ON_A_GPU],
        cwd=ROOT,
        env=environment(tmp_path, carried),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    ends = dict(line.partition(": ")[::2] for line in done.stdout.splitlines())
    assert ends.keys() == command.PARTS.keys() - {"tests"}
    for name, end in ends.items():
        assert re.search(FIRST_CALL, end), f"{name}: {end}"


def test_the_marked_tests_are_collected(bare_python: Path, carried: Path, tmp_path: Path) -> None:
    from benchmarks.gpu.parts import files_of_tests

    collect = ["-m", "pytest", "-m", "gpu", "-q", "--collect-only", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [bare_python, *collect, *files_of_tests()],
        cwd=ROOT,
        env=environment(tmp_path, carried),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "error" not in done.stdout.splitlines()[-1]


@pytest.mark.soak
def test_both_calls_run_whole(bare_python: Path, carried: Path, tmp_path: Path) -> None:
    """With small sizes on the CPU; the second call continues the result of the first."""
    for group in ("kernels", "training"):
        done = subprocess.run(
            [bare_python, "-m", "benchmarks", "gpu", group, "--device", "cpu", "--results", tmp_path],
            cwd=ROOT,
            env=environment(tmp_path / "cache", carried),
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
    (file,) = tmp_path.glob("*.json")
    assert {part["status"] for part in json.loads(file.read_text())["parts"].values()} == {"done"}


def test_wheels_of_the_tree_serve_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A package that is missing is installed for the parts, in front of what PYTHONPATH has already."""
    wheel = tmp_path / "wheels" / "zslurm_carried-1-py3-none-any.whl"
    wheel.parent.mkdir()
    write_wheel(wheel, "zslurm_carried")
    monkeypatch.setattr(command, "WHEELS", wheel.parent)
    monkeypatch.setattr(command, "PACKAGES", ("zslurm_carried", "zslurm_not_there"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("PYTHONPATH", "/of/the/caller")
    command.add_packages(tmp_path / "packages")
    assert os.environ["PYTHONPATH"] == f"{tmp_path / 'packages'}:/of/the/caller"
    seen = subprocess.run([sys.executable, "-c", "import zslurm_carried"], check=False, capture_output=True)
    assert seen.returncode == 0
    message = capsys.readouterr().err
    assert "zslurm_not_there; parts that need them fail (`make gpu-wheels`" in message
    assert "zslurm_carried" not in message


def write_wheel(file: Path, name: str) -> None:
    import zipfile

    info = f"{name}-1.dist-info"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(f"{name}.py", "")
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")


def test_make_keeps_the_callers_path(tmp_path: Path) -> None:
    """PYTHONPATH may hold the torch of the machine; make hides it from everything else."""
    python = tmp_path / "bin" / "python3"
    python.parent.mkdir()
    python.write_text('#!/bin/sh\n[ "$1" = -c ] || echo "path: $PYTHONPATH, arguments: $*"\n')
    python.chmod(0o755)
    done = subprocess.run(
        ["make", "--no-print-directory", "gpu", "VENV=/none", "GPU_ARGS=kernels --results out"],
        cwd=ROOT,
        env=os.environ | {"PATH": f"{python.parent}:{os.environ['PATH']}", "PYTHONPATH": "/a:/b"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.splitlines() == ["path: /a:/b, arguments: -m benchmarks gpu kernels --results out"]
