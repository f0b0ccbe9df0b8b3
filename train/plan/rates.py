"""How fast a device makes matrix products: a measured table, or an assumption where nothing was measured.

A table is JSON; `gemm` is required, and each of its rows is one measured call:

    {"device": "AMD Instinct MI300X", "dtype": "bf16", "source": "who measured it, with what, when",
     "gemm": [{"m": 16384, "n": 1536, "k": 2048, "tflops": 480.0},
              {"m": 1024, "n": 4096, "k": 2048, "batch": 16, "tflops": 410.0}],
     "attention_tflops": 300.0, "memory_gb_s": 4100.0}

A product has the rate of its own row. Without one it has that of the nearest row, if none of M, N, K and batch is
more than twice or less than half as large there. All others have the median of the table, or without a table
ASSUMED_TFLOPS on a GPU.
"""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import Literal, NamedTuple

from pydantic import Field, ValidationError

from zslurm.checkpoint_tools.plain import Unexpected, load_json
from zslurm.train.errors import ConfigError
from zslurm.train.plan.matmuls import Matmul
from zslurm.train.section import Count, Positive, Section

ASSUMED_TFLOPS = 250.0
"""Of a GPU in forward and backward, a fifth of an MI300X's peak."""

ASSUMED_MEMORY_GB_S = 4000.0
"""What a GPU reads and writes in a second: of an MI300X's 5,300 others measured up to 4,330 (arXiv 2511.17127)."""

_NEAR = math.log(2) + 1e-9

Origin = Literal["measured", "near", "median", "assumed"]


class GemmRate(Section):
    """A measured call."""

    m: Count = Field(description="rows of the result")
    n: Count = Field(description="columns of the result")
    k: Count = Field(description="terms of each sum")
    batch: Count = Field(1, description="products in one call, each of these sizes")
    tflops: Positive = Field(description="10^12 floating-point operations a second")


class RateTable(Section):
    """A table of measured rates."""

    device: str = Field("", description="name of the device")
    dtype: Literal["bf16", "fp32", "fp64"] = Field("bf16", description="format of the operands")
    source: str = Field("", description="where the figures come from")
    gemm: tuple[GemmRate, ...] = Field(min_length=1, description="measured calls")
    attention_tflops: Positive | None = Field(None, description="of attention; default: as other products")
    memory_gb_s: Positive | None = Field(None, description="10^9 bytes that are read and written in a second")


class Rate(NamedTuple):
    """Rate of a product in TFLOPS, and how it is known."""

    tflops: float
    origin: Origin


class Rates:
    """The rates of a device; `table` is what was measured, `on_cpu` leaves nothing to be assumed."""

    def __init__(self, table: RateTable | None, *, on_cpu: bool) -> None:
        self.table = table
        self._exact = {(row.m, row.n, row.k, row.batch): row.tflops for row in table.gemm} if table else {}
        self._default: Rate | None = None if on_cpu else Rate(ASSUMED_TFLOPS, "assumed")
        if table:
            self._default = Rate(statistics.median(row.tflops for row in table.gemm), "median")
        self.memory_gb_s: float | None = None if on_cpu else ASSUMED_MEMORY_GB_S
        if table and table.memory_gb_s:
            self.memory_gb_s = table.memory_gb_s

    def of(self, product: Matmul) -> Rate | None:
        """Return the rate of a product; None on a CPU of which nothing was measured."""
        if product.kind == "attention":
            if self.table and self.table.attention_tflops:
                return Rate(self.table.attention_tflops, "measured")
            return self._default
        if not self._exact or product.kind == "convolution":
            return self._default
        sizes = (product.m, product.n, product.k, product.batch)
        if sizes in self._exact:
            return Rate(self._exact[sizes], "measured")
        distance, nearest = min((_distances(sizes, other), other) for other in self._exact)
        return Rate(self._exact[nearest], "near") if distance[0] <= _NEAR else self._default

    @property
    def default(self) -> Rate | None:
        """Return what holds for a product of which nothing was measured."""
        return self._default


def load_rates(path: Path, dtype: str) -> RateTable:
    """Read a table of rates that were measured in the format `dtype`.

    Raises:
        ConfigError: there is none, it is no such table, or it was measured in another format.
    """
    try:
        table = RateTable.model_validate(load_json(path.read_bytes()))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except (Unexpected, ValueError) as error:
        raise ConfigError(f"{path}: no table of rates: {_first_line(error)}") from error
    if table.dtype != dtype:
        raise ConfigError(
            f"{path}: was measured in {table.dtype}, and the run's parallel.dtype is {dtype}; measure in {dtype}"
        )
    return table


def _distances(sizes: tuple[int, ...], other: tuple[int, ...]) -> tuple[float, float]:
    """Return how far apart two products are: in the size that differs most, and in all."""
    apart = [abs(math.log(a / b)) for a, b in zip(sizes, other, strict=True)]
    return max(apart), sum(apart)


def _first_line(error: Exception) -> str:
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        message = first["msg"].removeprefix("Value error, ")
        where = ".".join(str(part) for part in first["loc"])
        return f"{where}: {message}" if where else message
    return str(error).splitlines()[0]
