"""What torch.cuda.tunable does, for machines whose torch has no TunableOp: it keeps results and validates files.

It follows aten/src/ATen/cuda/tunable/Tunable.cpp in what matters: a product that is made while TunableOp is
enabled and has no result is tuned if tuning is on; every call is recorded, so that a test can look for them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

VALIDATORS = {"PT_VERSION": "2.10.0", "ROCM_VERSION": "7.1.1.0-12969", "GCN_ARCH_NAME": "gfx942:sramecc+:xnack-"}


class FakeTunable:
    def __init__(self, validators: dict[str, str] | None = None) -> None:
        self.validators = dict(VALIDATORS if validators is None else validators)
        self.enabled = self.tuning = False
        self.filename = ""
        self.results: dict[tuple[str, str], tuple[str, float]] = {}
        self.tuned: list[tuple[str, str]] = []
        self.looked_up: list[tuple[str, str]] = []

    def enable(self, value: bool = True) -> None:
        self.enabled = value

    def tuning_enable(self, value: bool = True) -> None:
        self.tuning = value

    def record_untuned_enable(self, value: bool = True) -> None:
        assert not value

    def set_filename(self, name: str, insert_device_ordinal: bool = False) -> None:
        assert not insert_device_ordinal
        self.filename = name

    def set_max_tuning_duration(self, milliseconds: int) -> None:
        assert milliseconds > 0

    def get_validators(self) -> list[tuple[str, str]]:
        return list(self.validators.items())

    def get_results(self) -> list[tuple[str, str, str, float]]:
        return [(*key, *value) for key, value in self.results.items()]

    def read_file(self, name: str) -> bool:
        rows = [line.split(",") for line in Path(name).read_text().splitlines()]
        if {row[1]: row[2] for row in rows if row[0] == "Validator"} != self.validators:
            return False
        self.results |= {(row[0], row[1]): (row[2], float(row[3])) for row in rows if row[0] != "Validator"}
        return True

    def product(self, operator: str, parameters: str) -> None:
        """A product that a library would make."""
        key = (operator, parameters)
        if not self.enabled:
            return
        self.looked_up.append(key)
        if key not in self.results and self.tuning:
            self.tuned.append(key)
            self.results[key] = ("Gemm_Hipblaslt_1", 0.1)


def signature(left: Any, right: Any) -> tuple[str, str]:
    """The operator and parameters of left @ right, by shapes and strides."""
    layout = "".join("T" if each.stride(-1) != 1 else "N" for each in (right, left))
    parameters = "_".join(str(each) for each in (right.shape[1], left.shape[0], left.shape[1]))
    dtype = {"torch.bfloat16": "BFloat16", "torch.float32": "float"}[str(left.dtype)]
    return f"GemmTunableOp_{dtype}_{layout}", f"{layout.lower()}_{parameters}"
