"""Which implementation of an operation runs: forced, measured, by rule, and if one cannot start."""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from subprocess import CalledProcessError
from typing import Any

import pytest
import torch
from torch import Tensor

from zslurm.kernels import checks, dispatch
from zslurm.kernels.arch import CPU, GFX942, KNOWN, SM_90, Arch, arch_of, meta_tensors_on
from zslurm.kernels.cache import TABLES_VARIABLE
from zslurm.kernels.dispatch import (
    Condition,
    Implementation,
    Operation,
    Sizes,
    UnavailableError,
    anywhere,
    choose_by,
    forget_tables,
    operations,
    use,
    using,
)

_GPUS = itertools.count(100)


def doubled(x: Tensor) -> Tensor:
    return x * 2


def never(x: Tensor) -> str | None:
    return None


class Recorded:
    """An implementation that counts its calls, and fails as asked."""

    def __init__(self, name: str, error: Exception | None = None, lacks: str | None = None) -> None:
        self.calls = 0
        self.error = error
        self.implementation = Implementation(name, self.run, lambda x: lacks)

    def run(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.error is not None:
            raise self.error
        return x + x


def check(x: Tensor) -> None:
    checks.dtype_among("double", (torch.float32,), x=x)


def double(*recorded: Recorded, when: Condition = anywhere) -> Operation:
    return Operation(
        name="double",
        reference=doubled,
        candidates=[(when, each.implementation) for each in recorded],
        check=check,
        device=lambda x: x.device,
        sizes=lambda x: {"numel": x.numel(), "dtype": checks.short(x.dtype)},
    )


@pytest.fixture
def force(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Operation], None]]:
    """Let `use` find an operation of the test."""
    monkeypatch.setattr(dispatch, "forced_names", {})

    def known(operation: Operation) -> None:
        monkeypatch.setattr(dispatch, "operations", lambda: {operation.name: operation})

    yield known


X = torch.arange(3.0)


def test_the_first_that_takes_the_operands_runs() -> None:
    first, second = Recorded("first", lacks="numbers"), Recorded("second")
    assert torch.equal(double(first, second)(X), X * 2)
    assert (first.calls, second.calls) == (0, 1)


def test_a_choice_is_remembered_for_operands_of_one_kind() -> None:
    asked: list[int] = []
    first = Recorded("first")

    def when(arch: Arch, sizes: Sizes) -> bool:
        asked.append(sizes["numel"])
        return True

    operation = double(first, when=when)
    for x in (X, X + 1, torch.zeros(6)[::2], X, X[:2], X.clone().requires_grad_()):
        assert torch.equal(operation(x), x * 2)
    assert asked == [3, 3, 2, 3], "again for other strides, for another shape, and if there is a gradient"
    assert first.calls == 6


def test_wrong_operands_are_refused_after_right_ones_and_memory_is_looked_at_in_every_call() -> None:
    operation = double(Recorded("first"))
    operation(X)
    with pytest.raises(ValueError, match="x is float64"):
        operation(X.double())
    spans: list[Tensor] = []
    operation.check_memory = spans.append
    operation(X)
    operation(X)
    assert len(spans) == 2


def test_a_choice_is_made_again_when_what_it_depends_on_changes(force: Callable[[Operation], None]) -> None:
    first, second = Recorded("first"), Recorded("second")
    operation = double(first, second)
    force(operation)
    operation(X)
    with using("double", "second"):
        operation(X)
    operation(X)
    assert (first.calls, second.calls) == (2, 1)
    choose_by({"double": {"cpu": [{"use": "second"}]}})
    operation(X)
    forget_tables()
    assert (first.calls, second.calls) == (2, 2)
    operation.leave_out("first", "another rank cannot start")
    operation(X)
    assert (first.calls, second.calls) == (2, 3)


