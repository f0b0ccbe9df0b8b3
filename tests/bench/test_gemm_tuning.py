"""Tuning matrix products: the calls are those of a model, and ranks look results up: they never tune or write."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.bench.alone import MACHINE
from tests.bench.fake_tunable import VALIDATORS, FakeTunable, signature
from tests.bench.synthetic import result
from tests.train.models import tiny_config
from zslurm.bench import tuning
from zslurm.bench.measurement import CannotMeasure
from zslurm.bench.results.apply import settings_from
from zslurm.bench.results.tables import keep_tables
from zslurm.bench.tuning import tuned_rows
from zslurm.kernels import tunable_op
from zslurm.kernels.tunable_op import TUNING, agrees, passes, use_table
from zslurm.train.config import TrainConfig
from zslurm.train.errors import ConfigError
from zslurm.train.model.zaya import build
from zslurm.train.plan.gemm_table import SCHEMA, GemmTable, load_table
from zslurm.train.plan.tunable import LinearCall, tunable_calls
from zslurm.train.tuned_products import CSV, TABLE, use_tuned_products


class Products(TorchDispatchMode):
    """Records the products of matrices, as a library gets them; on a fake TunableOp also what it does."""

    def __init__(self, tunable: FakeTunable | None = None, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.seen: set[tuple[str, str]] = set()
        self.tunable, self.dtype = tunable, dtype

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in ("mm", "addmm"):
            left, right = args[-2:]
            if left.dtype == self.dtype:
                found = signature(left, right)
                found = (found[0] + ("_bias" if name == "addmm" else ""), found[1])
                self.seen.add(found)
                if self.tunable:
                    self.tunable.product(*found)
        return func(*args, **(kwargs or {}))


def train_config(dtype: str = "bf16", **changes: Any) -> TrainConfig:
    phase = {"tokens": 10**6, "context": 48, "global_batch": 2, "micro_batch": 2, "lr": 1e-3}
    model = tiny_config(layers=2, **changes).model_dump()
    return TrainConfig.model_validate({"model": model, "phases": [phase], "parallel": {"dtype": dtype}})


def one_step(config: TrainConfig) -> set[tuple[str, str]]:
    """Make a forward and a backward of one microbatch; returns its products."""
    model = build(config.model, 1, dtype=torch.bfloat16)
    tokens_BS = torch.randint(config.model.vocab_size, (2, 48))
    with Products() as products:
        model.losses(tokens_BS, tokens_BS, rope_base=1e4)[0].objective.backward()
    return products.seen


def made_by(calls: list[LinearCall]) -> set[tuple[str, str]]:
    with Products() as products:
        for call in calls:
            x = torch.randn(call.rows, call.inputs, dtype=torch.bfloat16)
            weight = torch.randn(call.outputs, call.inputs, dtype=torch.bfloat16)
            bias = torch.randn(call.outputs, dtype=torch.bfloat16) if call.bias else None
            actions = passes(x, weight, bias, torch.randn(call.rows, call.outputs, dtype=torch.bfloat16))
            products.seen -= products.seen if "forward" not in call.passes else set()
            for name in call.passes:
                actions[name]()
    return products.seen


def table(**changes: Any) -> GemmTable:
    fields: dict[str, Any] = {
        "schema_number": SCHEMA,
        "device": "AMD Instinct MI300X",
        "torch": "2.10.0+rocm7.1",
        "runtime": "ROCm 7.1.1",
        "date": "2026-11-01T00:00:00Z",
        "validators": VALIDATORS,
        "results": [["GemmTunableOp_BFloat16_TN", "tn_8_16_4", "Gemm_Hipblaslt_7", 0.25]],
    }
    return GemmTable.model_validate(fields | changes)


@pytest.mark.parametrize("router", ["mlp", "linear"])
def test_the_calls_that_are_tuned_are_those_that_a_model_makes(router: str) -> None:
    config = train_config(router=router)
    calls = [call for call in tunable_calls(config, [2]) if not call.name.startswith("head.")]
    made = one_step(config)
    tuned = made_by(calls)
    assert tuned <= made, "what no model multiplies is not worth tuning"
    head = {each for each in made - tuned if str(config.model.vocab_size) in each[1].split("_")}
    experts = {str(config.model.expert_hidden_size), str(2 * config.model.expert_hidden_size)}
    left = {each for each in made - tuned - head if not experts.intersection(each[1].split("_")[1:])}
    assert not left, "every other product of the model is the head's or an expert's"


def test_the_input_gradient_of_the_head_is_tuned_and_its_wide_products_are_not() -> None:
    head = [call for call in tunable_calls(train_config(), [2]) if call.name.startswith("head.")]
    assert {call.passes for call in head} == {("input gradient",)}
    wide = [call for call in tunable_calls(train_config("fp32"), [2]) if call.name.startswith("head.")]
    assert all(len(call.passes) == 3 for call in wide)


CALL: dict[str, Any] = {
    "name": "router.down", "dtype": "bf16", "rows": 8, "outputs": 4, "inputs": 16, "bias": True,
    "passes": ["forward", "weight gradient"], "solution_ms": 30,
}  # fmt: skip


def tuned(monkeypatch: pytest.MonkeyPatch, tunable: FakeTunable) -> list[dict[str, Any]]:
    """Return the rows of a call whose default takes 2 ms and whose tuned passes take 1 ms."""
    times = itertools.cycle([2e-3, 1e-3])
    monkeypatch.setattr(tunable_op, "_seconds", lambda action, device: (action(), next(times))[1])
    with Products(tunable):
        return tuned_rows(CALL, tunable, "cpu")


def test_products_are_tuned_and_become_the_table_that_ranks_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tunable = FakeTunable()
    rows = tuned(monkeypatch, tunable)
    assert [(row["pass"], row["gain"], row["kept"]) for row in rows] == [
        ("forward", pytest.approx(2.0), True),
        ("weight gradient", pytest.approx(2.0), True),
    ]
    assert tunable.filename == os.devnull, "torch must have no file to write to"
    versions = {"torch": "2.10.0", "rocm": "7.1.1"}
    found = result("tuning", rows, versions=versions)
    store = tmp_path / "lab.measured.json"
    assert keep_tables(found, store) == [
        f"wrote {tmp_path}/lab.measured/gemm-table.json: 2 results for AMD Instinct MI300X, ROCm 7.1.1"
    ]
    kept = load_table(tmp_path / "lab.measured" / "gemm-table.json")
    assert (len(kept.results), kept.validators, kept.candidates) == (2, VALIDATORS, 2)
    assert kept.products[0].tuned_tflops == pytest.approx(2 * kept.products[0].default_tflops)
    other = [row | {"validators": {"ROCM_VERSION": "8"}} for row in rows]
    assert "is replaced" in keep_tables(result("tuning", other, versions=versions), store)[0]


def test_a_call_whose_solution_gives_other_results_keeps_torchs_default(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tuning, "agrees", lambda figures: False)
    rows = tuned(monkeypatch, FakeTunable())
    assert [(row["gain"], row["solutions"]) for row in rows] == [(1.0, []), (1.0, [])]
    assert "router.down: the fastest solution gives other results; torch's default stays" in (
        settings_from(result("tuning", rows), tmp_path / "tuning.json").lines
    )


def test_calls_that_do_not_fit_the_memory_are_left_out_and_cpus_have_nothing_to_tune() -> None:
    machine = MACHINE.model_copy(update={"device": "cuda", "gpu": "AMD Instinct MI300X"})
    calls = [CALL, CALL | {"rows": 10**9}]
    plan = tuning.points({"calls": calls, "solution_ms": 30}, machine)
    assert [point.values for point in plan.points] == [CALL]
    assert [skipped.reason for skipped in plan.skipped] == ["its operands do not fit the GPU's memory"]
    with pytest.raises(
        CannotMeasure, match="torch sees no GPU on n0; --nodes 1 or --nodelist tunes on a node that has one"
    ):
        tuning.points({"calls": calls, "solution_ms": 30}, MACHINE)


def test_a_solution_with_other_results_is_not_taken() -> None:
    assert agrees({"error.forward": 0.01, "tuned.forward": 3.0})
    assert not agrees({"error.forward": 0.01, "error.input gradient": 0.3})
    assert not agrees({"error.forward": float("nan")})


def test_a_rank_looks_results_up_and_neither_tunes_nor_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(TUNING, raising=False)
    config, tunable = train_config(), FakeTunable()
    made = one_step(config)
    rows = [[*key, "Gemm_Hipblaslt_7", 0.25] for key in sorted(made)]
    (tmp_path / TABLE).write_text(table(results=rows).model_dump_json())
    (tmp_path / CSV).write_text(table(results=rows).csv())
    (tmp_path / CSV).chmod(0o440)
    before = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "AMD Instinct MI300X")
    assert use_tuned_products(tmp_path, torch.device("cuda", 3), tunable)
    model = build(config.model, 1, dtype=torch.bfloat16)
    tokens_BS = torch.randint(config.model.vocab_size, (2, 48))
    with Products(tunable):
        model.losses(tokens_BS, tokens_BS, rope_base=1e4)[0].objective.backward()
    assert tunable.looked_up and not tunable.tuned
    assert os.environ[TUNING] == "0", "wins over any call that would turn tuning on"
    assert {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize(
    ("card", "validators", "why"),
    [
        ("AMD Instinct MI325X", VALIDATORS, "the card is AMD Instinct MI325X, the table's AMD Instinct MI300X"),
        (
            "AMD Instinct MI300X",
            VALIDATORS | {"ROCM_VERSION": "7.2.0"},
            "ROCM_VERSION is 7.2.0, the table's 7.1.1.0-12969",
        ),
        ("AMD Instinct MI300X", VALIDATORS | {"ROCBLAS_VERSION": "5.0"}, "ROCBLAS_VERSION is 5.0"),
    ],
)
def test_a_table_of_another_card_or_version_is_refused_in_the_rank_in_one_line(
    card: str,
    validators: dict[str, str],
    why: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (tmp_path / TABLE).write_text(table().model_dump_json())
    (tmp_path / CSV).write_text(table().csv())
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: card)
    tunable = FakeTunable(validators)
    monkeypatch.setattr("zslurm.train.tuned_products._LOG.propagate", True)
    assert not use_tuned_products(tmp_path, torch.device("cuda", 0), tunable)
    assert not tunable.enabled and not tunable.results
    (line,) = [record.getMessage() for record in caplog.records]
    assert why in line and "zslurm bench tuning" in line


def test_a_table_that_torch_refuses_stays_unused(tmp_path: Path) -> None:
    (tmp_path / CSV).write_text(table(validators={"PT_VERSION": "2.9.0"}).csv())
    tunable = FakeTunable()
    assert "torch refuses it" in str(use_table(tmp_path / CSV, tunable))
    assert not tunable.enabled


def test_what_the_user_set_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / TABLE).write_text(table().model_dump_json())
    monkeypatch.setenv("PYTORCH_TUNABLEOP_ENABLED", "1")
    tunable = FakeTunable()
    assert not use_tuned_products(tmp_path, torch.device("cuda", 0), tunable)
    assert tunable.filename == ""


def test_the_text_that_torch_reads() -> None:
    assert table().csv().splitlines() == [
        "Validator,GCN_ARCH_NAME,gfx942:sramecc+:xnack-",
        "Validator,PT_VERSION,2.10.0",
        "Validator,ROCM_VERSION,7.1.1.0-12969",
        "GemmTunableOp_BFloat16_TN,tn_8_16_4,Gemm_Hipblaslt_7,0.25",
    ]


def test_a_second_recipe_adds_to_the_table_and_replaces_what_it_has_again() -> None:
    newer = table(results=[["A", "x", "new", 1.0], ["B", "y", "Default", 1.0]], candidates=1)
    older = table(results=[["A", "x", "old", 2.0], ["C", "z", "old", 2.0]], candidates=2)
    merged = newer.merged(older)
    assert merged.results == (("A", "x", "new", 1.0), ("B", "y", "Default", 1.0), ("C", "z", "old", 2.0))
    assert merged.candidates == 2


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "no table of tuned products"),
        ('{"schema_number": 2}', "schema 2, and this zslurm knows 1"),
        ('{"schema_number": 1}', "device"),
        ("[]", "no table of tuned products"),
        (table().model_dump_json().replace("tn_8_16_4", "tn,8"), "a comma"),
    ],
)
def test_a_damaged_or_newer_table_gets_one_line(text: str, why: str, tmp_path: Path) -> None:
    path = tmp_path / "gemm-table.json"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_table(path)
    assert why in str(caught.value) and "\n" not in str(caught.value) and str(path) in str(caught.value)
