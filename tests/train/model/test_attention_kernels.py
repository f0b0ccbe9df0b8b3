"""Whatever attention runs on, the model computes the same; and packages are called as their source defines.

Every test here runs with torch's ways, with stand-ins for flash-attn and AITER on this CPU, and with the packages
themselves if they and a GPU are. A stand-in has the signature of the real function, checks what the real one
asks for, records the call, and computes by torch.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.train.model.test_host_waits import HostWaitError, no_values
from tests.train.models import ROPE_BASE, autograd_nodes, random_like, scrambled, tiny_config, tokens
from tests.train.ranks import train_on
from tests.train.runs import MODEL, VOCAB, make_corpus, make_run
from zslurm.kernels.arch import GFX942, SM_90, Arch
from zslurm.train import assembly
from zslurm.train.config import DataConfig, TrainConfig, load_train_config
from zslurm.train.data.build.bundle_writer import BundleWriter
from zslurm.train.data.bundle import BundleHeader
from zslurm.train.errors import ConfigError
from zslurm.train.model import packing
from zslurm.train.model.attention_backends.automatic import aiter_of_auto
from zslurm.train.model.attention_backends.documents import documents_by_torch, failure_of
from zslurm.train.model.attention_backends.packages import FlashAttention, Kernels, choose_kernels, load
from zslurm.train.model.attention_backends.sdpa import attend, attend_by_sdpa
from zslurm.train.model.packing import document_bounds, documents_of, pack
from zslurm.train.model.zaya import Zaya
from zslurm.train.parallel.world import open_world
from zslurm.train.setup import open_trainer
from zslurm.train.stop import StopRequest

PACKAGES = ("flash_attn", "aiter")
DOCUMENTS = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1, 1], [0, 1, 1, 2, 2, 2, 2, 2, 2]])


@dataclass
class Call:
    """What a stand-in was called with."""

    name: str
    shapes: tuple[tuple[int, ...], ...]
    options: dict[str, Any] = field(default_factory=dict)


def attended(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """[B, S, H, P] by torch, query heads and key heads as in the packages."""
    y = F.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), is_causal=True, scale=scale, enable_gqa=True
    )
    return y.transpose(1, 2)


def by_documents(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, longest: int, scale: float) -> Tensor:
    assert bounds.dtype == torch.int32
    assert bounds.is_contiguous()
    ends = bounds.tolist()
    assert ends[0] == 0
    assert ends[-1] == len(q)
    lengths = [end - start for start, end in pairwise(ends)]
    assert all(0 < length <= longest for length in lengths)
    parts = zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True)
    return torch.cat([attended(*(x.unsqueeze(0) for x in part), scale)[0] for part in parts])


def check_layout(q: Tensor, k: Tensor, v: Tensor) -> None:
    assert k.shape == v.shape
    assert q.shape[:-2] == k.shape[:-2], "tokens first"
    assert q.shape[-2] % k.shape[-2] == 0, "heads last but one"
    assert q.dtype == k.dtype == v.dtype
    assert all(x.stride(-1) == 1 for x in (q, k, v))


def fake_flash_attn(calls: list[Call]) -> ModuleType:
    """Signatures of flash-attn 2.7 (flash_attn/flash_attn_interface.py)."""

    def flash_attn_func(
        q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None,
        causal: bool = False, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
        alibi_slopes: Tensor | None = None, deterministic: bool = False, return_attn_probs: bool = False,
    ) -> Tensor:  # fmt: skip
        check_layout(q, k, v)
        assert causal
        assert softmax_scale is not None
        calls.append(Call("whole", (tuple(q.shape), tuple(k.shape)), {"deterministic": deterministic}))
        return attended(q, k, v, softmax_scale)

    def flash_attn_varlen_func(
        q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
        max_seqlen_k: int, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
        window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
        deterministic: bool = False, return_attn_probs: bool = False, block_table: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        check_layout(q, k, v)
        assert causal
        assert softmax_scale is not None
        assert torch.equal(cu_seqlens_q, cu_seqlens_k)
        assert max_seqlen_q == max_seqlen_k
        options = {"deterministic": deterministic, "bounds": cu_seqlens_q.tolist()}
        calls.append(Call("varlen", (tuple(q.shape), tuple(k.shape)), options))
        return by_documents(q, k, v, cu_seqlens_q, max_seqlen_q, softmax_scale)

    return module("flash_attn", flash_attn_func, flash_attn_varlen_func)


def fake_aiter(calls: list[Call]) -> ModuleType:
    """Signatures of AITER (aiter/ops/mha.py): more arguments, another order, no backward without return_lse."""

    def result(y: Tensor, q: Tensor, return_lse: bool) -> Tensor | tuple[Tensor, Tensor]:
        assert return_lse or not (torch.is_grad_enabled() and q.requires_grad), "AITER asserts it"
        return (y, y.new_zeros(1)) if return_lse else y

    def flash_attn_func(
        q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None,
        causal: bool = False, window_size: tuple[int, int, int] = (-1, -1, 0), bias: Tensor | None = None,
        alibi_slopes: Tensor | None = None, deterministic: bool = True, return_lse: bool = False,
        return_attn_probs: bool = False, how_v3_bf16_cvt: int = 1, cu_seqlens_q: Tensor | None = None,
        cu_seqlens_kv: Tensor | None = None, sink_ptr: Tensor | None = None, num_splits: int = 0,
    ) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
        check_layout(q, k, v)
        assert causal
        assert softmax_scale is not None
        calls.append(Call("whole", (tuple(q.shape), tuple(k.shape)), {"deterministic": deterministic}))
        return result(attended(q, k, v, softmax_scale), q, return_lse)

    def flash_attn_varlen_func(
        q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
        max_seqlen_k: int, min_seqlen_q: int = 0, dropout_p: float = 0.0, softmax_scale: float | None = None,
        logits_soft_cap: float = 0.0, causal: bool = False, window_size: tuple[int, int, int] = (-1, -1, 0),
        bias: Tensor | None = None, alibi_slopes: Tensor | None = None, deterministic: bool = False,
        return_lse: bool = False, return_attn_probs: bool = False, how_v3_bf16_cvt: int = 1,
        block_table: Tensor | None = None, out: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
        check_layout(q, k, v)
        assert causal
        assert softmax_scale is not None
        assert torch.equal(cu_seqlens_q, cu_seqlens_k)
        assert min_seqlen_q == 0
        options = {"deterministic": deterministic, "bounds": cu_seqlens_q.tolist()}
        calls.append(Call("varlen", (tuple(q.shape), tuple(k.shape)), options))
        return result(by_documents(q, k, v, cu_seqlens_q, max_seqlen_q, softmax_scale), q, return_lse)

    return module("aiter", flash_attn_func, flash_attn_varlen_func)


def module(name: str, whole: Any, varlen: Any) -> ModuleType:
    made = ModuleType(name)
    made.flash_attn_func, made.flash_attn_varlen_func = whole, varlen  # type: ignore[attr-defined]
    return made


FAKES = {"flash_attn": fake_flash_attn, "aiter": fake_aiter}


def fake_varlen(release: str, calls: list[Call]) -> Any:
    """Signatures of torch.nn.attention.varlen.varlen_attn of three releases of torch."""

    def attended_by(
        q: Tensor, k: Tensor, v: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int, gqa: bool
    ) -> Tensor:
        check_layout(q, k, v)
        assert gqa or q.shape == k.shape, "without enable_gqa"
        assert torch.equal(cu_seq_q, cu_seq_k)
        assert max_q == max_k
        calls.append(Call("varlen", (tuple(q.shape), tuple(k.shape)), {"bounds": cu_seq_q.tolist()}))
        return by_documents(q, k, v, cu_seq_q, max_q, q.shape[-1] ** -0.5)

    def of_2_10(
        query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int,
        is_causal: bool = False, return_aux: Any = None,
    ) -> Tensor:  # fmt: skip
        assert is_causal
        return attended_by(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, False)

    def of_2_11(
        query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int, *,
        return_aux: Any = None, scale: float | None = None, window_size: tuple[int, int] = (-1, -1),
    ) -> Tensor:  # fmt: skip
        assert window_size == (-1, 0)
        assert scale == pytest.approx(query.shape[-1] ** -0.5)
        return attended_by(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, False)

    def of_2_12(
        query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int, *,
        return_aux: Any = None, scale: float | None = None, window_size: tuple[int, int] = (-1, -1),
        enable_gqa: bool = False, seqused_k: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        assert window_size == (-1, 0)
        return attended_by(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, enable_gqa)

    return {"2.10": of_2_10, "2.11": of_2_11, "2.12": of_2_12}[release]


def pretend(package: str, monkeypatch: pytest.MonkeyPatch) -> tuple[FlashAttention, list[Call]]:
    """A stand-in for the package, found as the package would be."""
    calls: list[Call] = []
    if package.startswith("torch "):
        import torch.nn.attention.varlen as varlen

        monkeypatch.setattr(varlen, "varlen_attn", fake_varlen(package.removeprefix("torch "), calls))
        kernels = documents_by_torch()
        assert kernels is not None
        return kernels, calls
    monkeypatch.setitem(sys.modules, package, FAKES[package](calls))
    return load(package), calls


@dataclass(frozen=True)
class Way:
    """One way to run attention: the kernels, where, and how exactly."""

    kernels: Kernels
    device: str
    dtype: torch.dtype
    tolerance: float


STAND_INS = [f"{name} stand-in" for name in (*PACKAGES, "torch 2.10", "torch 2.11", "torch 2.12")]
SEEN_BY_THE_COMPILER = [f"{name} stand-in" for name in (*PACKAGES, "torch 2.12")]
"""A graph ends where a package is called: the compiler sees nothing of what differs between releases of torch."""


@pytest.fixture(
    params=["auto", "sdpa", *STAND_INS, *(pytest.param(name, marks=pytest.mark.gpu) for name in PACKAGES)]
)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Way:
    """Every way that this machine has."""
    name = str(request.param)
    if name == "auto" or name == "sdpa":
        return Way(name, "cpu", torch.float64, 1e-9)
    if name.endswith(" stand-in"):
        return Way(pretend(name.removesuffix(" stand-in"), monkeypatch)[0], "cpu", torch.float64, 1e-9)
    if not torch.cuda.is_available():
        pytest.skip(f"{name} needs a GPU")
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    return Way(load(name), "cuda", torch.bfloat16, 0.02)


def inputs_of(way: Way, length: int) -> tuple[Tensor, Tensor, Tensor]:
    head_dim = 64 if way.device == "cuda" else 8
    noise = (random_like(torch.empty(2, heads, length, head_dim), f"{n}") for n, heads in enumerate((6, 2, 2)))
    q, k, v = (x.to(way.device, way.dtype).requires_grad_() for x in noise)
    return q, k, v


def exact(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Output and gradients in fp64 on the CPU, of the sum of the output times noise."""
    leaves = [x.detach().double().cpu().requires_grad_() for x in (q, k, v)]
    y = F.scaled_dot_product_attention(*leaves, attn_mask=mask, is_causal=mask is None, enable_gqa=True)
    y = y.transpose(1, 2).flatten(2)
    return y.detach(), torch.autograd.grad(y, leaves, random_like(y, "direction"))


