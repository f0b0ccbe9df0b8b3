"""The path of a cluster's table of tuned matrix products, and whether it holds for a run there.

`zslurm calibrate` and `zslurm bench tuning --apply` write it into the folder of the measurements' results, next to
the profile: ~/.config/zslurm/clusters/NAME.measured/gemm-table.json. A site's is
/etc/zslurm/clusters/NAME.measured/gemm-table.json; a user's own hides it.
"""

from __future__ import annotations

from pathlib import Path

from zslurm.cluster.measurements import SUFFIX, results_folder
from zslurm.cluster.profile import SITE_PROFILES, measured_path
from zslurm.config.software import differences
from zslurm.config.spec import RunSpec
from zslurm.core.errors import ConfigError, NotFound
from zslurm.train.errors import ConfigError as TrainConfigError
from zslurm.train.plan.gemm_table import ROCM, TORCH, GemmTable, load_table

FILE = "gemm-table.json"
KERNEL_TABLES = "kernel-tables.json"
"""Which kernel is the fastest for which sizes: `zslurm bench kernels --apply`; in the same folder."""
_KEY = "cluster.gemm_table"


def own_table_path(name: str) -> Path:
    """Return the path of this user's table for the profile `name`, which may not exist."""
    return results_folder(measured_path(name)) / FILE


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
            raise NotFound(f"{_KEY}: {choice}: no such file; `zslurm bench tuning` makes a table")
        return Path(choice)
    return _beside_profile(spec.cluster.name, FILE)


def find_kernel_tables(spec: RunSpec) -> Path | None:
    """Return the file of what was measured of the kernels on a run's cluster; None if nothing was."""
    on_gpus = spec.cluster.gpus_per_node and spec.parallel.device != "cpu"
    return _beside_profile(spec.cluster.name, KERNEL_TABLES) if on_gpus else None


def _beside_profile(name: str, file: str) -> Path | None:
    """Return a file of this user's results for a profile, else the site's; None if there is neither."""
    places = (measured_path(name), SITE_PROFILES / f"{name}{SUFFIX}")
    return next((path for place in places if (path := results_folder(place) / file).is_file()), None)


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
    rocm, torch = table.validators.get(ROCM), table.validators.get(TORCH)
    if mismatch := differences(spec.cluster, table.device, rocm=rocm, torch=torch, whose="the table's"):
        raise ConfigError(
            f"{path}: was tuned for something else: {'; '.join(mismatch)}; tune again with `zslurm bench tuning` "
            f"or set {_KEY}: off"
        )
    return path, table
