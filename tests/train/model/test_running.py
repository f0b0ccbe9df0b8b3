"""Recomputation, compilation and grouped products change how a model runs and nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.memory import peak_bytes
from tests.train.models import ROPE_BASE, scrambled, tiny_config, tokens
from tests.train.ranks import train_on
from tests.train.runs import losses_of, make_corpus, make_run, steps_of
from zslurm.kernels.dispatch import using
from zslurm.train.config import ModelConfig
from zslurm.train.model.zaya import Zaya, build

Step = tuple[Tensor, Tensor, dict[str, Tensor]]


def step(model: Zaya, **inputs: Any) -> Step:
    """Loss, counts and gradients of one forward and backward."""
    tokens_BS = tokens(model.config)
    model.zero_grad()
    loss, counts = model(tokens_BS, tokens_BS, rope_base=ROPE_BASE, **inputs)
    loss.backward()
    gradients = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        gradients[name] = parameter.grad
    return loss.detach(), counts, gradients


def assert_same(
    one: tuple[Tensor, Tensor, dict[str, Tensor]], other: tuple[Tensor, Tensor, dict[str, Tensor]]
) -> None:
    torch.testing.assert_close(one[0], other[0])
    assert torch.equal(one[1], other[1])
    for name, gradient in one[2].items():
        torch.testing.assert_close(gradient, other[2][name], rtol=1e-4, atol=1e-5, msg=name)


CONFIG = tiny_config(hidden_size=16, expert_hidden_size=24, layers=3)
INPUTS = {
    "plain": {},
    "padded": {"valid_BS": torch.arange(9).expand(2, 9) < torch.tensor([[9], [6]])},
    "documents": {"document_BS": torch.tensor([[0] * 4 + [1] * 5, [0] * 9])},
}


@pytest.mark.parametrize("layers", [True, 1, 2])
@pytest.mark.parametrize("inputs", INPUTS.values(), ids=INPUTS.keys())
def test_recomputation_gives_the_same_bits(inputs: dict[str, Tensor], layers: bool | int) -> None:
    model = scrambled(CONFIG, torch.float32)
    kept = step(model, **inputs)
    model.run_with(recompute=layers)
    loss, counts, gradients = step(model, **inputs)
    assert torch.equal(loss, kept[0])
    assert torch.equal(counts, kept[1]), "the load is counted once"
    for name, gradient in gradients.items():
        assert torch.equal(gradient, kept[2][name]), name


def test_recomputation_saves_memory() -> None:
    config = tiny_config(hidden_size=32, layers=6, expert_hidden_size=64, vocab_size=16)
    model = build(config, 0, dtype=torch.float32)
    tokens_BS = tokens(config, batch=4, length=128)

    def run() -> None:
        model(tokens_BS, tokens_BS, rope_base=ROPE_BASE)[0].backward()

    run()  # gradients exist from now on
    peaks = []
    for layers in (0, 2, 4, 6):
        model.run_with(recompute=layers)
        peaks.append(peak_bytes(run))
    assert peaks == sorted(peaks, reverse=True), "every layer more needs less"
    assert peaks[3] < 0.5 * peaks[0]
    model.run_with(recompute=True)
    assert peak_bytes(run) == peaks[3]


COMPILED = CONFIG.model_copy(update={"layers": 2})
"""The first layer has no router's state before it, the second has."""


@pytest.mark.parametrize(("inputs", "recompute"), [("padded", 0), ("documents", 1)], ids=["padded", "documents"])
def test_a_layer_compiles_without_a_graph_break(inputs: str, recompute: int) -> None:
    """And one that is recomputed next to one that is not."""
    torch.compiler.reset()
    model = scrambled(COMPILED, torch.float32)
    with using("grouped_gemm", "reference"):
        eager = step(model, **INPUTS[inputs])
        model.run_with(compile=True, recompute=recompute, backend="aot_eager")
        assert_same(step(model, **INPUTS[inputs]), eager)