def close(one: Tensor, other: Tensor, tolerance: float) -> bool:
    one, other = one.detach().double().cpu(), other.detach().double().cpu()
    return bool((one - other).norm() <= tolerance * other.norm())


def attend_in(way: Way, q: Tensor, k: Tensor, v: Tensor, bounds: Tensor | None, mask: Tensor | None) -> Tensor:
    if isinstance(way.kernels, FlashAttention):
        return way.kernels(q, k, v, bounds)
    return (attend if way.kernels == "auto" else attend_by_sdpa)(q, k, v, mask)


@pytest.mark.parametrize("documents", [False, True], ids=["whole", "documents"])
def test_attention_and_its_gradients_are_those_of_fp64(way: Way, documents: bool) -> None:
    bounds = mask = None
    if documents:
        common: dict[str, Any] = {"rotary_dim": 4, "rope_base": 100.0, "reach": 1, "dtype": torch.float64}
        by_bounds = pack(torch.arange(9), **common, document_BS=DOCUMENTS, by_bounds=True)
        assert by_bounds.bounds_N is not None
        assert by_bounds.attend_B1SS is None, "no mask of the sequence length squared"
        bounds = by_bounds.bounds_N.to(way.device)
        mask = pack(torch.arange(9), **common, document_BS=DOCUMENTS).attend_B1SS
    q, k, v = inputs_of(way, 9 if documents else 150)
    y = attend_in(way, q, k, v, bounds, mask)
    expected, gradients = exact(q, k, v, mask)
    assert y.shape == expected.shape
    assert close(y, expected, way.tolerance)
    direction = random_like(expected, "direction").to(way.device, way.dtype)
    for one, other in zip(torch.autograd.grad(y, [q, k, v], direction), gradients, strict=True):
        assert close(one, other, way.tolerance)


