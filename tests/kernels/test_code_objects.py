"""Every kernel in Triton, in every configuration, compiled for the GPUs that it is for, within their limits."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterable
from functools import partial
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.common import RESULTS
from benchmarks.kernels.code_objects import of_triton
from zslurm.kernels.arch import GFX942, SM_90, Arch
from zslurm.kernels.code_object import (
    CodeObject,
    KernelLaunch,
    compile_launch,
    implementation_files,
    launches_of,
    violations,
)

pytest.importorskip("triton")

from zslurm.kernels import triton_tools


@pytest.mark.parametrize("folder", implementation_files())
def test_every_kernel_keeps_to_the_limits_of_gfx942(folder: str) -> None:
    rows = assert_within_limits(launches_of(folder, GFX942), GFX942)
    recorded = json.loads((RESULTS / "code_objects.json").read_text())
    if recorded["triton_version"] == version("triton"):
        assert rows == recorded["triton"].get(folder), "run `python -m benchmarks code_objects` and `make docs`"


@pytest.mark.parametrize("folder", implementation_files())
@pytest.mark.parametrize("every", [10, pytest.param(1, marks=pytest.mark.soak)])
def test_kernels_keep_to_the_limits_of_sm_90(folder: str, every: int) -> None:
    """NVIDIA's assembler takes most of the time: every tenth, and all of them in `make soak`."""
    assert_within_limits(islice(launches_of(folder, SM_90), 0, None, every), SM_90)


def assert_within_limits(launches: Iterable[KernelLaunch], arch: Arch) -> list[dict[str, Any]]:
    """Compile launches; returns their rows in the benchmark's result."""
    found, rows = {}, []
    for launch in launches:
        compiled = compile_launch(launch, arch)
        assert compiled, f"{launch.name} launches nothing"
        for code in compiled:
            rows.append(of_triton(launch.name, code))
            if wrong := violations(code, launch, arch):
                found[f"{launch.name}: {code.kernel}"] = wrong
    assert found == {}
    return rows


def test_no_shape_of_a_records_constants_goes_to_zeros() -> None:
    """Triton 3.6, which torch 2.11 brings, does not compile that; the version here may be newer."""
    kernels = Path(triton_tools.__file__).parent
    calls = [
        (file, node)
        for file in kernels.glob("*/triton.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "tl.zeros"
    ]
    assert calls
    shapes = [(file, node.args[0]) for file, node in calls if isinstance(node.args[0], ast.Tuple)]
    bad = [f"{file}:{shape.lineno}" for file, shape in shapes if "." in ast.unparse(shape)]
    assert bad == [], "use tl.full"


def good(**other: int) -> CodeObject:
    fields = {"warps": 4, "stages": 2, "lds_bytes": 65536, "registers": 128, "spills": 0, "scratch_bytes": 0}
    return CodeObject(
        kernel="k", **{**fields, "occupancy": 4, "wide_accesses": 1, "matrix_instructions": 1, **other}
    )


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (good(), []),
        (good(lds_bytes=98304), ["98304 bytes of LDS exceed the 65536 of gfx942"]),
        (good(spills=3, scratch_bytes=12), ["3 registers are spilled", "12 bytes of scratch memory are used"]),
        (good(wide_accesses=0, matrix_instructions=0), ["nothing moves 16 bytes", "without matrix instructions"]),
        (good(narrow_lds_reads=48), ["48 reads of 2 bytes from LDS among matrix instructions"]),
    ],
)
def test_what_is_against_the_limits_is_named(code: CodeObject, expected: list[str]) -> None:
    found = violations(code, KernelLaunch("l", lambda: None), GFX942)
    assert len(found) == len(expected)
    assert all(part in sentence for part, sentence in zip(expected, found, strict=True))


def test_a_kernel_without_products_needs_no_matrix_instructions() -> None:
    launch = KernelLaunch("l", lambda: None, product=False, wide=False)
    assert violations(good(wide_accesses=0, matrix_instructions=0), launch, GFX942) == []


def test_kernels_of_a_launch_may_be_without_products() -> None:
    launch = KernelLaunch("l", lambda: None, without_products=("k",))
    assert violations(good(matrix_instructions=0), launch, GFX942) == []


def test_the_gradient_of_the_convolutions_leaves_room_in_lds() -> None:
    """And what it multiplies with is computed once, in a kernel before it."""
    launches = {launch.name: launch for launch in launches_of("qk_conv", GFX942)}
    mixed, products = compile_launch(launches["bfloat16 128 channels, 4096 tokens, backward"], GFX942)
    assert (mixed.kernel, products.kernel) == ("_mixed", "_backward")
    assert products.lds_bytes <= 48 * 1024
    assert products.occupancy >= 3
    assert products.wide_accesses < 60


def test_a_launch_that_needs_too_much_memory_is_refused_as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime.errors import OutOfResources

    from zslurm.kernels.symmetric_product import triton

    monkeypatch.setattr(triton, "configuration", lambda *_: triton.SymmetricConfiguration(128, 64, 8, 4))
    x_KSL = torch.empty(1, 4096, 4096, dtype=torch.bfloat16, device="meta")
    launch = KernelLaunch("four stages", partial(triton.symmetric_product, x_KSL, torch.empty_like(x_KSL)))
    with pytest.raises(OutOfResources, match="shared memory, Required: 98304, Hardware limit: 65536"):
        compile_launch(launch, GFX942)
    assert compile_launch(launch, SM_90)[0].lds_bytes > 65536
