"""How fast a device makes matrix products: as `zslurm bench` measured it, or an assumption if it did not.

The rates are read from results of `zslurm bench gemm` (docs/bench-gpus.md), a row of which is one measured call.
Its columns are, among others,

    product, pass     name of a product of a run and its pass; no name in a sweep
    kind              `attention` for scores and values together; `part` for a part of a microbatch (parts.py) of M
                      tokens in sequences of N and width K; `newton_schulz` for K of Muon's steps on `batch`
                      matrices of M x N (newton_schulz.py); other kinds are products with M, N, K and batch
    m, n, k, batch    sizes of a product
    flops, tflops     FLOPs of the call, and its rate
    dtype             format of the operands: the run's, but for Newton-Schulz steps

A result of `zslurm bench hbm` next to it gives the rate of memory: the triad of its largest arrays.

A product has the rate of the row with its sizes and its pass, else of one with its sizes. Without one it has that
of the nearest row, if none of M, N, K and batch is more than twice or less than half as large there. All others
have the median of the table, or without a table ASSUMED_TFLOPS on a GPU. A part has its measured time if width
and length of the sequences are the same, in proportion to the tokens; Newton-Schulz steps have theirs if shape
and format of the matrices are the same, in proportion to matrices and steps.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import Field, ValidationError

from zslurm.checkpoint_tools.plain import Unexpected, load_json
from zslurm.train.errors import ConfigError
from zslurm.train.plan.matmuls import Matmul, MicrobatchShape
from zslurm.train.plan.newton_schulz import KIND as NEWTON_SCHULZ
from zslurm.train.plan.newton_schulz import MuonMatrices
from zslurm.train.plan.parts import PartPass
from zslurm.train.sections.section import Count, Positive, Section, first_problem

ASSUMED_TFLOPS = 250.0
"""Of a GPU in forward and backward, a fifth of an MI300X's peak."""

ASSUMED_MEMORY_GB_S = 4000.0
"""What a GPU reads and writes in a second: of an MI300X's 5,300 others measured up to 4,330 (arXiv 2511.17127)."""

_NEAR = math.log(2) + 1e-9

Origin = Literal["measured", "near", "median", "assumed"]


class GemmRate(Section):
    """A measured call."""

    product: str = Field("", description="name of the product; none in a sweep")
    pass_name: str = Field("", description="its pass; none where it does not matter")
    m: Count = Field(description="rows of the result")
    n: Count = Field(description="columns of the result")
    k: Count = Field(description="terms of each sum")
    batch: Count = Field(1, description="products in one call, each of these sizes")
    tflops: Positive = Field(description="10^12 floating-point operations a second")


class PartTime(Section):
    """A measured part of a microbatch."""

    part: str = Field(description="its name")
    pass_name: PartPass = Field(description="its pass")
    tokens: Count = Field(description="tokens of the microbatch")
    length: Count = Field(description="tokens of each of its sequences")
    width: Count = Field(description="hidden_size of the model")
    seconds: Positive = Field(description="of one run")


class NewtonSchulzTime(Section):
    """Measured Newton-Schulz steps of several matrices of one shape."""

    rows: Count = Field(description="of each matrix")
    columns: Count = Field(description="of each matrix")
    steps: Count = Field(description="Newton-Schulz steps of each")
    matrices: Count = Field(description="that one call works on")
    dtype: Literal["bf16", "fp32", "fp64"] = Field(description="format of the products")
    seconds: Positive = Field(description="of the call")


class RateTable(Section):
    """A table of measured rates."""

    device: str = Field("", description="name of the device")
    dtype: Literal["bf16", "fp32", "fp64"] = Field("bf16", description="format of the operands")
    source: str = Field("", description="where the figures come from")
    gemm: tuple[GemmRate, ...] = Field(min_length=1, description="measured calls")
    parts: tuple[PartTime, ...] = Field((), description="measured parts of a microbatch")
    newton_schulz: tuple[NewtonSchulzTime, ...] = Field((), description="measured steps of Muon")
    attention_tflops: Positive | None = Field(None, description="of attention; default: as other products")
    memory_gb_s: Positive | None = Field(None, description="10^9 bytes that are read and written in a second")


class Rate(NamedTuple):
    """Rate of a product in TFLOPS, and how it is known."""

    tflops: float
    origin: Origin


