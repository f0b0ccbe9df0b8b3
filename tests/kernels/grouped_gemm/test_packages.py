"""AITER behind the grouped products, by a stand-in with its signatures and its demands.

AITER was never run here. The stand-in asserts what the package's source asserts or documents (the versions are in
aiter.py), computes by torch, and leaves in the result what the package leaves.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from zslurm.kernels.arch import CPU, GFX942, SM_90, Arch
from zslurm.kernels.dispatch import choose_by, forget_tables, using
from zslurm.kernels.grouped_gemm import OPERATIONS, Groups, aiter, chosen_for, grouped_mm, multiply
from zslurm.kernels.grouped_gemm import weight_gradient as gradient_of

MULTIPLY, WEIGHT_GRADIENT, _ = OPERATIONS
ROWS = 130
LOADS = {
    "some empty": [2, 0, 70, 0],
    "all empty": [0, 0, 0, 0],
    "all in one": [0, 130, 0, 0],
    "no rest": [33, 64, 11, 22],
    "rest behind": [1, 2, 3, 4],
}


def slices(sizes: list[int]) -> list[slice]:
    ends = [sum(sizes[:count]) for count in range(len(sizes) + 1)]
    return [slice(start, end) for start, end in pairwise(ends)]


def is_ours(sizes: Tensor, lhs: Tensor) -> None:
    assert sizes.dim() == 1
    assert sizes.device == lhs.device


class Aiter(ModuleType):
    """aiter/ops/triton/gmm.py of v0.1.16 and newer: it recognises layouts by their strides alone."""

    def __init__(self) -> None:
        super().__init__("aiter.ops.triton.gmm")
        self.calls: list[str] = []
        self.error: Exception | None = None

    def gmm(
        self, lhs: Tensor, rhs: Tensor, group_sizes: Tensor, bias: Tensor | None = None,
        preferred_element_type: torch.dtype = torch.bfloat16, existing_out: Tensor | None = None,
        work_stealing: bool = False, config: dict[str, int] | None = None, grid_dim: int | None = None,
    ) -> Tensor:  # fmt: skip
        self._called("gmm", lhs, rhs, group_sizes)
        (m, k), (g, first, second) = lhs.shape, rhs.shape
        n = second if first == k else first
        assert min(m, k, n, g) > 0
        assert group_sizes.shape == (g,)
        assert lhs.stride() == (k, 1), "lhs must be row-major"
        fits = [
            (first, second) == (k, n) and rhs.stride() == (k * n, n, 1),
            (first, second) == (k, n) and rhs.stride() == (k * n, 1, k),
            (first, second) == (n, k) and rhs.stride() == (k * n, k, 1),
        ]
        assert sum(fits) == 1, f"rhs must match exactly one layout, not {fits}"
        out = torch.full((m, n), torch.nan, dtype=preferred_element_type)
        for rows, matrix in zip(slices(group_sizes.tolist()), rhs.mT if fits[2] else rhs, strict=True):
            out[rows] = lhs[rows] @ matrix
        return out

    def ptgmm(
        self, lhs: Tensor, rhs: Tensor, group_sizes: Tensor, bias_grad: Tensor | None = None,
        preferred_element_type: torch.dtype = torch.bfloat16, existing_out: Tensor | None = None,
        accumulate: bool = False, config: dict[str, int] | None = None, grid_dim: int | None = None,
    ) -> Tensor:  # fmt: skip
        self._called("ptgmm", lhs, rhs, group_sizes)
        m, n = rhs.shape
        k = lhs.shape[0] if lhs.shape[1] == m else lhs.shape[1]
        assert min(m, k, n, len(group_sizes)) > 0
        fits = [
            lhs.shape == (k, m) and lhs.stride() == (m, 1),
            lhs.shape == (k, m) and lhs.stride() == (1, k),
            lhs.shape == (m, k) and lhs.stride() == (k, 1),
        ]
        assert sum(fits) == 1, f"lhs must match exactly one layout, not {fits}"
        assert rhs.stride() == (n, 1), "rhs must be row-major"
        left = lhs.mT if fits[2] else lhs
        each = [left[:, rows] @ rhs[rows] for rows in slices(group_sizes.tolist())]
        return torch.stack(each).to(preferred_element_type)

    def _called(self, name: str, lhs: Tensor, rhs: Tensor, group_sizes: Tensor) -> None:
        self.calls.append(name)
        if self.error is not None:
            raise self.error
        is_ours(group_sizes, lhs)
        assert group_sizes.dtype in (torch.int32, torch.int64)
        assert lhs.dtype == rhs.dtype
        assert lhs.dtype == torch.bfloat16


def on(arch: Arch, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (aiter, grouped_mm):
        monkeypatch.setattr(module, "arch_of", lambda device: arch)


def installed(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    def version(name: str) -> str:
        if name.replace("-", "_") not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name.replace("-", "_")]

    monkeypatch.setattr(aiter.metadata, "version", version)
    aiter._lacks_package.cache_clear()


@pytest.fixture(autouse=True)
def gfx942(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This CPU passes for an MI300X with AITER, as far as this implementation asks."""
    on(GFX942, monkeypatch)
    installed(monkeypatch, amd_aiter="0.1.20.post1")
    yield
    forget_tables()
    aiter._lacks_package.cache_clear()
    aiter._lacks_arguments.cache_clear()
    for operation in OPERATIONS[:2]:
        operation.try_again()


