"""The path of a cluster's table of tuned matrix products, and whether it holds for a run there.

`zslurm dev tune gemm` writes it into a directory next to the profile:
~/.config/zslurm/clusters/NAME/gemm-table.json. A site's is /etc/zslurm/clusters/NAME/gemm-table.json; a user's own
hides it.
"""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path

from zslurm.cluster.profile import SITE_PROFILES, config_dir
from zslurm.config.spec import ClusterSection, RunSpec
from zslurm.core.errors import ConfigError, NotFound
from zslurm.train.errors import ConfigError as TrainConfigError
from zslurm.train.plan.gemm_table import ROCM, TORCH, GemmTable, load_table

FILE = "gemm-table.json"
_KEY = "cluster.gemm_table"


def own_table_path(name: str) -> Path:
    """Return the path of this user's table for the profile `name`, which may not exist."""
    return config_dir() / "clusters" / name / FILE


def find_table(spec: RunSpec) -> Path | None:
    """Return the table that a run is to use by `cluster.gemm_table`; None if it uses none.

    Raises:
        NotFound: the file that it names does not exist.
    """
    choice = spec.cluster.gemm_table
    if choice == "off" or not spec.cluster.gpus_per_node or spec.parallel.device == "cpu":
        return None
    if choice != "auto":
        if not Path(choice).is_file():
            raise NotFound(f"{_KEY}: {choice}: no such file; `zslurm dev tune gemm` makes a table")
        return Path(choice)
    places = (own_table_path(spec.cluster.name), SITE_PROFILES / spec.cluster.name / FILE)
    return next((path for path in places if path.is_file()), None)


def table_of(spec: RunSpec) -> tuple[Path, GemmTable] | None:
    """Return the table that a run will use, checked as far as this machine can; None if it uses none.

    Raises:
        ConfigError: it is damaged, or of another card, ROCm or torch than the run's.
        NotFound: see `find_table`.
    """
    path = find_table(spec)
    if path is None:
        return None
    try:
        table = load_table(path)
    except TrainConfigError as error:
        raise ConfigError(f"{error}; or set {_KEY}: off") from error
    if mismatch := _differences(table, spec.cluster):
        raise ConfigError(
            f"{path}: was tuned for something else: {'; '.join(mismatch)}; tune again with `zslurm dev tune gemm` "
            f"or set {_KEY}: off"
        )
    return path, table


def _differences(table: GemmTable, cluster: ClusterSection) -> list[str]:
    """Return in what the table differs from what the profile and the job's Python are known to be."""
    mismatches = []
    card = cluster.gpu_family or cluster.gpu_type
    if card is not None and not _names(card, table.device):
        mismatches.append(f"the GPUs are {card}, the table's {table.device}")
    tuned_rocm, rocm = table.validators.get(ROCM), cluster.rocm_version
    if tuned_rocm is not None and rocm is not None and not _same_release(rocm, tuned_rocm):
        mismatches.append(f"cluster.rocm_version is {rocm}, the table's ROCm {tuned_rocm}")
    torch, tuned_torch = _torch_version(cluster), table.validators.get(TORCH)
    if torch is not None and tuned_torch is not None and not _same_release(torch, tuned_torch):
        mismatches.append(f"the job's torch is {torch}, the table's {tuned_torch}")
    return mismatches


def _names(card: str, device: str) -> bool:
    """Return whether a profile's name of a card (mi300x) is in torch's name of it (AMD Instinct MI300X)."""
    words = [word for word in re.split(r"[\W_]+", card.upper()) if any(c.isdigit() for c in word)]
    return not words or any(word in device.upper() for word in words)


def _same_release(one: str, other: str) -> bool:
    """Return whether two versions agree in all the numbers that both have: 7.1 and 7.1.1.0-12969-1544e39 do."""
    numbers = [re.findall(r"\d+", re.split(r"[-+]", version)[0]) for version in (one, other)]
    return all(a == b for a, b in zip(*numbers, strict=False))


def _torch_version(cluster: ClusterSection) -> str | None:
    """Return the version of the job's torch; None if only the node knows: in a container."""
    if cluster.container is not None:
        return None
    if cluster.venv is None:
        try:
            return metadata.version("torch")
        except metadata.PackageNotFoundError:
            return None
    installed = sorted(Path(cluster.venv).glob("lib/python3*/site-packages/torch-*.dist-info"))
    return installed[0].name.removeprefix("torch-").removesuffix(".dist-info") if len(installed) == 1 else None