def test_a_compiled_layer_runs_the_experts_steps_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in a layer that runs again in backward."""
    torch.compiler.reset()
    monkeypatch.setattr("zslurm.kernels.experts.is_opaque", lambda x: True)
    model = scrambled(COMPILED, torch.float32)
    with using("experts.network", "reference"):
        eager = step(model, **INPUTS["padded"])
        monkeypatch.setattr("zslurm.kernels.experts.by_rows.network", lambda *_: pytest.fail("a CPU's form"))
        model.run_with(compile=True, recompute=1, backend="aot_eager")
        assert_same(step(model, **INPUTS["padded"]), eager)


def test_a_layer_with_torchs_grouped_products_compiles_without_a_graph_break() -> None:
    """In bf16, where the compiler may round elsewhere; with padding and documents at once."""
    torch.compiler.reset()
    inputs = INPUTS["padded"] | INPUTS["documents"]
    model = scrambled(COMPILED, torch.bfloat16)
    model.balancing_bias[:] = torch.tensor([0.0, 5.0, 0.0, 0.0])  # rounding cannot change the routing
    with using("grouped_gemm", "torch"):
        eager = step(model, **inputs)
        model.run_with(compile=True, backend="aot_eager")
        loss, counts, gradients = step(model, **inputs)
    torch.testing.assert_close(loss, eager[0], rtol=1e-3, atol=0)
    assert torch.equal(counts, eager[1])
    one, other = (torch.cat([part.float().flatten() for part in each.values()]) for each in (gradients, eager[2]))
    assert (one - other).norm() <= 0.05 * other.norm()


def test_compiled_layers_take_more_shapes_than_torch_allows_by_default() -> None:
    torch.compiler.reset()
    model = scrambled(tiny_config(layers=1), torch.float32)
    with torch._dynamo.config.patch(recompile_limit=1):  # type: ignore[no-untyped-call]
        model.run_with(compile=True, backend="eager")
        for batch in (2, 1):
            tokens_BS = tokens(model.config, batch, 8)
            model(tokens_BS, tokens_BS, rope_base=ROPE_BASE)


@pytest.mark.soak
def test_inductor_compiles_a_layer() -> None:
    torch.compiler.reset()
    model = scrambled(CONFIG, torch.float32)
    eager = step(model)
    model.run_with(compile=True)
    assert_same(step(model), eager)


def test_names_of_parameters_do_not_depend_on_how_the_model_runs() -> None:
    model = build(CONFIG, 0, dtype=torch.float32)
    names = [name for name, _ in model.named_parameters()]
    model.run_with(compile=True, recompute=True, backend="aot_eager")
    assert [name for name, _ in model.named_parameters()] == names


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("corpus") / "corpus.h5")


def trained(run: Path) -> list[float]:
    result = train_on(run, ranks=1)
    assert result.returncode == 0, result.stderr
    return losses_of(run)


def test_training_with_recomputation_is_the_same_training(tmp_path: Path, corpus: Path) -> None:
    plain = make_run(tmp_path / "plain", corpus, steps=3)
    losses = trained(plain)
    loads = [row["load_entropy"] for row in steps_of(plain)]
    for layers in (True, 1):
        again = make_run(tmp_path / f"again {layers}", corpus, steps=3, parallel={"recompute": layers})
        assert trained(again) == losses
        assert [row["load_entropy"] for row in steps_of(again)] == loads


def balance_steps(run: Path, step: int) -> int:
    manifest = json.loads((run / "checkpoints" / f"step-{step:08}" / "manifest.json").read_text())
    return int(manifest["state"]["balance_steps"])


def test_microbatches_are_balanced_one_by_one_on_any_number_of_ranks(tmp_path: Path, corpus: Path) -> None:
    optim = {"balance_scope": "microbatch", "balance_lr": 0.05}
    alone = make_run(tmp_path / "alone", corpus, steps=3, optim=optim)
    two = make_run(tmp_path / "two", corpus, steps=3, optim=optim)
    whole = make_run(tmp_path / "whole", corpus, steps=3, optim=optim | {"balance_scope": "global_batch"})
    losses = trained(alone)
    assert train_on(two, ranks=2).returncode == 0
    assert losses_of(two) == pytest.approx(losses, rel=1e-5)
    trained(whole)
    assert [balance_steps(run, 3) for run in (alone, two, whole)] == [9, 9, 3]


def test_a_linear_router_trains_and_has_no_state_between_layers(tmp_path: Path, corpus: Path) -> None:
    config = ModelConfig(**(CONFIG.model_dump() | {"router": "linear"}))
    model = scrambled(config, torch.float32)
    _, counts, gradients = step(model)
    assert (counts.sum(dim=1) == 18).all()
    routers = [name for name in gradients if ".router." in name]
    assert routers == [f"layers.{layer}.router.output.weight" for layer in range(3)]
    assert all(gradients[name].abs().max() > 0 for name in routers)
    losses = trained(make_run(tmp_path / "linear", corpus, steps=20, model={"router": "linear"}))
    assert losses[-1] < losses[0]
