"""What is timed, and the tables that follow from it."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu.figures import all_figures
from tests.bench.alone import MACHINE, alone
from tests.bench.synthetic import result
from zslurm.bench import kernels
from zslurm.bench.measurement import CannotMeasure
from zslurm.bench.results.tables import keep_tables, kernel_rules
from zslurm.kernels import dispatch
from zslurm.kernels.arch import GFX942, SM_90, meta_tensors_on
from zslurm.kernels.cache import measured_tables
from zslurm.kernels.dispatch import forget_tables, operations
from zslurm.kernels.harness.timing import triad

DEVICE = torch.device("cpu")


@pytest.fixture(autouse=True)
def own_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables of this test."""
    monkeypatch.setenv("ZSLURM_KERNEL_TABLES", str(tmp_path / "lab.measured" / "kernel-tables.json"))
    forget_tables()
    monkeypatch.setattr(dispatch, "forced_names", {})


@pytest.fixture(autouse=True)
def forgotten() -> object:
    yield
    forget_tables()


def write(tables: Any) -> Path:
    file = measured_tables()
    assert file is not None
    file.parent.mkdir(parents=True)
    file.write_text(tables if isinstance(tables, str) else json.dumps(tables))
    forget_tables()
    return file


def measured(side: int, *, triton: float, dtype: str = "bfloat16", architecture: str = "gfx942") -> dict[str, Any]:
    return {
        "operation": "symmetric_product.product",
        "architecture": architecture,
        "axis": "side",
        "sizes": {"dtype": dtype, "side": side, "count": 1},
        "fastest": "triton" if triton < kernels.WORTH else "reference",
    }


def test_every_implementation_is_timed_on_a_cpu() -> None:
    plan = kernels.points({"only": ["muon"]}, MACHINE)
    rows = [row for point in plan.points if (row := kernels.run(point, alone())) is not None]
    assert {row["operation"] for row in rows} == {"muon.momentum", "muon.update"}
    for row in rows:
        assert row["seconds_of"].keys() == {"reference", "hip", "torch"}
        assert row["seconds"] == row["seconds_of"][row["fastest"]] > 0
        assert row["of_reference"] < kernels.WORTH or row["fastest"] == "reference"
    first = kernels.points({"only": ["symmetric_product"]}, MACHINE).points[0]
    product = kernels.run(first, alone())
    assert product is not None and product["missing"] == {"triton": "does not take operands on cpu"}
    with pytest.raises(CannotMeasure, match="--only nix: no such operation, expected one of "):
        kernels.points({"only": ["nix"]}, MACHINE)


def test_comparisons_run_on_a_cpu() -> None:
    found = list(all_figures(DEVICE, small=True))
    assert len(found) == 7
    assert all(each.ratio > 0 for each in found)
    assert triad(DEVICE) > 0


def test_between_two_sizes_the_reference_is_taken() -> None:
    sizes = [measured(4096, triton=0.6), measured(1024, triton=2), measured(2048, triton=1.5)]
    assert kernel_rules(sizes) == [
        {"when": {"dtype": "bfloat16", "side": [0, 4095]}, "use": "reference"},
        {"when": {"dtype": "bfloat16", "side": [4096, 2**62]}, "use": "triton"},
    ]
    sizes = [measured(64, triton=0.5), measured(128, triton=0.5), measured(256, triton=3)]
    assert kernel_rules(sizes) == [
        {"when": {"dtype": "bfloat16", "side": [0, 128]}, "use": "triton"},
        {"when": {"dtype": "bfloat16", "side": [129, 2**62]}, "use": "reference"},
    ]


def test_formats_have_rules_of_their_own() -> None:
    found = kernel_rules([measured(64, triton=0.5), measured(64, triton=2, dtype="float16")])
    assert [(rule["when"]["dtype"], rule["use"]) for rule in found] == [
        ("bfloat16", "triton"),
        ("float16", "reference"),
    ]


def test_dispatch_chooses_by_what_was_measured(tmp_path: Path) -> None:
    operation = operations()["symmetric_product.product"]
    small, large = (torch.empty(1, side, side, dtype=torch.bfloat16, device="meta") for side in (512, 8192))

    def chosen(x_KSL: torch.Tensor) -> str:
        return operation.choose(x_KSL, x_KSL).name

    found = [measured(512, triton=0.5), measured(1024, triton=2)]
    file, store = tmp_path / "lab.measured" / "kernel-tables.json", tmp_path / "lab.measured.json"
    assert keep_tables(result("kernels", found), store, dry_run=True) == [f"would write {file}"]
    assert not file.exists()
    of_another = measured(512, triton=0.5, architecture="gfx90a")
    for rows in ([of_another], found):
        assert keep_tables(result("kernels", rows), store) == [f"wrote {file}"]
    forget_tables()
    of_both = {"gfx90a": kernel_rules([of_another]), "gfx942": kernel_rules(found)}
    assert json.loads(file.read_text()) == {"symmetric_product": {"product": of_both}}, "what it lacks stays"
    assert list(file.parent.iterdir()) == [file]
    assert set(operation.table()) == {"gfx90a", "gfx942"}
    with meta_tensors_on(
        GFX942
    ):  # no implementation takes tensors of this device: what the table has is looked at
        assert operation.measured(GFX942, operation.sizes(small, small)) == "triton"
        assert operation.measured(GFX942, operation.sizes(large, large)) == "reference"
        assert chosen(large) == "reference"
    assert operation.measured(SM_90, operation.sizes(small, small)) is None
    assert operations()["symmetric_product.polynomial"].table() == {}


def test_a_cpu_and_a_part_of_the_sizes_give_no_table(tmp_path: Path) -> None:
    store = tmp_path / "lab.measured.json"
    of_cpu = result("kernels", [measured(512, triton=0.5, architecture="cpu")])
    assert "on a CPU the choice of kernels is fixed" in keep_tables(of_cpu, store)[0]
    partial = result("kernels", [measured(512, triton=0.5)], complete=False)
    assert "not all sizes were measured" in keep_tables(partial, store)[0]
    assert list(tmp_path.iterdir()) == []
    write({"symmetric_product": {"product": {"cpu": [{"use": "reference"}]}}})
    assert operations()["symmetric_product.product"].table() == {}


@pytest.mark.parametrize(
    ("content", "cause"),
    [
        ("[", "Expecting value"),
        ("[]", "has no attribute"),
        ({"gfx942": [{"use": "tritno"}]}, "has no implementation tritno"),
        ({"gfx942": ["triton"]}, "expected a list of rules"),
        ({"gfx942": [{"when": {"side": [1]}, "use": "triton"}]}, "expected a list of rules"),
    ],
)
def test_a_damaged_table_is_left_out_with_a_warning(
    content: Any, cause: str, caplog: pytest.LogCaptureFixture
) -> None:
    file = write(content if isinstance(content, str) else {"symmetric_product": {"product": content}})
    operation = operations()["symmetric_product.product"]
    with caplog.at_level(logging.WARNING):
        assert [operation.table(), operation.table()] == [{}, {}]
    (message,) = [record.getMessage() for record in caplog.records]
    assert str(file) in message
    assert cause in message


def test_rules_about_sizes_that_are_gone_do_not_hold() -> None:
    write({"symmetric_product": {"product": {"gfx942": [{"when": {"rows": [0, 9]}, "use": "triton"}]}}})
    operation = operations()["symmetric_product.product"]
    x_KSL = torch.empty(1, 4, 4, device="meta")
    assert operation.measured(GFX942, operation.sizes(x_KSL, x_KSL)) is None
