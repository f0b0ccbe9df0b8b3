"""The whole model against a plain re-implementation, its gradients, its causality, its number formats."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.train.model.naive_zaya import naive_logits
from tests.train.models import ROPE_BASE, random_like, scrambled, tiny_config, tokens
from zslurm.train.model.head import summed_losses
from zslurm.train.model.init import initial_tensor
from zslurm.train.model.zaya import Zaya, build
from zslurm.train.shapes import tensor_table

VARIANTS: list[dict[str, Any]] = [
    {},
    {"skip_rule": "zero"},
    {"skip_expert": False},
    {"experts_per_token": 2},
    {"experts_per_token": 2, "skip_rule": "zero", "layers": 3},
    {"conv_widths": (3, 2), "query_heads": 3, "kv_heads": 1, "rotary_share": 1.0},
    {"conv_widths": (1, 4), "query_heads": 6, "kv_heads": 3, "rotary_share": 0.25},
]


def logits_of(model: Zaya, tokens_BS: Tensor) -> Tensor:
    with torch.no_grad():
        result: Tensor = model(tokens_BS, rope_base=ROPE_BASE)[0]
    return result


@pytest.mark.parametrize("changes", VARIANTS, ids=str)
def test_logits_and_counts_are_those_of_the_plain_model(changes: dict[str, Any]) -> None:
    config = tiny_config(**changes)
    model = scrambled(config)
    tokens_BS = tokens(config, batch=2, length=7)
    with torch.no_grad():
        logits, counts = model(tokens_BS, rope_base=ROPE_BASE)
        expected = [naive_logits(model.state_dict(), config, row, ROPE_BASE) for row in tokens_BS.tolist()]
    torch.testing.assert_close(logits, torch.stack([one for one, _ in expected]), rtol=1e-9, atol=1e-9)
    assert torch.equal(counts, sum(torch.tensor(one) for _, one in expected))
    assert counts.dtype == torch.int64
    assert (counts.sum(dim=0) > 0).all(), "this test should send tokens to every class"


@pytest.mark.parametrize("changes", [{}, {"experts_per_token": 2, "skip_rule": "zero"}], ids=str)
def test_gradients_are_those_of_finite_differences(changes: dict[str, Any]) -> None:
    config = tiny_config(**changes)
    model = scrambled(config)
    tokens_BS = tokens(config, batch=2, length=6)

    def loss() -> Tensor:
        result: Tensor = model(tokens_BS[:, :-1], tokens_BS[:, 1:], rope_base=ROPE_BASE)[0]
        return result

    loss().backward()
    step = 1e-6
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        direction = random_like(parameter, f"direction {name}")
        with torch.no_grad():
            parameter.add_(step * direction)
            above = loss()
            parameter.sub_(2 * step * direction)
            below = loss()
            parameter.add_(step * direction)
        slope = (parameter.grad * direction).sum()
        torch.testing.assert_close(slope, (above - below) / (2 * step), rtol=1e-5, atol=1e-7, msg=name)
        assert slope.abs() > 1e-6, f"{name} does not matter: this test cannot see its gradient"


def test_no_gradient_reaches_the_balancing_bias() -> None:
    model = scrambled(tiny_config())
    model.balancing_bias.requires_grad_()
    tokens_BS = tokens(model.config)
    model(tokens_BS, tokens_BS, rope_base=ROPE_BASE)[0].backward()
    assert model.balancing_bias.grad is None


@pytest.mark.parametrize("position", [0, 3, 8])
def test_a_token_changes_its_own_logits_and_no_earlier_ones(position: int) -> None:
    model = scrambled(tiny_config(layers=3))
    before = tokens(model.config, length=9)
    after = before.clone()
    after[0, position] = (after[0, position] + 1) % model.config.vocab_size
    difference = (logits_of(model, after) - logits_of(model, before)).abs().amax(dim=-1)
    assert (difference[0, :position] < 1e-12).all()
    assert (difference[0, position:] > 1e-6).all()
    assert (difference[1] < 1e-12).all(), "sequences of a batch are independent"


def test_loss_is_the_sum_of_the_cross_entropies_of_the_logits() -> None:
    model = scrambled(tiny_config())
    tokens_BS = tokens(model.config)
    logits = logits_of(model, tokens_BS[:, :-1])
    loss, _ = model(tokens_BS[:, :-1], tokens_BS[:, 1:], rope_base=ROPE_BASE)
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens_BS[:, 1:].flatten(), reduction="sum")
    torch.testing.assert_close(loss.detach(), expected)


def test_the_rotary_base_is_an_argument_of_the_forward_pass() -> None:
    model = scrambled(tiny_config())
    tokens_BS = tokens(model.config)
    with torch.no_grad():
        near, far = (model(tokens_BS, rope_base=base)[0] for base in (100.0, 1e6))
    assert (near[:, 0] - far[:, 0]).abs().max() < 1e-12, "position 0 is never turned"
    assert (near[:, -1] - far[:, -1]).abs().max() > 1e-6


def copied(model: Zaya, dtype: torch.dtype) -> Zaya:
    copy = Zaya(model.config, dtype)
    copy.load_state_dict(model.state_dict())
    return copy


def fix_routing(model: Zaya) -> None:
    """Let the bias alone choose, so that rounding cannot send a token elsewhere."""
    model.balancing_bias.zero_()
    for layer, bias_C in enumerate(model.balancing_bias):
        bias_C[layer % model.config.router_classes] = 10.0


def test_fp32_is_close_to_fp64() -> None:
    exact = scrambled(tiny_config())
    fix_routing(exact)
    tokens_BS = tokens(exact.config)
    close = logits_of(copied(exact, torch.float32), tokens_BS)
    assert close.dtype == torch.float32
    torch.testing.assert_close(close.double(), logits_of(exact, tokens_BS), rtol=1e-5, atol=1e-5)


def test_bf16_is_close_to_fp32_in_loss_and_gradients() -> None:
    rounded = scrambled(tiny_config(layers=4), torch.bfloat16)
    fix_routing(rounded)
    exact = copied(rounded, torch.float32)
    tokens_BS = tokens(rounded.config, batch=4, length=17)
    losses = []
    for model in (rounded, exact):
        loss, _ = model(tokens_BS[:, :-1], tokens_BS[:, 1:], rope_base=ROPE_BASE)
        loss.backward()
        assert loss.dtype == torch.float32
        losses.append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=2e-3)
    gradients = zip(rounded.named_parameters(), exact.parameters(), strict=True)
    for (name, of_rounded), of_exact in gradients:
        assert of_rounded.grad is not None and of_exact.grad is not None
        assert of_rounded.grad.dtype == torch.bfloat16
        if of_exact.dim() > 1:  # the few numbers of a vector may cancel by chance
            error = (of_rounded.grad.float() - of_exact.grad).norm()
            assert error <= 0.15 * of_exact.grad.norm() + 1e-6, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_residual_stream_logits_and_balancing_bias_are_fp32(dtype: torch.dtype) -> None:
    model = build(tiny_config(), 0, dtype=dtype)
    seen: list[torch.dtype] = []
    model.head_entry.register_forward_hook(lambda _module, args, _output: seen.append(args[1].dtype))
    assert logits_of(model, tokens(model.config)).dtype == torch.float32
    assert seen == [torch.float32]
    assert model.balancing_bias.dtype == torch.float32


@pytest.mark.parametrize("target", [0, 3], ids=["all to one expert", "all skipped"])
def test_every_parameter_gets_a_gradient_whatever_the_routing(target: int) -> None:
    model = build(tiny_config(), 0, dtype=torch.float32)
    model.balancing_bias.zero_()
    model.balancing_bias[:, target] = 10.0
    tokens_BS = tokens(model.config, length=1)
    loss, counts = model(tokens_BS, tokens_BS, rope_base=ROPE_BASE)
    loss.backward()
    assert counts[:, target].tolist() == [2, 2]
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name


def test_initial_values_depend_on_seed_and_name_alone() -> None:
    config = tiny_config()
    model, again, other = (build(config, seed, dtype=torch.float32) for seed in (7, 7, 8))
    parameters_again = dict(again.named_parameters())
    strangers = dict(other.named_parameters())
    for info in reversed(tensor_table(config)):
        value = model.get_parameter(info.name)
        assert torch.equal(value, parameters_again[info.name])
        assert torch.equal(value, initial_tensor(info, config, 7))
        assert torch.equal(value, strangers[info.name]) == (len(info.shape) == 1), info.name
    first, second = (model.get_parameter(f"layers.0.router.{name}.weight") for name in ("first", "second"))
    assert not torch.equal(first, second)


def test_initial_values_have_the_documented_sizes() -> None:
    config = tiny_config(hidden_size=256, head_dim=64, expert_hidden_size=128, router_hidden_size=64, layers=8)
    model = build(config, 0, dtype=torch.float32)
    for name, expected in {
        "layers.1.attention.query.weight": 0.02,
        "layers.1.experts.gate_up.weight": 0.02,
        "layers.1.attention.output.weight": 0.02 / 4,
        "layers.1.experts.down.weight": 0.02 / 4,
        "layers.1.router.down.weight": 0.02,
        "layers.1.router.first.weight": 64**-0.5,
        "layers.1.router.second.weight": 64**-0.5,
        "layers.1.attention.depthwise_conv.weight": 2**-0.5,
        "layers.1.attention.grouped_conv.weight": 128**-0.5,
    }.items():
        assert model.get_parameter(name).std().item() == pytest.approx(expected, rel=0.1), name
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            assert (parameter == (0 if name.endswith("bias") else 1)).all(), name
    assert (model.balancing_bias[:, -1] == -1).all()
    assert (model.balancing_bias[:, :-1] == 0).all()


def test_bf16_starts_as_the_rounded_fp32_model() -> None:
    config = tiny_config()
    rounded, exact = (build(config, 3, dtype=dtype) for dtype in (torch.bfloat16, torch.float32))
    for one, other in zip(rounded.parameters(), exact.parameters(), strict=True):
        assert torch.equal(one, other.bfloat16())


def test_an_untrained_model_predicts_nothing() -> None:
    config = tiny_config(vocab_size=211, hidden_size=64)
    model = build(config, 0, dtype=torch.float32)
    tokens_BS = tokens(config, batch=4, length=65)
    loss, counts = model(tokens_BS[:, :-1], tokens_BS[:, 1:], rope_base=ROPE_BASE)
    assert loss.item() / (4 * 64) == pytest.approx(torch.tensor(211.0).log().item(), rel=0.02)
    assert (counts[:, -1] == 0).all(), "the skip class starts unused"


def test_the_head_takes_the_chunk_that_memory_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int | None] = []

    def losses(*args: Any, chunk_tokens: int | None, **options: Any) -> Any:
        taken.append(chunk_tokens)
        return summed_losses(*args, chunk_tokens=chunk_tokens, **options)

    monkeypatch.setattr("zslurm.train.model.zaya.summed_losses", losses)
    config = tiny_config()
    model = build(config, 0, dtype=torch.float32)
    tokens_BS = tokens(config, batch=2, length=8)
    found = []
    for chunk in (None, 3, 16):
        model.head_chunk = chunk
        found.append(model(tokens_BS, tokens_BS, rope_base=ROPE_BASE)[0])
    assert taken == [None, 3, 16]
    torch.testing.assert_close(found[0], found[1])
    torch.testing.assert_close(found[0], found[2])
