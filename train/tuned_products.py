"""Give this rank the run's table of tuned matrix products, if it has one: it is read, and nothing is ever tuned.

Submission puts the table into the run directory. A rank whose card or versions are others trains without it and
prints so: the results would be the same to rounding, and a run must not end by the update of a driver.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import torch

from zslurm.kernels.cache import TABLES_VARIABLE
from zslurm.kernels.dispatch import forget_tables
from zslurm.kernels.tunable_op import ENABLED, use_table
from zslurm.train.errors import ConfigError
from zslurm.train.plan.gemm_table import load_table

TABLE, CSV, KERNELS = "gemm-table.json", "gemm-table.csv", "kernel-tables.json"
_LOG = logging.getLogger(__name__)


def use_tuned_products(run_dir: Path, device: torch.device, tunable: Any = torch.cuda.tunable) -> bool:
    """Use the run's table on this rank's GPU, before it makes the first product; returns whether it is in use.

    A run without a table, ranks on CPUs, and users who set PYTORCH_TUNABLEOP_ENABLED themselves keep what they
    have.
    """
    path = run_dir / TABLE
    if device.type != "cuda" or not path.is_file():
        return False
    if ENABLED in os.environ:
        _LOG.info("%s is set: torch's TunableOp is used as you set it, and not with %s", ENABLED, path)
        return False
    name = torch.cuda.get_device_name(device)
    try:
        table = load_table(path)
        problems = table.differences(name, dict(tunable.get_validators()))
        refused = "; ".join(problems) or use_table(run_dir / CSV, tunable)
    except ConfigError as error:
        refused = str(error)
    if refused:
        _LOG.warning("the table of tuned products is not used: %s; tune again with `zslurm bench tuning`", refused)
        return False
    _LOG.info("%d tuned products of %s are in use; nothing is tuned", len(table.results), table.device)
    return True


def use_kernel_tables(run_dir: Path) -> None:
    """Choose kernels by what was measured on the run's cluster, if submission put it into the run directory."""
    if (file := run_dir / KERNELS).is_file():
        os.environ[TABLES_VARIABLE] = str(file)
        forget_tables()
