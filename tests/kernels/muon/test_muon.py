"""Muon's passes: every implementation against the reference, and the reference against fp64."""

from __future__ import annotations

import logging
from collections.abc import Callable
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from tests.kernels.bits import CHUNK, SIZES, assert_guarded, assert_same_bits, drawn, with_offset
from zslurm.kernels import muon
from zslurm.kernels.dispatch import using
from zslurm.kernels.hip.tables import capacity
from zslurm.kernels.muon import reference

PRODUCTS = (torch.bfloat16, torch.float32)
SHAPES = [[(1, 1, size)] for size in SIZES] + [
    [(0, 3, 5)],
    [(2, 0, 5), (1, 0, 5)],
    [(3, 64, 129), (1, 64, 129), (5, 64, 129)],
    [(2, CHUNK, 3)],
    [(1, 256 * CHUNK + 3, 1)],  # more chunks than there are lanes to add them up
]


class Run(NamedTuple):
    """What an implementation left behind."""

    momenta: list[Tensor]
    x: Tensor
    norms: Tensor
    masters: list[Tensor]
    weights: list[Tensor]

    def tensors(self) -> list[Tensor]:
        return [*self.momenta, self.x, self.norms, *self.masters, *self.weights]


def run(
    name: str,
    shapes: list[tuple[int, int, int]],
    product: torch.dtype,
    *,
    nesterov: bool = True,
    make: Callable[[tuple[int, int, int], int], Tensor] = lambda shape, seed: drawn(shape, seed),
    device: str = "cpu",
) -> Run:
    momenta, gradients, masters = (
        [make(shape, 10 * kind + index).to(device) for index, shape in enumerate(shapes)] for kind in range(3)
    )
    count, (rows, columns) = sum(shape[0] for shape in shapes), shapes[0][1:]
    x_KMN = torch.full((count, rows, columns), 5.0, dtype=product, device=device)
    weights = [torch.full_like(master, 5.0, dtype=torch.bfloat16) for master in masters]
    before = [gradient.clone() for gradient in gradients]
    with using("muon", name):
        norms_K = muon.momentum(momenta, gradients, x_KMN, mu=0.95, nesterov=nesterov)
        muon.update(masters, x_KMN, decay=0.987, rate=0.0123, weights=weights)
    assert_same_bits(gradients, before)
    return Run(momenta, x_KMN, norms_K, masters, weights)


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("shapes", SHAPES, ids=str)
def test_the_kernels_repeat_the_references_bits(shapes: list[tuple[int, int, int]], product: torch.dtype) -> None:
    for nesterov in (True, False):
        expected = run("reference", shapes, product, nesterov=nesterov)
        found = run("hip", shapes, product, nesterov=nesterov)
        assert_same_bits(found.tensors(), expected.tensors())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("shapes", SHAPES, ids=str)
def test_a_gpu_repeats_the_bits_of_a_cpu(shapes: list[tuple[int, int, int]], product: torch.dtype) -> None:
    expected = run("reference", shapes, product)
    for name in ("hip", "reference"):
        found = run(name, shapes, product, device="cuda")
        assert_same_bits([tensor.cpu() for tensor in found.tensors()], expected.tensors())


def in_pieces(shapes: list[tuple[int, int, int]], seed: int) -> tuple[list[Tensor], Tensor]:
    """Room for the weights of these matrices: rows cut anywhere, shuffled in one tensor from an odd address on."""
    generator = torch.Generator().manual_seed(seed)
    lengths = []
    for count, rows, columns in shapes:
        for _ in range(count):
            cuts = {0, rows * columns, *torch.randint(rows * columns + 1, (5,), generator=generator).tolist()}
            lengths += [stop - start for start, stop in pairwise(sorted(cuts))]
    whole = torch.full((sum(lengths) + 1,), 5.0, dtype=torch.bfloat16)
    order = torch.randperm(len(lengths), generator=generator).tolist()
    starts = dict(zip(order, accumulate([lengths[i] for i in order], initial=1), strict=False))
    return [whole[starts[index] :][:length] for index, length in enumerate(lengths)], whole


@pytest.mark.parametrize("name", ["reference", "torch", "hip"])
@pytest.mark.parametrize(
    "shapes", [[(1, 1, 1)], [(2, 50, 70), (1, 50, 70)], [(60, 5, 9)], [(1, 3, CHUNK)], [(0, 3, 5)]]
)
def test_weights_in_pieces_are_those_in_one(shapes: list[tuple[int, int, int]], name: str) -> None:
    """Masters and weights have the bits of an update with whole weights, and nothing else is written."""
    x_KMN = drawn((sum(shape[0] for shape in shapes), *shapes[0][1:]), 3).bfloat16()
    masters, same = ([drawn(shape, index) for index, shape in enumerate(shapes)] for _ in range(2))
    weights = [torch.empty_like(master, dtype=torch.bfloat16) for master in masters]
    pieces, whole = in_pieces(shapes, len(shapes))
    with using("muon", name):
        muon.update(masters, x_KMN, decay=0.987, rate=0.0123, weights=weights)
        muon.update(same, x_KMN, decay=0.987, rate=0.0123, pieces=pieces)
    assert_same_bits(same, masters)
    assert_same_bits([torch.cat([*pieces, whole[:0]])], [torch.cat([weight.flatten() for weight in weights])])
    assert whole[0] == 5.0


