"""Log-likelihoods of continuations equal those of the full forward, however they are put into passes."""

from __future__ import annotations

import pytest
import torch

from tests.train.models import ROPE_BASE, scrambled, tiny_config
from zslurm.train.inference import likelihood
from zslurm.train.inference.likelihood import Pair, likelihoods
from zslurm.train.model.zaya import Zaya

MODEL = scrambled(tiny_config())


def drawn(length: int, seed: int) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(0, MODEL.config.vocab_size, (length,), generator=generator).tolist())


@torch.inference_mode()
def expected(context: tuple[int, ...], continuation: tuple[int, ...]) -> tuple[float, bool]:
    tokens = [*context, *continuation]
    logits_SV = MODEL(torch.tensor([tokens[:-1]]), rope_base=ROPE_BASE)[0][0].log_softmax(-1)
    rows = logits_SV[len(context) - 1 :]
    likely = [float(row[token]) for row, token in zip(rows, continuation, strict=True)]
    return sum(likely), rows.argmax(-1).tolist() == list(continuation)


@torch.inference_mode()
def likeliest(context: tuple[int, ...]) -> tuple[int, ...]:
    return (int(MODEL(torch.tensor([context]), rope_base=ROPE_BASE)[0][0, -1].argmax()),)


QUESTION = drawn(70, 9)
PAIRS: list[Pair] = [
    (drawn(5, 1), drawn(1, 2)),
    (drawn(5, 1), drawn(7, 4)),
    (drawn(1, 5), drawn(40, 6)),
    (QUESTION, drawn(1, 10)),
    (QUESTION, likeliest(QUESTION)),
    (QUESTION[:60], (*QUESTION[60:], *drawn(1, 10))),  # the same input, cut elsewhere
]


@pytest.mark.parametrize("tokens", [4096, 100, 1])
@pytest.mark.parametrize("chunk", [64, 3])
def test_likelihoods_are_those_of_the_full_forward(
    monkeypatch: pytest.MonkeyPatch, tokens: int, chunk: int
) -> None:
    monkeypatch.setattr(likelihood, "PASS_TOKENS", tokens)
    monkeypatch.setattr(likelihood, "default_chunk", lambda *_: chunk)
    found = likelihoods(MODEL, PAIRS, rope_base=ROPE_BASE)
    assert sorted(found) == list(range(len(PAIRS)))
    for place, pair in enumerate(PAIRS):
        likely, greedy = expected(*pair)
        assert found[place] == (pytest.approx(likely), greedy)
    assert {greedy for _, greedy in found.values()} == {True, False}


def test_ranks_share_the_passes_and_find_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(likelihood, "PASS_TOKENS", 100)
    whole = likelihoods(MODEL, PAIRS, rope_base=ROPE_BASE)
    shares = [likelihoods(MODEL, PAIRS, rope_base=ROPE_BASE, rank=rank, ranks=3) for rank in range(3)]
    assert all(shares)
    assert {place: one for share in shares for place, one in share.items()} == whole
    assert sum(map(len, shares)) == len(PAIRS)


def test_inputs_that_are_the_same_are_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = []
    hidden_states = Zaya.hidden_states

    def counted(self: Zaya, tokens_BS: torch.Tensor, *, rope_base: float) -> torch.Tensor:
        rows.append(len(tokens_BS))
        return hidden_states(self, tokens_BS, rope_base=rope_base)

    monkeypatch.setattr(Zaya, "hidden_states", counted)
    likelihoods(MODEL, PAIRS, rope_base=ROPE_BASE)
    assert rows == [4], "three of the last inputs are one"
    assert likelihoods(MODEL, [], rope_base=ROPE_BASE) == {}
