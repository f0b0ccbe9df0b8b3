"""The training step inside a container: what precedes the ranks' Python, and what it can see.

Only the ranks are inside. The supervisor stays on the host, which has Slurm's commands. The environment passes
through as the engines do it; PYTHONPATH names nothing but our packages, for the host's site-packages belong to
another Python.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from zslurm.config.spec import ContainerSection, RunSpec
from zslurm.core.errors import ConfigError
from zslurm.job.preparation.code_copy import packages_dir
from zslurm.job.preparation.interpreter import Interpreter
from zslurm.run.run_dir import RunDir

# GPUs of AMD; RDMA devices, and how libibverbs finds them. NVIDIA's come with `options: [--nv]`.
_DEVICES = (
    *("/dev/shm", "/dev/kfd", "/dev/dri", "/dev/infiniband"),
    *("/sys/class/infiniband", "/sys/class/infiniband_verbs", "/sys/class/net"),
)
# What belongs to the host's Python and would mislead the container's.
_HOST_PYTHON = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "CONDA_PREFIX", "CONDA_DEFAULT_ENV")


def container_interpreter(
    spec: RunSpec, run: RunDir, environ: Mapping[str, str], *, exists: Callable[[Path], bool] = Path.exists
) -> Interpreter:
    """Return the Python inside the run's container.

    Args:
        spec: of a run with a container.
        run: its directory.
        environ: the environment that goes in.
        exists: whether a path is there on the nodes; only such paths are bound.
    """
    assert spec.cluster.container is not None
    paths = [run.path, *_directories_of(spec)]
    return interpreter_inside(spec.cluster.container, environ, packages_dir(run), paths, exists=exists)


def interpreter_inside(
    container: ContainerSection,
    environ: Mapping[str, str],
    packages: Path,
    paths: Iterable[Path],
    *,
    exists: Callable[[Path], bool] = Path.exists,
) -> Interpreter:
    """Return the Python inside a container.

    Args:
        container: it.
        environ: the environment that goes in.
        packages: a directory with our package and nothing else, for `packages: host`.
        paths: directories that are to be seen inside, with `default_binds`.
        exists: whether a path is there on the nodes; only such paths are bound.
    """
    inside = {name: value for name, value in environ.items() if name not in _HOST_PYTHON}
    if container.packages == "host":
        inside["PYTHONPATH"] = str(packages)
    binds = [*container.binds, *(default_binds(paths, exists=exists) if container.default_binds else ())]
    if container.engine == "pyxis":
        return Interpreter((container.python,), inside, tuple(_pyxis(container, binds, inside)))
    return Interpreter((*_apptainer(container, binds), container.python), inside)


def _apptainer(container: ContainerSection, binds: Iterable[str]) -> list[str]:
    options = [option for bind in binds for option in ("--bind", bind)]
    return [container.engine, "exec", *options, "--pwd", str(Path.cwd()), *container.options, container.image]


def _pyxis(container: ContainerSection, binds: Iterable[str], environ: Mapping[str, str]) -> list[str]:
    mounts = [bind if ":" in bind else f"{bind}:{bind}" for bind in binds]
    # An image's own value of a variable wins in enroot, unless the variable is named.
    own_variables = [
        name for name in environ if name.startswith(("PYTHON", "ZSLURM_", "NCCL_", "RCCL_", "HSA_", "TORCH_"))
    ]
    return [
        f"--container-image={container.image}",
        f"--container-mounts={','.join(mounts)}",
        f"--container-workdir={Path.cwd()}",
        f"--container-env={','.join(sorted(own_variables))}",
        *container.options,
    ]


def default_binds(paths: Iterable[Path], *, exists: Callable[[Path], bool] = Path.exists) -> list[str]:
    """Return the present directory, these and the devices; outermost directories only, that exist."""
    paths_wanted = [Path.cwd(), *paths, *map(Path, _DEVICES)]
    existing = [path for path in dict.fromkeys(paths_wanted) if exists(path)]
    return [str(path) for path in existing if not any(parent in path.parents for parent in existing)]


def _directories_of(spec: RunSpec) -> list[Path]:
    """Return the directories of the data, of checkpoints elsewhere and of weights to start from."""
    named_paths = [spec.data.path, *(spec.data.sources or {}).values(), spec.evaluation.data]
    named_paths += [task for task in spec.evaluation.tasks if "/" in task]
    named_paths += [spec.checkpoint.resume_from, spec.checkpoint.local_dir]
    named_paths += [spec.init.partition(":")[2] if spec.init else None]
    named_paths += [spec.trainer.directory if spec.trainer is not None else None]
    paths = [Path(str(path)) for path in named_paths if path]
    return [path if path.is_dir() else path.parent for path in paths]


def check_container(spec: RunSpec, run: RunDir) -> None:
    """Check that the run can be bound into its container, whatever node it starts on.

    Raises:
        ConfigError: it cannot.
    """
    container = spec.cluster.container
    if container is None:
        return
    if container.engine == "pyxis" and spec.cluster.launcher == "local":
        raise ConfigError(
            "cluster.container.engine: pyxis is a part of srun, and this run starts on this machine; use apptainer"
        )
    for path in (run.path, Path.cwd(), *_directories_of(spec)):
        if set(str(path)) & set(":,"):
            raise ConfigError(
                f"{path}: a path with ':' or ',' cannot be bound into a container; choose another directory"
            )