def test_more_matrices_than_a_launch_takes() -> None:
    shapes = [(capacity(3) + 1, 3, 50), (2, 3, 50), (2 * capacity(3), 3, 50)]
    found = run("hip", shapes, torch.bfloat16, make=_normal)
    assert_same_bits(found.tensors(), run("reference", shapes, torch.bfloat16, make=_normal).tensors())


def _normal(shape: tuple[int, int, int], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("offsets", [(1, 0), (0, 3), (2, 4), (4, 8)])
def test_addresses_that_no_wide_access_takes(offsets: tuple[int, int]) -> None:
    """Of masters and momenta that begin anywhere, and next to which nothing is written."""
    shape, (offset, other) = (3, 100, 83), offsets
    expected = run("reference", [shape], torch.bfloat16)
    momentum, around_momentum = with_offset(drawn(shape, 0), offset)
    gradient, _ = with_offset(drawn(shape, 10), other)
    master, around_master = with_offset(drawn(shape, 20), other)
    weight, around_weight = with_offset(torch.zeros(shape, dtype=torch.bfloat16), offset)
    x_KMN, around_x = with_offset(torch.zeros(shape, dtype=torch.bfloat16), other)
    with using("muon", "hip"):
        norms_K = muon.momentum([momentum], [gradient], x_KMN, mu=0.95, nesterov=True)
        muon.update([master], x_KMN, decay=0.987, rate=0.0123, weights=[weight])
    assert_same_bits([momentum, x_KMN, norms_K, master, weight], expected.tensors())
    numel = momentum.numel()
    assert_guarded(around_momentum, offset, numel)
    assert_guarded(around_weight, offset, numel)
    assert_guarded(around_master, other, numel)
    assert_guarded(around_x, other, numel)


def test_matrices_with_others_between_them() -> None:
    """As the gate rows and the up rows of experts: views with gaps, of which the other one is left alone."""

    def gates(shape: tuple[int, int, int], seed: int) -> Tensor:
        both = torch.zeros(shape[0], 2 * shape[1], shape[2])
        both[:, : shape[1]] = drawn(shape, seed)
        return both[:, : shape[1]]

    shapes = [(5, 30, 37)]
    found = run("hip", shapes, torch.bfloat16, make=gates)
    assert_same_bits(found.tensors(), run("reference", shapes, torch.bfloat16, make=gates).tensors())
    for view in (*found.momenta, *found.masters):
        assert view._base is not None
        assert not view._base[:, 30:].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["reference", "torch"])
def test_the_formulas_in_fp64(name: str, dtype: torch.dtype) -> None:
    shape, mu = (2, 50, 70), 0.9
    generator = torch.Generator().manual_seed(0)
    momentum, gradient, master = (torch.randn(shape, generator=generator).to(dtype) for _ in range(3))
    wide = [tensor.double().clone() for tensor in (momentum, gradient, master)]
    exact = mu * wide[0] + (1 - mu) * wide[1]
    ahead = mu * exact + (1 - mu) * wide[1]
    x_KMN = torch.empty(shape, dtype=dtype)
    with using("muon", name):
        norms_K = muon.momentum([momentum], [gradient], x_KMN, mu=mu, nesterov=True)
        muon.update([master], x_KMN, decay=0.9, rate=0.3)
    close = {"rtol": 4 * torch.finfo(dtype).eps, "atol": 4 * torch.finfo(dtype).eps}
    torch.testing.assert_close(momentum.double(), exact, **close)
    torch.testing.assert_close(x_KMN.double(), ahead, **close)
    torch.testing.assert_close(norms_K.double(), ahead.flatten(1).norm(dim=1), **close)
    torch.testing.assert_close(master.double(), 0.9 * wide[2] - 0.3 * ahead, **close)


def test_the_sum_of_squares_is_as_good_as_torchs() -> None:
    x_KMN = torch.randn(3, 700, 900, generator=torch.Generator().manual_seed(3))
    exact = x_KMN.double().flatten(1).norm(dim=1)
    error = (reference.norms(x_KMN).double() - exact).abs() / exact
    assert float(error.max()) < 4 * torch.finfo(torch.float32).eps