class Rates:
    """The rates of a device; `table` is what was measured, `on_cpu` leaves nothing to be assumed.

    Attributes:
        large: TFLOPS of all measured products together, for large products that are in no table.
        memory_gb_s: what memory gives.
    """

    def __init__(self, table: RateTable | None, *, on_cpu: bool) -> None:
        self.table = table
        self._exact = {(row.m, row.n, row.k, row.batch): row.tflops for row in table.gemm} if table else {}
        self._of_pass = {
            (row.m, row.n, row.k, row.batch, row.pass_name): row.tflops for row in (table.gemm if table else ())
        }
        self._parts = {
            (row.part, row.pass_name, row.length, row.width): row for row in (table.parts if table else ())
        }
        self._newton_schulz = {
            (row.rows, row.columns, row.dtype): row.seconds / row.matrices / row.steps
            for row in (table.newton_schulz if table else ())
        }
        self._default: Rate | None = None if on_cpu else Rate(ASSUMED_TFLOPS, "assumed")
        if table:
            self._default = Rate(statistics.median(row.tflops for row in table.gemm), "median")
        self.large: float | None = None if self._default is None else self._default.tflops
        if table:
            flops = [2e-12 * row.m * row.n * row.k * row.batch for row in table.gemm]
            self.large = sum(flops) / sum(
                flops_of_row / row.tflops for flops_of_row, row in zip(flops, table.gemm, strict=True)
            )
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
        pass_name = "forward" if product.pass_name == "recompute" else product.pass_name
        if (*sizes, pass_name) in self._of_pass:
            return Rate(self._of_pass[*sizes, pass_name], "measured")
        if sizes in self._exact:
            return Rate(self._exact[sizes], "measured")
        distance, nearest = min((_distances(sizes, known_sizes), known_sizes) for known_sizes in self._exact)
        return Rate(self._exact[nearest], "near") if distance[0] <= _NEAR else self._default

    def part_s(self, part: str, pass_name: PartPass, microbatch: MicrobatchShape, width: int) -> float | None:
        """Return the seconds of a part of a microbatch; None if it was not measured."""
        row = self._parts.get((part, pass_name, microbatch.local, width))
        return None if row is None else row.seconds * microbatch.tokens / row.tokens

    def newton_schulz_s(self, batch: MuonMatrices) -> float | None:
        """Return the seconds of Muon's steps of one of these matrices; None if they were not measured."""
        step = self._newton_schulz.get((batch.rows, batch.columns, batch.dtype))
        return None if step is None else batch.steps * step

    @property
    def default(self) -> Rate | None:
        """Return what holds for a product of which nothing was measured."""
        return self._default


def load_rates(paths: Sequence[Path], dtype: str) -> RateTable:
    """Read results of `zslurm bench gemm` in the format `dtype`, and of `zslurm bench hbm` next to them.

    Raises:
        ConfigError: a file cannot be read, is no such result, or was measured in another format or on another
            device; or no product was measured.
    """
    content: dict[str, Any] = {"gemm": [], "dtype": dtype, "source": ", ".join(path.name for path in paths)}
    for path in paths:
        try:
            result = load_json(path.read_bytes())
            name = result["benchmark"] if isinstance(result, dict) else None
            if name not in ("gemm", "hbm"):
                raise Unexpected("not a result of `zslurm bench gemm` or `zslurm bench hbm`")
            device = result["machine"]["gpu"] or result["machine"]["cpu"]
            if content.setdefault("device", device) != device:
                raise Unexpected(f"was measured on {device}, and {paths[0]} on {content['device']}")
            content.update(
                _of_memory(result["rows"]) if name == "hbm" else _of_products(path, result["rows"], content)
            )
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
        except (KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{path}: not a whole result of `zslurm bench`: {error}") from error
        except (Unexpected, ValueError) as error:
            raise ConfigError(f"{path}: {first_problem(error)}") from error
    try:
        return RateTable.model_validate(content)
    except ValidationError as error:
        raise ConfigError(f"{paths[0]}: no table of rates: {first_problem(error)}") from error


def _of_products(path: Path, rows: Sequence[Mapping[str, Any]], found: Mapping[str, Any]) -> dict[str, Any]:
    """Return products, parts and Muon's steps of a result, with those found before, and attention's rate."""
    products, parts, flops, seconds = list(found["gemm"]), list(found.get("parts", ())), 0.0, 0.0
    steps = list(found.get("newton_schulz", ()))
    for row in rows:
        if row["kind"] == NEWTON_SCHULZ:
            sizes = {"rows": row["m"], "columns": row["n"], "steps": row["k"], "matrices": row["batch"]}
            steps.append({**sizes, "dtype": row["dtype"], "seconds": row["seconds"]})
            continue
        if row["dtype"] != found["dtype"]:
            raise Unexpected(
                f"was measured in {row['dtype']}, and the run's parallel.dtype is {found['dtype']}; "
                f"measure with --dtype {found['dtype']}"
            )
        if row["kind"] == "attention":
            flops, seconds = flops + row["flops"], seconds + row["flops"] / (row["tflops"] * 1e12)
        elif row["kind"] == "part":
            about = {"tokens": row["m"], "length": row["n"], "width": row["k"], "seconds": row["seconds"]}
            parts.append({"part": row["product"], "pass_name": row["pass"], **about})
        else:
            sizes = {name: row[name] for name in ("m", "n", "k", "batch", "tflops")}
            products.append({"product": row["product"], "pass_name": row["pass"], **sizes})
    attention = {"attention_tflops": flops / seconds / 1e12} if seconds else {}
    return {"gemm": products, "parts": parts, "newton_schulz": steps, **attention}


def _of_memory(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the rate of the triad with the largest arrays."""
    triads = [row for row in rows if row["pattern"] == "triad"]
    return {"memory_gb_s": max(triads, key=lambda row: row["bytes"])["gb_s"]} if triads else {}


def _distances(sizes: tuple[int, ...], other: tuple[int, ...]) -> tuple[float, float]:
    """Return how far apart two products are: in the size that differs most, and in all."""
    apart = [abs(math.log(a / b)) for a, b in zip(sizes, other, strict=True)]
    return max(apart), sum(apart)
