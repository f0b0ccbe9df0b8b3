"""Log-likelihoods of continuations equal those of the full forward, however contexts are shared."""

from __future__ import annotations

import pytest
import torch

from tests.train.models import ROPE_BASE, scrambled, tiny_config
from zslurm.train.inference import likelihood
from zslurm.train.inference.likelihood import Asked, LikelihoodScorer

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


ASKED = [
    Asked(drawn(5, 1), (drawn(1, 2), drawn(3, 3), drawn(7, 4))),
    Asked(drawn(1, 5), (drawn(40, 6),)),
    Asked(drawn(1, 5), (drawn(40, 7), drawn(32, 8))),
    Asked(drawn(70, 9), (drawn(1, 10), drawn(1, 11))),
    Asked(drawn(33, 12), (drawn(1, 13),)),
]


@pytest.mark.parametrize("tree", [512, 14, 0], ids=["trees", "some trees", "forks of caches"])
@pytest.mark.parametrize("tokens", [4096, 50, 1])
def test_likelihoods_are_those_of_the_full_forward(
    monkeypatch: pytest.MonkeyPatch, tokens: int, tree: int
) -> None:
    monkeypatch.setattr(likelihood, "PASS_TOKENS", tokens)
    monkeypatch.setattr(likelihood, "TREE_TOKENS", tree)
    found = LikelihoodScorer(MODEL, ROPE_BASE).score(ASKED)
    for asked, scores in zip(ASKED, found, strict=True):
        for continuation, score in zip(asked.continuations, scores, strict=True):
            likely, greedy = expected(asked.context, continuation)
            assert score.log_likelihood == pytest.approx(likely)
            assert score.greedy == greedy


@pytest.mark.parametrize("tree", [512, 0], ids=["trees", "forks of caches"])
def test_what_all_contexts_begin_with_is_read_once(monkeypatch: pytest.MonkeyPatch, tree: int) -> None:
    monkeypatch.setattr(likelihood, "TREE_TOKENS", tree)
    prefix = drawn(45, 20)
    asked = [Asked(prefix + each.context, each.continuations) for each in ASKED] + ASKED[:1]
    alone, shared = LikelihoodScorer(MODEL, ROPE_BASE), LikelihoodScorer(MODEL, ROPE_BASE)
    shared.share(prefix)
    for one, two in zip(alone.score(asked), shared.score(asked), strict=True):
        assert [each.log_likelihood for each in two] == pytest.approx([each.log_likelihood for each in one])
    assert shared.computed_tokens == alone.computed_tokens - 4 * 45


def test_passes_of_trees_are_bounded_by_their_tokens_and_by_what_padding_makes_of_them() -> None:
    passes = likelihood._tree_passes
    assert list(passes([500, *[10] * 150], 0)) == [range(33), range(33, 151)]
    assert list(passes([500] * 10, 0)) == [range(8), range(8, 10)]
    assert list(passes([100] * 12, 8192)) == [range(10), range(10, 12)]
    assert list(passes([5000], 1 << 20)) == [range(1)]
    assert list(passes([], 0)) == []
