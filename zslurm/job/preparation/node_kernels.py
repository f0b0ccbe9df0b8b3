"""Build and unpack kernels on a node: what `kernel_builds.py` asks the nodes of a job to do.

`python -m zslurm.job.preparation.node_kernels unpack|build RUN_DIR DIRECTORY` answers with the kind of the node,
which is None without a GPU, whether its kernels are there, and what went wrong.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import sys
import tarfile
import tempfile
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

import zslurm.kernels
from zslurm.core.errors import ZslurmError
from zslurm.core.files import read_text
from zslurm.kernels.prepared import PREPARED_VARIABLE, is_own
from zslurm.run.run_dir import RunDir
from zslurm.slurm.on_nodes.run_on_nodes import answer

_PACKAGES = ("torch", "triton", "pytorch-triton-rocm", "zslurm")
_SOURCES = ("*.py", "*.hip", "*.h")


def node_architecture(root: Path = Path("/")) -> str | None:
    """Return the architecture of this node's GPUs, as compilers call it; None without one.

    The kernel's topology names AMD's: `gfx_target_version` 90402 is gfx942. Others are torch's affair.
    """
    for file in sorted((root / "sys/class/kfd/kfd/topology/nodes").glob("*/properties")):
        for line in (read_text(file) or "").splitlines():
            name, _, value = line.partition(" ")
            if name == "gfx_target_version" and value.strip().isdigit() and int(value):
                major, minor, stepping = int(value) // 10000, int(value) // 100 % 100, int(value) % 100
                return f"gfx{major}{minor:x}{stepping:x}"
    import torch

    if not torch.cuda.is_available():
        return None
    from zslurm.kernels.arch import arch_of

    return arch_of("cuda").name


def kind_of_node(run: RunDir, architecture: str) -> str:
    """Return what nodes with the same builds have in common, as a name: architecture, and a digest of the rest."""
    digest = hashlib.sha256(run.config.read_bytes())
    digest.update(sys.version.encode())
    for package in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            digest.update(f"{package} {metadata.version(package)}\n".encode())
    folder = Path(zslurm.kernels.__file__).parent
    for file in sorted(file for pattern in _SOURCES for file in folder.rglob(pattern)):
        digest.update(f"{file.relative_to(folder)}\n".encode() + file.read_bytes())
    return f"{architecture}-{digest.hexdigest()[:16]}"


def _archive(run: RunDir, kind: str) -> Path:
    return run.path / f"kernels-{kind}.tar"


def unpack(run: RunDir, directory: Path, kind: str) -> bool:
    """Put the kernels of a kind of node into a directory, if they are not there yet; return whether there are any.

    Files appear whole, by rename: other jobs may read the directory, or unpack into it at the same time.

    Raises:
        OSError: the disk is not writable, or the directory is another user's.
        ValueError, tarfile.TarError: the archive is damaged.
    """
    archive = _archive(run, kind)
    if not archive.exists():
        return False
    make_own(directory)
    with tarfile.open(archive) as tar, tempfile.TemporaryDirectory(dir=directory, prefix=".unpack-") as partial:
        files = [member for member in tar if member.isfile()]
        missing = {_entry(member.name) for member in files if not (directory / member.name).exists()}
        for member in files:
            if _entry(member.name) in missing and (content := tar.extractfile(member)) is not None:
                file = Path(partial, member.name)
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(_at_home(content.read(), file.name, directory / _entry(member.name)))
        for entry in sorted(missing):
            (directory / entry).parent.mkdir(exist_ok=True)
            _complete(Path(partial, entry), directory / entry)
    return True


def _entry(name: str) -> str:
    """Return the kernel that a file of an archive belongs to: triton/KEY, or hip/FILE."""
    return "/".join(name.split("/")[:2])


def _at_home(content: bytes, name: str, entry: Path) -> bytes:
    """Return a file with paths as they are here: Triton's lists of the files of a kernel have absolute ones."""
    if not name.startswith("__grp__"):
        return content
    files = json.loads(content)["child_paths"]
    return json.dumps({"child_paths": {file: str(entry / file) for file in files}}).encode()


def _complete(new: Path, old: Path) -> None:
    """Put a kernel in its place; of one that is there, only the files that are missing: others may write there."""
    try:
        new.rename(old)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        for file in new.iterdir():
            if not (old / file.name).exists():
                file.rename(old / file.name)


def make_own(directory: Path) -> None:
    """Make a directory that only this user can write to, or check that it is one.

    Raises:
        OSError: it is not, or it cannot be made.
    """
    with contextlib.suppress(FileExistsError):
        directory.mkdir(mode=0o700)
    if not is_own(directory):
        raise PermissionError(f"{directory} belongs to another user, or others may write to it")


def build(run: RunDir, directory: Path, kind: str) -> list[str]:
    """Build the kernels of a run on this node, and keep them in the run directory; return what could not be built.

    Raises:
        OSError: a disk is not writable.
    """
    from zslurm.kernels.arch import KNOWN, arch_of
    from zslurm.train.config import load_train_config
    from zslurm.train.kernel_builds import build_kernels, load_driver

    architecture, archive = kind.partition("-")[0], _archive(run, kind)
    make_own(directory)
    with tempfile.TemporaryDirectory(dir=directory, prefix=".build-") as built:
        os.environ |= {PREPARED_VARIABLE: built, "TRITON_CACHE_DIR": f"{built}/triton"}
        try:
            has_driver = load_driver()
        except (RuntimeError, OSError) as error:  # Triton compiles its driver: without a compiler it raises either
            return [f"Triton's driver: {error}".partition("\n")[0]]
        arch = arch_of("cuda") if has_driver else KNOWN.get(architecture)
        if arch is None:
            return [f"{architecture} is unknown, and torch sees no GPU"]
        problems = build_kernels(load_train_config(run.config), arch)
        partial = archive.with_name(f".{archive.name}.{os.getpid()}.tmp")
        try:
            with tarfile.open(partial, mode="w") as tar:
                for entry in sorted(Path(built).glob("*/*")):
                    tar.add(entry, entry.relative_to(built))
            partial.replace(archive)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
    unpack(run, directory, kind)
    return problems


def _act(action: str, run: RunDir, directory: Path) -> dict[str, Any]:
    """Carry out an action on this node; the answer names the kind of the node, None without a GPU."""
    architecture = node_architecture()
    if architecture is None:
        return {"kind": None, "ready": False, "problems": ["no GPU is seen"]}
    kind, problems, ready = kind_of_node(run, architecture), list[str](), False
    try:
        if action == "build":
            problems, ready = build(run, directory, kind), True
        else:
            ready = unpack(run, directory, kind)
    except (OSError, ValueError, ZslurmError, ImportError, tarfile.TarError) as error:
        problems = [" ".join(str(error).split())]
    return {"kind": kind, "ready": ready, "problems": problems}


def main(argv: Iterable[str]) -> None:
    """Answer `run_on_nodes`."""
    action, run, directory = argv
    answer(_act(action, RunDir(Path(run)), Path(directory)))


if __name__ == "__main__":
    main(sys.argv[1:])
