"""A layer's forward and backward never ask the device for a value: not on a GPU, and not by their code."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.train.models import ROPE_BASE, tiny_config
from zslurm.kernels.arch import SM_90, meta_tensors_on
from zslurm.kernels.dispatch import using
from zslurm.train.model.block import Layer, Stream
from zslurm.train.model.packing import pack
from zslurm.train.model.zaya import build

_ASKING = {"_local_scalar_dense", "nonzero", "nonzero_static", "masked_select", "_unique2", "unique_dim", "equal"}
_INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_"}
_MASKS = (torch.bool, torch.uint8)
_METHODS = ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__")


class HostWaitError(AssertionError):
    """Something asked for a value."""


class _NoValues(TorchDispatchMode):
    """Refuses operators that read values, or whose results have sizes that depend on them."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in _ASKING:
            raise HostWaitError(f"{func} reads values")
        if name in _INDEXING and any(each is not None and each.dtype in _MASKS for each in args[1]):
            raise HostWaitError(f"{func} is indexed by a mask")
        if name == "_to_copy" and (kwargs or {}).get("device") == torch.device("cpu") != args[0].device:
            raise HostWaitError(f"{func} copies to the host")
        return func(*args, **(kwargs or {}))


@contextmanager
def no_values(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Refuse both operators and the methods that reach no operator on a CPU, as tolist."""

    def refuse(name: str) -> Callable[..., Any]:
        def refused(*_: Any, **__: Any) -> Any:
            raise HostWaitError(f"Tensor.{name} reads values")

        return refused

    with monkeypatch.context() as patch, _NoValues():
        for name in _METHODS:
            patch.setattr(Tensor, name, refuse(name))
        yield


def layer_and_inputs(device: str, dtype: torch.dtype, **changes: Any) -> tuple[Layer, Callable[[], Tensor]]:
    """A layer that is not the first, and its forward and backward."""
    sizes = {"hidden_size": 32, "expert_hidden_size": 32, "router_hidden_size": 16, "head_dim": 16}
    config = tiny_config(**(sizes | changes))
    build_on = "cpu" if device == "meta" else device
    layer = build(config, 0, dtype=dtype, device=build_on).layers[1].to(device)
    assert isinstance(layer, Layer)
    positions = torch.arange(8, device=device)
    packing = pack(positions, rotary_dim=config.rotary_dim, rope_base=ROPE_BASE, reach=2, dtype=torch.float32)
    hidden = torch.randn(2, 8, config.hidden_size, device=device).to(dtype).requires_grad_()
    residual = torch.randn(2, 8, config.hidden_size, device=device).requires_grad_()
    bias = torch.zeros(config.router_classes, device=device)

    def run() -> Tensor:
        router = None
        if config.router == "mlp":
            router = torch.zeros(16, config.router_hidden_size, device=device, dtype=dtype)
        stream, counts = layer(Stream(hidden, residual, router), packing, bias)
        (stream.hidden_BSD.float().sum() + stream.residual_BSD.sum()).backward()
        assert isinstance(counts, Tensor)
        return counts

    return layer, run


FORMS = pytest.mark.parametrize("form", ["reference", "cpu"])
KINDS = pytest.mark.parametrize(
    "changes",
    [{}, {"skip_rule": "zero", "experts_per_token": 2}, {"router": "linear"}],
    ids=["one choice", "two choices", "linear router"],
)


@FORMS
@KINDS
def test_no_operator_of_a_layer_reads_a_value(
    form: str, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, run = layer_and_inputs("cpu", torch.float32, **changes)
    with using("experts.network", form), using("grouped_gemm", "torch"), no_values(monkeypatch):
        counts = run()
    assert counts.sum() == 16 * changes.get("experts_per_token", 1)
    assert all(parameter.grad is not None for parameter in layer.experts.parameters())


@FORMS
@KINDS
def test_without_values_a_layer_still_runs(form: str, changes: dict[str, Any]) -> None:
    _, run = layer_and_inputs("meta", torch.bfloat16, **changes)
    with using("experts.network", form), using("grouped_gemm", "torch"), meta_tensors_on(SM_90):
        assert run().is_meta


@pytest.mark.parametrize(
    "ask",
    [
        lambda x: x.sum().item(),
        lambda x: x.tolist(),
        lambda x: x[x > 0],
        lambda x: (x > 0).nonzero(),
        lambda x: bool(x.any()),
        lambda x: x.masked_select(x > 0),
    ],
    ids=["item", "tolist", "mask", "nonzero", "bool", "masked_select"],
)
def test_what_asks_for_values_is_found(ask: Callable[[Tensor], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(HostWaitError), no_values(monkeypatch):
        ask(torch.ones(3))


def test_the_loop_over_experts_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    _, run = layer_and_inputs("cpu", torch.float32)
    with (
        pytest.raises(HostWaitError, match="tolist"),
        using("grouped_gemm", "reference"),
        no_values(monkeypatch),
    ):
        run()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@KINDS
def test_a_layer_on_a_gpu_waits_for_nothing(changes: dict[str, Any]) -> None:
    _, run = layer_and_inputs("cuda", torch.bfloat16, **changes)
    run()  # compiles, and allocates
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as waits:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            run()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert [str(wait.message) for wait in waits if "synchroniz" in str(wait.message)] == []
