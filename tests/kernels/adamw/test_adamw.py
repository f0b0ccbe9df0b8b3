"""AdamW's step: every implementation against the reference, and all against torch's optimizer in fp64."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.bits import SIZES, assert_guarded, assert_same_bits, drawn, with_offset
from zslurm.kernels import adamw
from zslurm.kernels.adamw import Operands
from zslurm.kernels.dispatch import using
from zslurm.kernels.hip.tables import capacity

SETTINGS: dict[str, Any] = {"lr": 3e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
LISTS = ("masters", "gradients", "exp_avgs", "exp_avg_sqs")
SHAPES: dict[str, list[tuple[int, ...]]] = {
    "many sizes": [(size,) for size in SIZES],
    "nothing": [(0,)],
    "any shape": [(), (3, 4, 5)],
    "more than a launch takes": [(index % 7,) for index in range(2 * capacity(5) + 3)],
}


def operands(
    shapes: list[tuple[int, ...]], *, device: str = "cpu", weights: bool = True, odd: bool = True
) -> Operands:
    """Drawn tensors; second moments are not negative, as they are squares."""
    lists = [
        [_drawn(shape, 7 * kind + index, odd).to(device) for index, shape in enumerate(shapes)]
        for kind in range(4)
    ]
    lists[3] = [tensor.abs() for tensor in lists[3]]
    out = [torch.full_like(master, 5.0, dtype=torch.bfloat16) for master in lists[0]]
    return Operands(lists[0], lists[1], lists[2], lists[3], out if weights else None)


def _drawn(shape: tuple[int, ...], seed: int, odd: bool) -> Tensor:
    if odd:
        return drawn(shape, seed)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def tensors(of: Operands) -> list[Tensor]:
    return [tensor for name in (*LISTS, "weights") for tensor in getattr(of, name) or ()]


def stepped(name: str, of: Operands, steps: int = 2) -> list[Tensor]:
    with using("adamw", name):
        for step in range(1, steps + 1):
            adamw.update(of, **SETTINGS, step=step)
    return [tensor.cpu() for tensor in tensors(of)]


@pytest.mark.parametrize("weights", [True, False])
@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_the_kernel_repeats_the_references_bits(shapes: list[tuple[int, ...]], weights: bool) -> None:
    expected = stepped("reference", operands(shapes, weights=weights))
    assert_same_bits(stepped("hip", operands(shapes, weights=weights)), expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_a_gpu_repeats_the_bits_of_a_cpu(shapes: list[tuple[int, ...]]) -> None:
    expected = stepped("reference", operands(shapes))
    for name in ("hip", "reference"):
        assert_same_bits(stepped(name, operands(shapes, device="cuda")), expected)


@pytest.mark.parametrize("offset", [1, 2, 3, 4])
def test_addresses_that_no_wide_access_takes(offset: int) -> None:
    numel = 10_007
    plain = operands([(numel,)])
    offsets = [0 if name == "gradients" else offset for name in (*LISTS, "weights")]
    shifted = [with_offset(tensor, by) for tensor, by in zip(tensors(plain), offsets, strict=True)]
    views = [[view] for view, _ in shifted]
    moved = Operands(views[0], views[1], views[2], views[3], views[4])
    assert_same_bits(stepped("hip", moved), stepped("reference", plain))
    for by, (_, buffer) in zip(offsets, shifted, strict=True):
        assert_guarded(buffer, by, numel)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("reference", torch.float64), ("reference", torch.float32), ("torch", torch.float32), ("hip", torch.float32)],
)
def test_it_is_torchs_optimizer_up_to_rounding(name: str, dtype: torch.dtype) -> None:
    drawn_ones = operands([(70,), (11, 13)], odd=False)
    lists = [[each.to(dtype) for each in getattr(drawn_ones, key)] for key in LISTS]
    for moment in (*lists[2], *lists[3]):
        moment.zero_()
    ours = Operands(lists[0], lists[1], lists[2], lists[3])
    parameters = [torch.nn.Parameter(master.double().clone()) for master in ours.masters]
    theirs = torch.optim.AdamW(parameters, **SETTINGS, foreach=False)
    for parameter, gradient in zip(parameters, ours.gradients, strict=True):
        parameter.grad = gradient.double()
    stepped(name, ours, steps=3)
    for _ in range(3):
        theirs.step()
    eps = torch.finfo(dtype).eps
    for parameter, *found in zip(parameters, ours.masters, ours.exp_avgs, ours.exp_avg_sqs, strict=True):
        state = theirs.state[parameter]
        expected = (parameter.detach(), state["exp_avg"], state["exp_avg_sq"])
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one.double(), other, rtol=20 * eps, atol=20 * eps)


def test_a_cpu_takes_torchs_function() -> None:
    assert adamw.update.choose(operands([(3,)]), **SETTINGS, step=1).name == "torch"


def test_formats_that_the_kernel_does_not_have(caplog: pytest.LogCaptureFixture) -> None:
    ones = [[torch.ones(3, dtype=torch.float64)] for _ in LISTS]
    wide = Operands(ones[0], ones[1], ones[2], ones[3])
    with using("adamw", "hip"), caplog.at_level(logging.WARNING):
        adamw.update(wide, **SETTINGS, step=1)
        adamw.update(wide, **SETTINGS, step=2)
    messages = [record.getMessage() for record in caplog.records]
    assert messages == ["adamw: hip does not take float64 masters; the reference runs instead"]


def put_together(**changed: Any) -> Operands:
    lists: dict[str, Any] = {name: [torch.zeros(4), torch.zeros(2, 3)] for name in LISTS}
    return Operands(**lists | changed)


BUFFER = torch.zeros(10)
PARTS = [BUFFER[:4], BUFFER[4:].view(2, 3)]
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"masters": []}, "there are no masters"),
    ({"exp_avgs": [torch.zeros(4)]}, "1 exp_avgs were given for 2 masters"),
    ({"gradients": [torch.zeros(4), torch.zeros(3, 2)]}, r"gradients\[1\] has the shape \[3, 2\], masters\[1\]"),
    ({"gradients": [torch.zeros(4).bfloat16(), torch.zeros(2, 3)]}, r"gradients\[0\] is bfloat16"),
    ({"gradients": [torch.zeros(4), torch.zeros(2, 3, device="meta")]}, r"gradients\[1\] on meta"),
    ({"masters": PARTS, "exp_avgs": [torch.zeros(4), BUFFER[3:9].view(2, 3)]}, "shares memory with"),
    ({"masters": PARTS, "gradients": PARTS}, "shares memory with"),
    ({"weights": [torch.zeros(1).expand(4), torch.zeros(2, 3)]}, r"weights\[0\] is expanded"),
]


@pytest.mark.parametrize(("changed", "message"), WRONG, ids=[message for _, message in WRONG])
def test_wrong_operands(changed: dict[str, Any], message: str) -> None:
    put_together(masters=PARTS)
    with pytest.raises(ValueError, match=f"^adamw: .*{message}"):
        put_together(**changed)


def test_wrong_settings() -> None:
    for settings, message in (({"step": 0}, "step is 0"), ({"step": 1, "betas": (0.9, 1.0)}, "betas are")):
        with pytest.raises(ValueError, match=f"^adamw: {message}"):
            adamw.update(operands([(3,)]), **SETTINGS | settings)