INPUTS: dict[str, dict[str, Tensor]] = {
    "whole": {},
    "documents": {"document_BS": DOCUMENTS},
    "padded": {"valid_BS": torch.arange(9).expand(2, 9) < torch.tensor([[9], [6]])},
    "padded documents": {
        "document_BS": DOCUMENTS,
        "valid_BS": torch.arange(9).expand(2, 9) < torch.tensor([[9], [6]]),
    },
}


def step(model: Zaya, device: str, **inputs: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Loss and gradients."""
    tokens_BS = tokens(model.config).to(device)
    model.zero_grad()
    loss, _ = model(tokens_BS, tokens_BS, rope_base=ROPE_BASE, **{k: v.to(device) for k, v in inputs.items()})
    loss.backward()
    return loss.detach(), [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def model_for(way: Way, **changes: Any) -> Zaya:
    """A model in which rounding cannot change the routing, which would hide everything else."""
    config = tiny_config(head_dim=64 if way.device == "cuda" else 8, **changes)
    model = scrambled(config, way.dtype)
    model.balancing_bias[:] = torch.tensor([0.0, 5.0, 0.0, 0.0])
    return model.to(way.device)


@pytest.mark.parametrize("inputs", INPUTS.values(), ids=INPUTS.keys())
def test_the_model_computes_the_same(way: Way, inputs: dict[str, Tensor]) -> None:
    model = model_for(way)
    expected, gradients = step(model, way.device, **inputs)
    model.run_with(attention=way.kernels)
    loss, others = step(model, way.device, **inputs)
    assert close(loss, expected, way.tolerance)
    for one, other in zip(others, gradients, strict=True):
        assert close(one, other, 2 * way.tolerance)


@pytest.mark.parametrize("way", [*SEEN_BY_THE_COMPILER, *PACKAGES], indirect=True)
def test_a_compiled_model_computes_the_same_with_a_package(way: Way) -> None:
    torch.compiler.reset()
    model = model_for(way, layers=1)
    expected, gradients = step(model, way.device)
    model.run_with(attention=way.kernels, compile=True, backend="aot_eager")
    loss, others = step(model, way.device)
    assert close(loss, expected, way.tolerance)
    for one, other in zip(others, gradients, strict=True):
        assert close(one, other, max(1e-6, 2 * way.tolerance))


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_is_called_as_its_source_says(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels, calls = pretend(package, monkeypatch)
    model = scrambled(tiny_config(layers=1))
    model.run_with(attention=kernels)
    step(model, "cpu")
    assert calls == [Call("whole", ((2, 9, 4, 8), (2, 9, 2, 8)), {"deterministic": False})]
    calls.clear()
    step(model, "cpu", document_BS=DOCUMENTS)
    options = {"deterministic": False, "bounds": [0, 4, 9, 10, 12, 18]}
    assert calls == [Call("varlen", ((18, 4, 8), (18, 2, 8)), options)]
    calls.clear()
    step(model, "cpu", **INPUTS["padded"])
    assert calls == [], "padding is torch's"


def test_with_bounds_from_the_host_nothing_is_asked_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    common: dict[str, Any] = {"rotary_dim": 4, "rope_base": 100.0, "reach": 1, "dtype": torch.float32}
    kernels = FlashAttention("flash_attn", *[lambda *qkv, **_: qkv[0]] * 2)
    q, k, v = (torch.randn(2, heads, 9, 8) for heads in (6, 2, 2))
    bounds_N = torch.tensor([0, 4, 9, 10, 12, 18], dtype=torch.int32)
    positions_S = torch.arange(9)
    with no_values(monkeypatch):
        given = pack(positions_S, **common, document_BS=DOCUMENTS, bounds_N=bounds_N, by_bounds=True)
        assert kernels(q, k, v, given.bounds_N).shape == (2, 9, 48)
    assert given.bounds_N is bounds_N
    found = pack(positions_S, **common, document_BS=DOCUMENTS, by_bounds=True)
    assert found.bounds_N is not None
    assert torch.equal(found.bounds_N, bounds_N)
    with no_values(monkeypatch), pytest.raises(HostWaitError):
        pack(positions_S, **common, document_BS=DOCUMENTS, by_bounds=True)


@pytest.mark.parametrize("tokens_BS", [[[5, 1, 6, 7, 1, 1, 8]], [[1, 5, 5, 5, 5, 5, 1], [5] * 7], [[1], [1]]])
def test_bounds_on_the_host_are_those_of_the_documents_numbers(tokens_BS: list[list[int]]) -> None:
    """An end token is the last of its document, also at an end of a row, and rows are documents of their own."""
    read = np.array(tokens_BS, np.uint16)
    common: dict[str, Any] = {"rotary_dim": 4, "rope_base": 100.0, "reach": 1, "dtype": torch.float32}
    numbers = documents_of(torch.from_numpy(read.astype(np.int64)), 1)
    expected = pack(torch.arange(read.shape[1]), **common, document_BS=numbers, by_bounds=True).bounds_N
    found = document_bounds(read, 1)
    assert expected is not None
    assert (found.dtype, found.tolist()) == (torch.int32, expected.tolist())


def test_training_and_evaluation_give_the_kernels_bounds_from_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels, calls = pretend("flash_attn", monkeypatch)
    monkeypatch.setattr(assembly, "choose_kernels", lambda *_, **__: kernels)

    def waits(*_: Any) -> None:
        raise AssertionError("the number of documents is asked of the device")

    monkeypatch.setattr(packing, "bounds_of_segments", waits)
    corpus = tmp_path / "corpus.h5"
    header = BundleHeader(vocab_size=VOCAB, tokenizer_sha256="a" * 64, end_token=1, source="tests")
    with BundleWriter(corpus, header) as writer:
        for length in range(4, 64):
            writer.append(np.array([*range(2, 2 + length % 9), 1], dtype=np.uint32))
    run = make_run(
        tmp_path / "run",
        corpus,
        steps=2,
        data={"path": str(corpus), "isolate_documents": True},
        evaluation={"data": str(corpus), "every_steps": 1, "sequences": 2},
        parallel={"device": "cpu", "dtype": "fp32"},
    )
    config = load_train_config(run / "config.json")
    with open_world(config.parallel) as world:
        open_trainer(run, config, world, StopRequest()).run()
    assert {call.name for call in calls} == {"varlen"}
    assert all(len(call.options["bounds"]) > 2 for call in calls), "each sequence has several documents"


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_is_as_deterministic_as_torch_is_asked_to_be(
    package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels, calls = pretend(package, monkeypatch)
    q, k, v = (torch.randn(1, heads, 4, 8) for heads in (2, 1, 1))
    torch.use_deterministic_algorithms(True)
    try:
        kernels(q, k, v)
    finally:
        torch.use_deterministic_algorithms(False)
    assert calls[0].options["deterministic"] is True


def test_sdpa_is_torchs_own_also_where_auto_is_not() -> None:
    q, k, v = (random_like(torch.empty(1, 2, 5, 8), name).requires_grad_() for name in "qkv")
    assert "_CausalBlocksBackward" in autograd_nodes(attend(q, k, v, None))
    assert "_CausalBlocksBackward" not in autograd_nodes(attend_by_sdpa(q, k, v, None))
    model = scrambled(tiny_config())
    model.run_with(attention="sdpa")
    assert all(layer.attention.kernels == "sdpa" for layer in model.layers)


GPU = torch.device("cuda")


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"device": torch.device("cpu")}, "parallel.attention: {} needs a GPU, and this run is on a CPU"),
        ({"dtype": torch.float32}, "parallel.attention: {} knows 16-bit formats only; set parallel.dtype: bf16"),
        ({"head_dim": 320}, "parallel.attention: {} knows heads of up to 256 channels, model.head_dim is 320"),
        ({}, "parallel.attention: {}: the package is not installed"),
    ],
    ids=["cpu", "fp32", "head_dim", "not installed"],
)
def test_kernels_that_cannot_run_are_refused_in_one_line(
    package: Any, changes: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)  # as if it were not there
    wanted = {"device": GPU, "dtype": torch.bfloat16, "head_dim": 128} | changes
    with pytest.raises(ConfigError) as caught:
        choose_kernels(package, **wanted)
    assert str(caught.value).startswith(message.format(package))
    assert "\n" not in str(caught.value)
    assert "auto" in str(caught.value) or "head_dim" in str(caught.value)


def automatic(monkeypatch: pytest.MonkeyPatch, arch: Arch = GFX942, **parallel: Any) -> tuple[Any, str | None]:
    """What `auto` makes of the package on a device that passes for a GPU."""
    monkeypatch.setattr("zslurm.train.model.attention_backends.automatic.arch_of", lambda device: arch)
    choose = "zslurm.train.model.attention_backends.automatic.choose_kernels"
    monkeypatch.setattr(choose, lambda package, **_: load(package))
    phase = {"tokens": 64, "context": 16, "global_batch": 1, "micro_batch": 1, "lr": 1e-3}
    config = TrainConfig.model_validate({"model": MODEL, "phases": [phase], "parallel": parallel})
    return aiter_of_auto(config, torch.device("cpu"), torch.bfloat16)


def present(package: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    package.__spec__ = importlib.util.spec_from_loader(package.__name__, None)
    monkeypatch.setitem(sys.modules, package.__name__, package)


def test_auto_takes_an_installed_aiter_on_gfx942_after_a_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Call] = []
    present(fake_aiter(calls), monkeypatch)
    kernels, reason = automatic(monkeypatch)
    assert reason is None
    assert kernels.package == "aiter"
    assert [call.name for call in calls] == ["whole", "varlen"], "a sequence, and two small documents"
    assert automatic(monkeypatch, SM_90) == (None, None)


@pytest.mark.parametrize(
    ("parallel", "reason"),
    [({"deterministic": True}, "rules out its fast backward"), ({"compile": True}, "would cut graphs")],
)
def test_auto_keeps_torchs_kernels_if_aiters_would_be_slower(
    parallel: dict[str, bool], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    present(fake_aiter([]), monkeypatch)
    kernels, why = automatic(monkeypatch, **parallel)
    assert kernels is None
    assert reason in str(why)


def test_auto_does_not_take_an_aiter_that_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    package = fake_aiter([])
    present(package, monkeypatch)
    good = package.flash_attn_varlen_func

    def other(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, causal: bool) -> None:
        raise AssertionError("is called")

    monkeypatch.setattr(package, "flash_attn_varlen_func", other)
    _, why = automatic(monkeypatch)
    assert why == (
        "its other has no cu_seqlens_k, cu_seqlens_q, deterministic, max_seqlen_k, max_seqlen_q, return_lse, "
        "softmax_scale"
    )

    def wrong(*args: Tensor, **options: Any) -> Any:
        y, lse = good(*args, **options)
        return 2 * y, lse

    wrong.__signature__ = inspect.signature(good)  # type: ignore[attr-defined]
    monkeypatch.setattr(package, "flash_attn_varlen_func", wrong)
    assert automatic(monkeypatch)[1] == "its values or gradients are not those of the documents one by one"
    monkeypatch.setattr(package, "flash_attn_varlen_func", good)
    good = package.flash_attn_func
    wrong.__signature__ = inspect.signature(good)  # type: ignore[attr-defined]
    monkeypatch.setattr(package, "flash_attn_func", wrong)
    assert automatic(monkeypatch)[1] == "its values or gradients are not those of the documents one by one"


@pytest.mark.parametrize("function", ["flash_attn_func", "flash_attn_varlen_func"])
@pytest.mark.parametrize("error", [AssertionError("no hipcc"), PermissionError(13, "read-only"), KeyError("arch")])
def test_auto_does_not_take_an_aiter_that_cannot_compile_here(
    function: str, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It compiles at the first call, and asserts that there is a compiler and a directory that can be written."""
    package = fake_aiter([])
    present(package, monkeypatch)

    def fail(*_: Any, **__: Any) -> None:
        raise error

    fail.__signature__ = inspect.signature(getattr(package, function))  # type: ignore[attr-defined]
    monkeypatch.setattr(package, function, fail)
    kernels, why = automatic(monkeypatch)
    assert kernels is None
    assert str(why).startswith(f"{type(error).__name__}: ")


def test_auto_without_the_package_writes_no_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert automatic(monkeypatch) == (None, None)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("raise ImportError('undefined symbol: _ZN3c10\\nmore')", "cannot be loaded: undefined symbol: _ZN3c10 ("),
        ("raise RuntimeError('no ROCm')", "cannot be loaded: no ROCm ("),
        ("import einops_that_is_missing", "needs einops_that_is_missing, which is not installed ("),
        ("", "the installed package has not the functions of version 2 ("),
    ],
)
def test_a_package_that_is_broken_is_one_line(
    source: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "flash_attn.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "flash_attn", raising=False)
    with pytest.raises(ConfigError) as caught:
        load("flash_attn")
    monkeypatch.delitem(sys.modules, "flash_attn", raising=False)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_run_that_asks_for_them_on_a_cpu_ends_with_exit_code_2(tmp_path: Path) -> None:
    corpus = make_corpus(tmp_path / "corpus.h5")
    parallel = {"attention": "flash_attn", "device": "cpu"}
    done = train_on(make_run(tmp_path / "run", corpus, parallel=parallel), ranks=1)
    assert done.returncode == 2
    assert done.stderr == "error: parallel.attention: flash_attn needs a GPU, and this run is on a CPU; use auto\n"


def test_a_run_trains_with_torchs_own_kernels(tmp_path: Path) -> None:
    corpus = make_corpus(tmp_path / "corpus.h5")
    done = train_on(make_run(tmp_path / "run", corpus, steps=2, parallel={"attention": "sdpa"}), ranks=1)
    assert done.returncode == 0, done.stderr


def test_a_kernel_that_fails_here_is_found_before_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Documents are then kept apart by a mask."""
    kernels, calls = pretend("torch 2.12", monkeypatch)
    cpu = torch.device("cpu")
    assert failure_of(kernels, cpu, torch.float32, (6, 2), 8) is None
    assert [call.name for call in calls] == ["varlen"]

    def refuse(*_: Any, **__: Any) -> Tensor:
        raise RuntimeError("Expected a fused kernel\nException raised from somewhere")

    broken = FlashAttention("torch", kernels.whole, refuse)
    assert failure_of(broken, cpu, torch.float32, (6, 2), 8) == "RuntimeError: Expected a fused kernel"

    def see_all(q: Tensor, *others: Tensor, **options: Any) -> Tensor:
        return kernels.varlen(q, *others, **options) * 1.1

    wrong = FlashAttention("torch", kernels.whole, see_all)
    assert failure_of(wrong, cpu, torch.float32, (6, 2), 8) is not None, "it runs, and its values are wrong"

    def fault(*_: Any, **__: Any) -> Tensor:
        raise torch.OutOfMemoryError("out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        failure_of(FlashAttention("torch", kernels.whole, fault), cpu, torch.float32, (6, 2), 8)


def test_on_a_gpu_documents_are_attended_over_by_their_bounds(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """`auto` takes torch's kernels if they work there, else the mask; without documents nothing changes."""
    phase = {"tokens": 384, "context": 64, "global_batch": 6, "micro_batch": 1, "lr": 1e-3}
    config = TrainConfig.model_validate({"model": MODEL, "phases": [phase], "data": {"isolate_documents": True}})
    gpu, bf16 = torch.device("cuda"), torch.bfloat16
    monkeypatch.setattr(assembly, "failure_of", lambda *_: None)
    kernels = assembly._by_bounds(config, gpu, bf16)
    assert kernels is not None
    assert kernels.package == "torch"
    monkeypatch.setattr(assembly, "failure_of", lambda *_: "RuntimeError: no kernel")
    with caplog.at_level("INFO"):
        assert assembly._by_bounds(config, gpu, bf16) is None
    assert "kept apart by a mask" in caplog.text
    assert "(RuntimeError: no kernel)" in caplog.text
    assert assembly._keeps_documents_apart(config)
    assert not assembly._keeps_documents_apart(config.model_copy(update={"data": DataConfig()}))