def test_the_device_meta_is_another_architecture_at_other_times() -> None:
    archs: list[str] = []

    def when(arch: Arch, sizes: Sizes) -> bool:
        archs.append(arch.name)
        return True

    operation = double(Recorded("first"), when=when)
    for arch in (GFX942, SM_90):
        with meta_tensors_on(arch):
            operation(torch.empty(3, device="meta"))
    assert archs == ["gfx942", "sm_90"]


def test_the_first_whose_condition_holds_runs_if_nothing_was_measured() -> None:
    first, second = Recorded("first"), Recorded("second", lacks="numbers")
    operation = double()
    operation = replace(
        operation,
        candidates=[
            (lambda arch, sizes: arch == GFX942, second.implementation),
            (lambda arch, sizes: sizes["numel"] > 2, first.implementation),
            (anywhere, second.implementation),
        ],
    )
    operation(X)
    operation(X[:2])
    assert (first.calls, second.calls) == (1, 0)
    assert operation.choose(X[:2]).name == "reference"
    assert operation.preferred(GFX942, {"numel": 3}) == ["second", "first", "second"]
    assert [each.name for each in operation.all()] == ["reference", "second", "first"]


def test_a_measured_table_goes_before_the_conditions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(TABLES_VARIABLE, str(tmp_path / "tables.json"))
    rules = [{"when": {"dtype": "float32", "numel": [0, 2]}, "use": "reference"}, {"use": "first"}]
    operation = double(Recorded("first"), when=lambda arch, sizes: False)
    x = torch.empty(3, device="meta")
    (tmp_path / "tables.json").write_text(json.dumps({"double": {"gfx942": rules, "cpu": [{"use": "first"}]}}))
    forget_tables()
    with meta_tensors_on(GFX942):
        assert operation.choose(x[:2]).name == "reference"
        assert operation.choose(x).name == "first"
    assert operation.choose(X).name == "reference", "a CPU has no table"
    with meta_tensors_on(SM_90):
        assert operation.choose(x).name == "reference", "the table is another GPU's"
    assert not caplog.messages
    (tmp_path / "tables.json").write_text(json.dumps({"double": {"gfx942": [{"use": "frist"}]}}))
    forget_tables()
    with meta_tensors_on(GFX942):
        assert operation.choose(x).name == "reference"
    (message,) = caplog.messages
    assert "has no table of double that can be used (gfx942: double has no implementation frist)" in message
    forget_tables()


