"""The rates of products and memory that `zslurm calibrate` measured on a run's cluster."""

from __future__ import annotations

from zslurm.bench.result import read_result
from zslurm.cluster.measurements import results_folder
from zslurm.cluster.profile import measurements_of
from zslurm.config.software import hardware_differences
from zslurm.config.spec import ClusterSection, RunSpec
from zslurm.core.errors import ZslurmError
from zslurm.train.errors import ConfigError as TrainConfigError
from zslurm.train.plan.rates import RateTable, load_rates

_PRODUCTS, _MEMORY = "products", "memory"


def measured_profile(cluster: ClusterSection) -> str:
    """Return the name of the profile with which a run's cluster was measured, which may call itself otherwise."""
    return cluster.measured.profile or cluster.name


def calibrated_rates(spec: RunSpec, *, on_cpu: bool) -> tuple[RateTable, str] | None:
    """Return rates for a run and a line on their origin; None if none were measured for its device and format.

    Raises:
        ConfigError: the cluster's measurements cannot be used.
    """
    for path, _ in measurements_of(measured_profile(spec.cluster)):
        folder = results_folder(path)
        files = [folder / f"{name}.json" for name in (_PRODUCTS, _MEMORY)]
        try:
            products = read_result(files[0])
            rates = load_rates([file for file in files if file.is_file()], spec.parallel.dtype)
        except (ZslurmError, TrainConfigError):  # not measured, or for runs in another format
            continue
        device = products.machine.gpu
        if (device is None) != on_cpu or (device and hardware_differences(spec.cluster, device, whose="")):
            continue
        partial = "" if products.complete else ", a part of them"
        origin = f"measured {products.date[:10]} on {device or products.machine.cpu}{partial}, {folder}"
        return rates, origin
    return None