def put_in(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    names = module.__name__.split(".")
    for count in range(1, len(names)):
        monkeypatch.setitem(sys.modules, ".".join(names[:count]), ModuleType(".".join(names[:count])))
    monkeypatch.setitem(sys.modules, module.__name__, module)


@pytest.fixture
def fake_aiter(monkeypatch: pytest.MonkeyPatch) -> Aiter:
    put_in(module := Aiter(), monkeypatch)
    return module


def groups_of(rows_E: list[int]) -> Groups:
    """Groups whose rows the host may not ask for."""
    groups = Groups(torch.tensor(rows_E).cumsum(0).int())

    def refuse() -> list[int]:
        raise AssertionError("the host waits for the numbers of rows")

    groups.rows = refuse  # type: ignore[method-assign]
    return groups


def turned(*shape: int) -> Tensor:
    return torch.randn(*shape[:-2], shape[-1], shape[-2]).mT


def cut(*shape: int) -> Tensor:
    return torch.randn(*shape[:-1], shape[-1] + 8)[..., 8:]


def check(rows_E: list[int], left: Tensor, weight: Tensor, right: Tensor, *, gradient: bool = True) -> None:
    """Compare with each group alone; rows behind the last group hold what no result may."""
    left, weight, right = (each.bfloat16() for each in (left, weight, right))
    left[sum(rows_E) :], right[sum(rows_E) :] = torch.nan, torch.inf
    y_NO = multiply(left, weight, groups_of(rows_E))
    assert y_NO.shape == (len(left), weight.shape[2])
    for rows, matrix in zip(slices(rows_E), weight, strict=True):
        torch.testing.assert_close(y_NO[rows], left[rows] @ matrix)
    if gradient:
        found = gradient_of(left, right, groups_of(rows_E))
        for rows, each in zip(slices(rows_E), found, strict=True):
            torch.testing.assert_close(each, left[rows].T @ right[rows])


@pytest.mark.parametrize("rows_E", LOADS.values(), ids=LOADS.keys())
@pytest.mark.parametrize("layout", [torch.randn, turned, cut])
@pytest.mark.parametrize("widths", [(48, 80), (64, 64)], ids=["wide", "square"])
def test_aiter_gets_layouts_that_it_takes(
    rows_E: list[int], layout: Callable[..., Tensor], widths: tuple[int, int], fake_aiter: Aiter
) -> None:
    inputs, outputs = widths
    operands = (layout(ROWS, inputs), layout(4, inputs, outputs), layout(ROWS, outputs))
    with using("grouped_gemm", "aiter"):
        check(rows_E, *operands)
    assert fake_aiter.calls == ["gmm", "ptgmm"]


@pytest.mark.parametrize("inputs", [ROWS, 2])
def test_aiter_with_as_many_rows_as_columns(inputs: int, fake_aiter: Aiter) -> None:
    for rows in (inputs, 1):
        with using("grouped_gemm", "aiter"):
            check([rows, 0], torch.randn(rows, inputs), torch.randn(2, inputs, 3), torch.randn(rows, 3))
    assert fake_aiter.calls == ["gmm", "ptgmm"] * 2


@pytest.mark.parametrize(("rows", "experts"), [(0, 3), (5, 0)])
def test_without_rows_or_matrices_the_package_is_not_called(rows: int, experts: int) -> None:
    groups = Groups(torch.zeros(experts, dtype=torch.int32))
    x_NI, weight_EIO = torch.empty(rows, 128).bfloat16(), torch.empty(experts, 128, 256).bfloat16()
    with using("grouped_gemm", "aiter"):
        assert multiply(x_NI, weight_EIO, groups).shape == (rows, 256)
    gradient = aiter.weight_gradient(x_NI, torch.empty(rows, 256).bfloat16(), groups)
    assert torch.equal(gradient, torch.zeros(experts, 128, 256).bfloat16())


def operands_of(dtype: torch.dtype = torch.bfloat16, inputs: int = 128) -> tuple[Tensor, Tensor, Groups]:
    return (
        torch.randn(4, inputs).to(dtype),
        torch.randn(2, inputs, 256).to(dtype),
        Groups(torch.tensor([1, 4]).int()),
    )


@pytest.mark.parametrize(
    ("arch", "version", "operands", "lacks"),
    [
        (GFX942, "0.1.16", operands_of(), None),
        (GFX942, "1.0", operands_of(torch.float16), "float16 operands"),
        (GFX942, None, operands_of(), "operands without the package amd-aiter, which is not installed"),
        (GFX942, "0.1.7.post2", operands_of(), "operands with amd-aiter 0.1.7.post2: it needs 0.1.16 or newer"),
        (GFX942, None, operands_of(torch.float32), "float32 operands"),
        (SM_90, None, operands_of(), "operands on sm_90, only on gfx942, gfx950"),
        (GFX942, "0.1.16", operands_of(inputs=1), "matrices of one row or column"),
    ],
    ids=["oldest", "newer", "missing", "too old", "fp32", "NVIDIA", "narrow"],
)
def test_what_aiter_does_not_take_and_why(
    arch: Arch,
    version: str | None,
    operands: tuple[Tensor, Tensor, Groups],
    lacks: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on(arch, monkeypatch)
    installed(monkeypatch, **({} if version is None else {"amd_aiter": version}))
    assert aiter.lacks(*operands) == lacks


def chosen_on_gfx942(monkeypatch: pytest.MonkeyPatch) -> str:
    aiter._lacks_arguments.cache_clear()
    monkeypatch.setattr("zslurm.kernels.dispatch.arch_of", lambda device: GFX942)
    monkeypatch.setattr(torch.version, "hip", "7.2.1")
    return chosen_for(*operands_of())


def test_on_gfx942_an_installed_aiter_is_chosen_by_itself(
    fake_aiter: Aiter, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert chosen_on_gfx942(monkeypatch) == "aiter"
    installed(monkeypatch, amd_aiter="0.1.7.post2")
    assert chosen_on_gfx942(monkeypatch) == "reference", "of this CPU: Triton's on a GPU"


def test_an_aiter_whose_functions_do_not_fit_is_not_chosen(
    fake_aiter: Aiter, monkeypatch: pytest.MonkeyPatch
) -> None:
    def other(lhs: Tensor, rhs: Tensor, sizes: Tensor) -> None:
        raise AssertionError("is called")

    monkeypatch.setattr(fake_aiter, "ptgmm", other, raising=False)
    assert chosen_on_gfx942(monkeypatch) == "reference"
    with using("grouped_gemm", "aiter"):
        assert chosen_for(*operands_of()) == "reference"
    assert aiter.lacks_here() == (
        "operands with the installed amd-aiter, whose ptgmm has no group_sizes, preferred_element_type"
    )


@pytest.mark.parametrize(
    "error",
    [PermissionError(13, "Permission denied"), FileExistsError(17, "File exists"), AssertionError("no hipcc")],
)
def test_an_aiter_whose_import_fails_is_not_chosen(
    error: Exception, fake_aiter: Aiter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its import makes directories, which a home without space or another rank may refuse."""

    def fail(name: str) -> None:
        raise error

    monkeypatch.setattr(aiter, "_function", fail)
    assert chosen_on_gfx942(monkeypatch) == "reference"
    assert "cannot be imported" in str(aiter.lacks_here())


def test_elsewhere_aiter_is_not_chosen_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if nothing else takes the operands: what was not measured is no default."""
    monkeypatch.setattr("zslurm.kernels.dispatch.arch_of", lambda device: Arch("gfx950", 64, 160 * 1024, 256))
    monkeypatch.delenv(grouped_mm.SWITCH, raising=False)
    for operation in OPERATIONS[:2]:
        left, weight, groups = operands_of()
        right = weight if operation is MULTIPLY else torch.randn(4, 256).bfloat16()
        assert operation.choose(left, right, groups).name == "reference"


def test_a_measured_table_may_name_it(monkeypatch: pytest.MonkeyPatch) -> None:
    rules = {"gfx942": [{"use": "aiter"}]}
    monkeypatch.setattr("zslurm.kernels.dispatch.arch_of", lambda device: GFX942)
    choose_by({"grouped_gemm.multiply": rules})
    assert MULTIPLY.choose(*operands_of()).name == "aiter"


def test_without_the_package_the_reference_runs_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    installed(monkeypatch)
    operands = operands_of()
    with using("grouped_gemm", "aiter"):
        for _ in range(2):
            torch.testing.assert_close(multiply(*operands), MULTIPLY.reference(*operands))
    (line,) = caplog.messages
    assert line.startswith("grouped_gemm.multiply: aiter does not take operands without the package ")


@pytest.mark.parametrize(
    "error",
    [
        None,
        AssertionError("Default configuration is absent."),
        FileNotFoundError("gfx942-GMM.json"),
        KeyError("gmm"),
    ],
    ids=["import", "assertion", "no file", "no entry"],
)
def test_a_failure_gives_the_reference_and_one_warning(
    error: Exception | None, request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> None:
    """Without a stand-in the import fails."""
    fake = None
    if error is not None:
        fake = request.getfixturevalue("fake_aiter")
        fake.error = error
    operands = operands_of()
    with using("grouped_gemm", "aiter"):
        for _ in range(3):
            torch.testing.assert_close(multiply(*operands), MULTIPLY.reference(*operands))
    (line,) = caplog.messages
    assert line.startswith("grouped_gemm.multiply runs without aiter, which cannot start here (")
    assert fake is None or len(fake.calls) == 1


def test_a_fault_of_the_gpu_is_not_hidden(fake_aiter: Aiter) -> None:
    fake_aiter.error = RuntimeError("HIP error: an illegal memory access was encountered")
    with using("grouped_gemm", "aiter"), pytest.raises(RuntimeError, match="illegal memory access"):
        multiply(*operands_of())


def test_torchs_gradient_of_a_group_without_rows_is_zero_on_amd(monkeypatch: pytest.MonkeyPatch) -> None:
    """With Composable Kernel it may hold what the memory held."""

    def left_as_it_was(left: Tensor, right: Tensor, *, offs: Tensor) -> Tensor:
        found = [left[:, rows] @ right[rows] for rows in slices(offs.diff(prepend=offs.new_zeros(1)).tolist())]
        empty = (offs.diff(prepend=offs.new_zeros(1)) == 0).view(-1, 1, 1)
        return torch.stack(found).masked_fill(empty, torch.nan)

    monkeypatch.setattr(F, "grouped_mm", left_as_it_was)
    left, right = torch.randn(5, 8), torch.randn(5, 16)
    found = grouped_mm.weight_gradient(left, right, groups_of([2, 0, 3, 0]))
    assert torch.equal(found[1], torch.zeros(8, 16))
    assert torch.equal(found[3], torch.zeros(8, 16))
    torch.testing.assert_close(found[2], left[2:].T @ right[2:])


@pytest.mark.parametrize(
    ("name", "switch", "expected"),
    [
        ("gfx942", None, "operands on AMD's GPUs without ROCM_ALLOW_GROUP_GEMM_CK=1, where it waits for the host"),
        ("gfx942", "0", "operands on AMD's GPUs without ROCM_ALLOW_GROUP_GEMM_CK=1, where it waits for the host"),
        ("gfx942", "1", None),
        ("gfx90a", "1", None),
        ("gfx1100", "1", "operands on gfx1100, where it waits for the host"),
        ("sm_90", None, None),
        ("sm_100", None, None),
        ("sm_89", None, "operands on sm_89, where it waits for the host"),
    ],
)
def test_torchs_operator_is_taken_where_it_does_not_wait(
    name: str, switch: str | None, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    on(Arch(name, 64, 65536, 304), monkeypatch)
    if switch is None:
        monkeypatch.delenv(grouped_mm.SWITCH, raising=False)
    else:
        monkeypatch.setenv(grouped_mm.SWITCH, switch)
    operands: list[Any] = list(operands_of())
    assert grouped_mm.lacks(*operands) == expected
    on(CPU, monkeypatch)
    assert grouped_mm.lacks(*operands) is None
