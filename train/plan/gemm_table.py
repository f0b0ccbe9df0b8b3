"""A table of tuned matrix products, which `zslurm bench tuning` writes and every rank loads. Needs no torch.

It is JSON. `results` are TunableOp's own rows, `validators` the versions for which TunableOp accepts them; `csv`
gives both in the form that torch reads:

    Validator,PT_VERSION,2.10.0
    GemmTunableOp_BFloat16_TN,tn_1536_16384_2048_ld_2048_2048_1536,Gemm_Hipblaslt_TN_61169,0.171

torch compares the validators, but not the card: MI300X and MI325X are both gfx942. So the card's name is compared
too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator

from zslurm.checkpoint_tools.plain import Unexpected, load_json
from zslurm.train.errors import ConfigError
from zslurm.train.sections.section import Count, Positive, Section, Whole, first_problem

SCHEMA: Literal[1] = 1
TORCH, ROCM = "PT_VERSION", "ROCM_VERSION"
_FIELD = re.compile(r"[^,\n\r]+")


class TunedProduct(Section):
    """A product that was tuned, and its rate before and after, in 10^12 FLOP/s.

    Attributes:
        m, n, k: rows, outputs and inputs of the call `F.linear` whose pass it is.
    """

    name: str
    pass_name: str
    dtype: str
    m: Count
    n: Count
    k: Count
    default_tflops: Positive
    tuned_tflops: Positive


class GemmTable(Section):
    """Tuned products of a card with the versions of its libraries."""

    schema_number: Literal[1] = Field(description="number of this format")
    device: str = Field(min_length=1, description="name of the card")
    torch: str = Field(min_length=1, description="torch's version with its build, such as 2.10.0+rocm7.1")
    runtime: str = Field(min_length=1, description="`ROCm 7.1.1` or `CUDA 13.0`")
    date: str = Field(description="when it was tuned last, in UTC")
    validators: dict[str, str] = Field(description="versions for which TunableOp takes the results")
    products: tuple[TunedProduct, ...] = Field((), description="what was tuned")
    results: tuple[tuple[str, str, str, float], ...] = Field(
        (), description="operator, parameters, solution and its milliseconds: rows of TunableOp"
    )
    candidates: Whole = Field(0, description="results whose solution is not torch's default")

    @field_validator("results")
    @classmethod
    def _no_separators(
        cls, results: tuple[tuple[str, str, str, float], ...]
    ) -> tuple[tuple[str, str, str, float], ...]:
        for row in results:
            if not all(_FIELD.fullmatch(field) for field in row[:3]):
                raise ValueError(f"a result has a comma, a line break or nothing in a field: {row[:3]}")
        return results

    def csv(self) -> str:
        """Return the table as TunableOp reads it."""
        lines = [f"Validator,{key},{value}" for key, value in sorted(self.validators.items())]
        lines += [f"{op},{params},{solution},{ms:g}" for op, params, solution, ms in self.results]
        return "\n".join(lines) + "\n"

    def differences(self, device: str, validators: Mapping[str, str]) -> list[str]:
        """Return in what a card with these versions differs from the table's; nothing if the table holds."""
        reasons = [] if device == self.device else [f"the card is {device}, the table's {self.device}"]
        for key in sorted({*validators, *self.validators}):
            own_value, tuned = validators.get(key, "absent"), self.validators.get(key, "absent")
            if own_value != tuned:
                reasons.append(f"{key} is {own_value}, the table's {tuned}")
        return reasons

    def merged(self, older: GemmTable) -> GemmTable:
        """Return this table with what an older one of the same card and versions has besides."""
        keys = {row[:2] for row in self.results}
        calls = {_key(product) for product in self.products}
        return self.model_copy(
            update={
                "results": (*self.results, *(row for row in older.results if row[:2] not in keys)),
                "products": (
                    *self.products,
                    *(older_product for older_product in older.products if _key(older_product) not in calls),
                ),
                "candidates": self.candidates
                + sum(row[:2] not in keys and row[2] != "Default" for row in older.results),
            }
        )


def _key(product: TunedProduct) -> tuple[object, ...]:
    return product.name, product.pass_name, product.dtype, product.m, product.n, product.k


def load_table(path: Path) -> GemmTable:
    """Read a table.

    Raises:
        ConfigError: it cannot be read, is damaged, or of another schema.
    """
    again = "make it again with `zslurm bench tuning`"
    try:
        data = load_json(path.read_bytes())
        schema = data.get("schema_number") if isinstance(data, dict) else None
        if isinstance(schema, int) and schema > SCHEMA:
            raise ConfigError(
                f"{path}: schema {schema}, and this zslurm knows {SCHEMA}: update zslurm, or {again}"
            )
        return GemmTable.model_validate(data)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except (Unexpected, ValueError) as error:
        raise ConfigError(f"{path}: no table of tuned products ({first_problem(error)}); {again}") from error