def test_a_cpu_takes_torchs_functions_and_they_differ_by_rounding() -> None:
    operands = ([torch.zeros(1, 2, 3)], [torch.zeros(1, 2, 3)], torch.zeros(1, 2, 3))
    assert muon.momentum.choose(*operands, mu=0.95, nesterov=True).name == "torch"
    found = run("torch", [(3, 64, 129)], torch.float32, make=_normal)
    expected = run("reference", [(3, 64, 129)], torch.float32, make=_normal)
    for ours, theirs in zip(found.tensors(), expected.tensors(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-6, atol=2e-6 if ours.dtype == torch.float32 else 1e-2)


def test_formats_that_the_kernels_do_not_have(caplog: pytest.LogCaptureFixture) -> None:
    with using("muon", "hip"), caplog.at_level(logging.WARNING):
        for _ in range(2):
            wide = [torch.ones(1, 2, 3, dtype=torch.float64) for _ in range(3)]
            muon.momentum(wide[:1], wide[1:2], wide[2], mu=0.5, nesterov=False)
            muon.update([torch.ones(1, 2, 3).mT], torch.ones(1, 3, 2), decay=1.0, rate=1.0)
    assert [record.getMessage() for record in caplog.records] == [
        "muon.momentum: hip does not take float64 products; the reference runs instead",
        "muon.update: hip does not take matrices whose elements are not contiguous; the reference runs instead",
    ]


def _operands() -> dict[str, Any]:
    return {
        "momenta": [torch.zeros(2, 3, 4)],
        "gradients": [torch.zeros(2, 3, 4)],
        "x_KMN": torch.zeros(2, 3, 4),
        "mu": 0.95,
        "nesterov": True,
    }


SHARED = torch.zeros(40)
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"mu": 1.0}, "mu is 1.0"),
    ({"x_KMN": torch.zeros(3, 4)}, r"x_KMN has the shape \[3, 4\]"),
    ({"x_KMN": torch.zeros(3, 3, 4)}, r"momenta have the shapes \[\(2, 3, 4\)\], but x_KMN has \(3, 3, 4\)"),
    ({"x_KMN": torch.zeros(2, 4, 3).mT}, "x_KMN must be contiguous"),
    ({"x_KMN": torch.zeros(2, 3, 4, dtype=torch.float16)}, "x_KMN is float16"),
    ({"x_KMN": torch.zeros(2, 3, 4, device="meta")}, r"one device, not .*x_KMN\[0\] on meta"),
    ({"gradients": [torch.zeros(1, 3, 4)] * 2}, "2 gradients were given for 1 momenta"),
    (
        {"gradients": [torch.zeros(2, 4, 3)]},
        r"gradients\[0\] has the shape \[2, 4, 3\], momenta\[0\] has",
    ),
    ({"gradients": [torch.zeros(2, 3, 4).double()]}, r"gradients\[0\] is float64"),
    ({"momenta": [torch.zeros(1, 3, 4).expand(2, 3, 4)]}, r"momenta\[0\] is expanded"),
    (
        {"momenta": [SHARED[:24].view(2, 3, 4)], "gradients": [SHARED[16:40].view(2, 3, 4)]},
        r"gradients\[0\] shares memory with momenta\[0\]",
    ),
]


@pytest.mark.parametrize(("wrong", "message"), WRONG, ids=[message for _, message in WRONG])
@pytest.mark.parametrize("name", ["reference", "torch", "hip"])
def test_wrong_operands(name: str, wrong: dict[str, Any], message: str) -> None:
    with using("muon", name), pytest.raises(ValueError, match=f"^muon.momentum: .*{message}"):
        muon.momentum(**_operands() | wrong)


def test_wrong_operands_of_the_update() -> None:
    master, x_KMN = torch.zeros(2, 3, 4), torch.zeros(2, 3, 4)
    for weights, message in (
        ([master], "shares memory with"),
        ([torch.zeros(2, 3, 5)], r"weights\[0\] has the shape \[2, 3, 5\]"),
        ([], "0 weights were given for 1 masters"),
        ([torch.zeros(2, 3, 4, device="meta")], "one device"),
    ):
        with pytest.raises(ValueError, match=f"^muon.update: .*{message}"):
            muon.update([master], x_KMN, decay=1.0, rate=1.0, weights=weights)
    for pieces, message in (
        ([torch.zeros(23)], "the pieces have 23 elements, but x_KMN has 24"),
        ([torch.zeros(11), torch.zeros(13)], r"pieces\[1\] has elements of two matrices"),
        ([torch.zeros(2, 12)], r"pieces\[0\] must be a contiguous row of elements, not \[2, 12\]"),
        ([torch.zeros(48)[::2]], r"pieces\[0\] must be a contiguous row"),
        ([master.view(-1)[:12], torch.zeros(12)], "shares memory with"),
    ):
        with pytest.raises(ValueError, match=f"^muon.update: .*{message}"):
            muon.update([master], x_KMN, decay=1.0, rate=1.0, pieces=pieces)
    with pytest.raises(ValueError, match=r"^muon.update: weights and pieces were given"):
        muon.update([master], x_KMN, decay=1.0, rate=1.0, weights=[master.clone()], pieces=[torch.zeros(12)] * 2)
