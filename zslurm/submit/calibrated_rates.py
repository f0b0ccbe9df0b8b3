"""The rates of products and memory that `zslurm calibrate` measured on a run's cluster."""

from __future__ import annotations

from zslurm.bench.result import read_result
from zslurm.cluster.profile import measurements_of
from zslurm.config.spec import RunSpec
from zslurm.core.errors import ZslurmError
from zslurm.train.errors import ConfigError as TrainConfigError
from zslurm.train.plan.rates import RateTable, load_rates

_PRODUCTS, _MEMORY = "products", "memory"


def calibrated_rates(spec: RunSpec, *, on_cpu: bool) -> tuple[RateTable, str] | None:
    """Return rates for a run and a line on their origin; None if none were measured for its device and format.

    Raises:
        ConfigError: the cluster's measurements cannot be used.
    """
    stored = measurements_of(spec.cluster.name)
    if stored is None:
        return None
    folder = stored[0].with_suffix("")
    files = [folder / f"{name}.json" for name in (_PRODUCTS, _MEMORY)]
    try:
        products = read_result(files[0])
        rates = load_rates([file for file in files if file.is_file()], spec.parallel.dtype)
    except (ZslurmError, TrainConfigError):  # not measured, or for runs in another format
        return None
    if (products.machine.device == "cpu") != on_cpu:
        return None
    return rates, f"measured {products.date[:10]} on {products.machine.gpu or products.machine.cpu}, {folder}"
