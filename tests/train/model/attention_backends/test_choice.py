"""What attention runs on is known before the first step, and the math backend does not get long sequences."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.train.runs import MODEL
from zslurm.train.config import TrainConfig
from zslurm.train.errors import ConfigError
from zslurm.train.model.attention_backends import choice as backend
from zslurm.train.model.attention_backends.packages import FlashAttention
from zslurm.train.model.attention_backends.sdpa import attend_by_sdpa

GPU = torch.device("cuda", 0)


def config(*contexts: int, **sections: Any) -> TrainConfig:
    phases = [
        {"tokens": context * 6, "context": context, "global_batch": 6, "micro_batch": 1, "lr": 1e-3}
        for context in contexts
    ]
    return TrainConfig.model_validate({"model": MODEL, "phases": phases} | sections)


def simulate(monkeypatch: pytest.MonkeyPatch, *choices: backend.SdpaChoice) -> list[int]:
    """A GPU whose torch picks these backends, one for each context; returns the contexts that were asked for."""
    asked: list[int] = []

    def ask(config: TrainConfig, context: int, device: torch.device, dtype: torch.dtype) -> backend.SdpaChoice:
        asked.append(context)
        return choices[min(len(asked), len(choices)) - 1]

    monkeypatch.setattr(backend, "ask_torch", ask)
    return asked


@pytest.mark.parametrize("name", ["flash", "efficient", "cudnn"])
def test_a_fused_backend_serves_any_context(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = simulate(monkeypatch, backend.SdpaChoice(name))
    found = backend.attention_backend("auto", config(4096, 32768, 4096), GPU, torch.bfloat16)
    assert found == f"torch's {name} backend"
    assert asked == [4096, 32768], "every context of the run, once"


def test_contexts_on_different_backends_are_both_named(monkeypatch: pytest.MonkeyPatch) -> None:
    simulate(monkeypatch, backend.SdpaChoice("math"), backend.SdpaChoice("flash"))
    found = backend.attention_backend("sdpa", config(2048, 4096), GPU, torch.bfloat16)
    assert found == "torch's math backend for 2048 tokens, torch's flash backend for 4096 tokens"


@pytest.mark.parametrize(
    ("context", "sections", "advice"),
    [
        (2049, {}, "set parallel.attention: flash_attn or aiter"),
        (4096, {"data": {"isolate_documents": True}}, "; or data.isolate_documents: false"),
        (4096, {"parallel": {"dtype": "fp32"}}, "; set parallel.dtype: bf16"),
    ],
)
def test_math_is_refused_above_two_thousand_tokens(
    context: int, sections: dict[str, Any], advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulate(monkeypatch, backend.SdpaChoice("math", ("Flash attention was not compiled in.",)))
    with pytest.raises(ConfigError) as caught:
        backend.attention_backend("auto", config(64, context, **sections), GPU, torch.bfloat16)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(f"parallel.attention: auto: phases[].context is {context}")
    assert "(Flash attention was not compiled in)" in message
    assert advice in message


def test_a_package_is_named_and_torch_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = simulate(monkeypatch, backend.SdpaChoice("math"))
    kernels = FlashAttention("aiter", lambda: None, lambda: None)
    assert backend.attention_backend(kernels, config(32768), GPU, torch.bfloat16) == "aiter"
    assert not asked


def test_documents_by_bounds_need_no_fused_kernel_with_a_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = simulate(monkeypatch, backend.SdpaChoice("math"))
    kernels = FlashAttention("torch", lambda: None, lambda: None)
    apart = config(4096, 32768, data={"isolate_documents": True})
    found = backend.attention_backend(kernels, apart, GPU, torch.bfloat16)
    assert found == "torch's flash backend, by the bounds of documents"
    assert not asked


def test_torchs_reasons_are_lines() -> None:
    """Here without a GPU torch has no fused backend for CUDA, and gives its reasons as warnings."""
    q, k, v = (torch.empty(1, heads, 64, 8, dtype=torch.bfloat16) for heads in (2, 1, 1))
    reasons = backend.why_not_fused(torch.backends.cuda.SDPAParams(q, k, v, None, 0.0, True, True))
    assert all(reason and "\n" not in reason and "Triggered" not in reason for reason in reasons)


@pytest.mark.parametrize("isolate", [False, True])
def test_torch_can_be_asked(isolate: bool) -> None:
    """The question itself, on the device at hand: a name that the log can show."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    asked = config(64, data={"isolate_documents": isolate})
    choice = backend.ask_torch(asked, 64, device, torch.bfloat16)
    assert choice.name in ("flash", "efficient", "cudnn", "math")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_memory_grows_with_the_context_and_not_with_its_square() -> None:
    asked = config(32768, model={**MODEL, "query_heads": 8, "kv_heads": 2, "head_dim": 128})
    assert backend.ask_torch(asked, 32768, GPU, torch.bfloat16).name != "math"
    peaks = {}
    for length in (16384, 32768):
        q, k, v = (
            torch.randn(1, heads, length, 128, dtype=torch.bfloat16, device=GPU, requires_grad=True)
            for heads in (8, 2, 2)
        )
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        attend_by_sdpa(q, k, v, None).sum().backward()
        peaks[length] = torch.cuda.max_memory_allocated()
        del q, k, v
    assert peaks[32768] < 2.2 * peaks[16384], peaks