@pytest.mark.parametrize(
    "error",
    [
        ImportError("no module named triton"),
        CalledProcessError(1, ["hipcc"]),
        PermissionError(13, "Permission denied"),
        UnavailableError("hipcc is missing"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_cannot_start_is_left_out_with_one_warning(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = Recorded("first", error), Recorded("second")
    operation = double(first, second)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert torch.equal(operation(X), X * 2)
    assert (first.calls, second.calls) == (1, 3)
    (warning,) = caplog.messages
    assert warning.startswith("double runs without first, which cannot start here (")
    assert str(error).splitlines()[0] in warning
    assert operation.unavailable == {"first": f"cannot start here ({type(error).__name__}: {error})"}


def test_when_none_can_start_the_reference_runs(caplog: pytest.LogCaptureFixture) -> None:
    operation = double(Recorded("first", ImportError("a")), Recorded("second", ImportError("b")))
    assert torch.equal(operation(X), X * 2)
    assert len(caplog.messages) == 2


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no memory left"), ValueError("odd"), RuntimeError("x")])
def test_an_error_of_the_run_itself_is_raised(error: Exception) -> None:
    first = Recorded("first", error)
    operation = double(first)
    with pytest.raises(type(error), match=str(error)):
        operation(X)
    assert not operation.unavailable


def test_what_triton_itself_raises_counts_as_a_failed_start() -> None:
    build = pytest.importorskip("triton.runtime.build")
    with pytest.raises(Exception) as caught:
        build.compile_module_from_src(src="int main( {", name="broken")
    assert dispatch.failed_to_start(caught.value)  # type: ignore[arg-type]  # no exit of the interpreter


def test_bad_operands_are_the_same_error_whatever_would_run(force: Callable[[Operation], None]) -> None:
    first = Recorded("first")
    operation = double(first)
    force(operation)
    for name in ("reference", "first", "auto"):
        with (
            using("double", name),
            pytest.raises(ValueError, match="double: x is float64, but must be one of float32"),
        ):
            operation(X.double())
    assert first.calls == 0


def test_a_forced_implementation_runs(
    force: Callable[[Operation], None], caplog: pytest.LogCaptureFixture
) -> None:
    first, second = Recorded("first"), Recorded("second", lacks="operands on a CPU")
    operation = double(first, second)
    force(operation)
    use("double", "reference")
    operation(X)
    assert (first.calls, second.calls) == (0, 0)
    with using("double", "first"):
        operation(X)
        assert first.calls == 1
    assert operation.choose(X).name == "reference", "what was forced before"
    use("double", "second")
    for _ in range(2):
        assert torch.equal(operation(X), X * 2)
    assert (first.calls, second.calls) == (1, 0)
    assert caplog.messages == ["double: second does not take operands on a CPU; the reference runs instead"]
    use("double", "auto")
    assert operation.choose(X).name == "first"


def test_what_is_never_preferred_needs_a_setting_or_a_table(force: Callable[[Operation], None]) -> None:
    operation = double(Recorded("first"), when=lambda arch, sizes: False)
    force(operation)
    assert operation.choose(X).name == "reference"
    with using("double", "first"):
        assert operation.choose(X).name == "first"
    choose_by({"double": {"cpu": [{"use": "first"}]}})
    assert operation.choose(X).name == "first"
    forget_tables()


def test_an_operation_without_the_one_that_its_folder_is_forced_to_chooses_by_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dispatch, "forced_names", {})
    first, second = Recorded("first"), Recorded("second")
    one, other = replace(double(first), name="folder.one"), replace(double(second), name="folder.other")
    monkeypatch.setattr(dispatch, "operations", lambda: {each.name: each for each in (one, other)})
    use("folder", "first")
    assert one.choose(X).name == "first"
    assert other.choose(X).name == "second"


def test_the_tables_of_another_rank_take_the_place_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tables.json").write_text(json.dumps({"double": {"gfx942": [{"use": "reference"}]}}))
    monkeypatch.setenv(TABLES_VARIABLE, str(tmp_path / "tables.json"))
    dispatch.forget_tables()
    operation, x = double(Recorded("first")), torch.empty(3, device="meta")
    monkeypatch.setattr(dispatch, "operations", lambda: {"double": operation})
    assert dispatch.tables() == {"double": {"gfx942": [{"use": "reference"}]}}
    with meta_tensors_on(GFX942):
        assert operation.choose(x).name == "reference"
        try:
            dispatch.choose_by({"double": {"gfx942": [{"use": "first"}]}})
            assert operation.choose(x).name == "first"
            dispatch.choose_by({"double": {"gfx942": [{"use": "only elsewhere"}]}})
            assert operation.choose(x).name == "first", "what this rank does not have is no reason to fail"
            dispatch.choose_by({})
            assert operation.choose(x).name == "first"
        finally:
            dispatch.forget_tables()
        assert operation.choose(x).name == "reference"
    monkeypatch.delenv(TABLES_VARIABLE)
    dispatch.forget_tables()


def test_forcing_what_does_not_exist_names_what_does(force: Callable[[Operation], None]) -> None:
    force(double(Recorded("first")))
    with pytest.raises(ValueError, match="no operation duoble: there are double"):
        use("duoble", "first")
    with pytest.raises(ValueError, match="double has no implementation second: there are auto, first, reference"):
        use("double", "second")


def test_every_operation_of_the_package_is_well_formed() -> None:
    for name, operation in operations().items():
        assert operation.name == name
        names = [each.name for each in operation.all()]
        assert names[0] == "reference"
        assert len(set(names)) == len(names)
        assert "auto" not in names
        assert set(operation.table()) <= set(KNOWN)


def test_architectures_are_named_as_compilers_name_them() -> None:
    assert arch_of("cpu") is CPU
    assert arch_of(torch.device("meta")) is CPU
    assert (GFX942.is_amd, SM_90.is_nvidia, CPU.is_amd or CPU.is_nvidia) == (True, True, False)
    with pytest.raises(ValueError, match="no kernel is for a device of type xpu"):
        arch_of("xpu")


@pytest.mark.parametrize(
    ("hip", "properties", "expected"),
    [
        (
            "6.4",
            {"gcnArchName": "gfx942:sramecc+:xnack-", "major": 9, "minor": 4},
            replace(GFX942, compute_units=7),
        ),
        (None, {"major": 9, "minor": 0}, replace(SM_90, compute_units=7)),
        (
            None,
            {"major": 8, "minor": 9, "warp_size": 32, "shared_memory_per_block_optin": 101376},
            Arch("sm_89", 32, 101376, 7),
        ),
        (
            "6.4",
            {"gcnArchName": "gfx1100", "major": 11, "minor": 0, "warp_size": 32, "shared_memory_per_block": 65536},
            Arch("gfx1100", 32, 65536, 7),
        ),
    ],
    ids=["mi300x", "h100", "another of NVIDIA", "another of AMD"],
)
def test_a_gpu_is_named_by_what_torch_knows_of_it(
    hip: str | None, properties: dict[str, Any], expected: Arch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "hip", hip)
    found = type("Properties", (), {"multi_processor_count": 7, **properties})()
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: found)
    assert arch_of(f"cuda:{next(_GPUS)}") == expected, "each GPU is asked once: every case is another one"


def test_operands_that_do_not_fit_are_named() -> None:
    x, other = torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.float64)
    with pytest.raises(ValueError, match="op: all operands must have one format, but x is float32, y is float64"):
        checks.one_dtype("op", x=x, y=other)
    with pytest.raises(ValueError, match="op: all operands must be on one device, not x on cpu, y on meta"):
        checks.one_device("op", x=x, y=x.to("meta"))
    with pytest.raises(ValueError, match=r"op: x has the shape \[2, 3\], but must have \[M, 4\]"):
        checks.shape("op", "x", x, (None, 4), "MN")
    with pytest.raises(ValueError, match=r"op: x has the shape \[2, 3\], but must have \[K, M, N\]"):
        checks.shape("op", "x", x, (None, None, None), "KMN")
    checks.shape("op", "x", x, (2, None), "MN")
    whole = torch.zeros(8)
    checks.no_overlap("op", "out", whole[:4], x=whole[4:], empty=whole[:0])
    with pytest.raises(ValueError, match="op: out shares memory with x: give a separate tensor"):
        checks.no_overlap("op", "out", whole[:5], x=whole[4:])


@pytest.mark.parametrize(
    ("message", "function", "starts"),
    [
        ("Triton Error [HIP]:  Code: 719, Messsage: unspecified launch failure", "__call__", True),
        ("Triton Error [CUDA]: out of memory", "_init_handles", True),
        ("Triton Error [CUDA]: no kernel image is available", "_init_handles", False),
        ("Failed to find C compiler. Please specify via CC environment variable.", "_build", False),
    ],
)
def test_a_fault_of_the_device_is_not_hidden_as_a_kernel_that_cannot_start(
    message: str, function: str, starts: bool
) -> None:
    raised_in: dict[str, Any] = {"__name__": "triton.backends.amd.driver"}
    exec(f"def {function}():\n    raise RuntimeError({message!r})\n", raised_in)
    with pytest.raises(RuntimeError) as raised:
        raised_in[function]()
    assert dispatch.failed_to_start(raised.value) is not starts
