"""Padding, and documents packed into one sequence: packed is separate, and padding is not there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.train.models import ROPE_BASE, scrambled, tiny_config, tokens
from tests.train.ranks import train_on
from tests.train.runs import losses_of, make_run
from zslurm.train.data.build.bundle_writer import BundleWriter
from zslurm.train.data.schema import BundleHeader
from zslurm.train.model.packing import documents_of, pack
from zslurm.train.model.zaya import Zaya

VARIANTS: list[dict[str, Any]] = [{}, {"conv_widths": (3, 4), "experts_per_token": 2}, {"conv_widths": (1, 1)}]


def document_ids(lengths: list[int]) -> Tensor:
    return torch.cat([torch.full((length,), number) for number, length in enumerate(lengths)])


def gradients(model: Zaya) -> list[Tensor]:
    result = []
    for parameter in model.parameters():
        assert parameter.grad is not None
        result.append(parameter.grad)
        parameter.grad = None
    return result


@pytest.mark.parametrize("changes", VARIANTS, ids=str)
@pytest.mark.parametrize("lengths", [[4, 5], [1, 1, 6, 1], [9], [2, 1, 3, 3]], ids=str)
def test_packed_documents_are_computed_as_if_each_stood_alone(lengths: list[int], changes: dict[str, Any]) -> None:
    model = scrambled(tiny_config(**changes))
    tokens_1S = tokens(model.config, batch=1, length=9)
    targets_1S = tokens(model.config, batch=1, length=9, seed=1)
    document_1S = document_ids(lengths).unsqueeze(0)
    logits, counts = model(tokens_1S, rope_base=ROPE_BASE, document_BS=document_1S)
    alone = [model(piece, rope_base=ROPE_BASE) for piece in tokens_1S.split(lengths, dim=1)]
    torch.testing.assert_close(logits, torch.cat([one for one, _ in alone], dim=1))
    assert torch.equal(counts, sum(one for _, one in alone))

    model(tokens_1S, targets_1S, rope_base=ROPE_BASE, document_BS=document_1S)[0].backward()
    packed = gradients(model)
    for piece, target in zip(tokens_1S.split(lengths, dim=1), targets_1S.split(lengths, dim=1), strict=True):
        model(piece, target, rope_base=ROPE_BASE)[0].backward()
    for one, other in zip(packed, gradients(model), strict=True):
        torch.testing.assert_close(one, other)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=5), st.lists(st.integers(1, 5), min_size=1, max_size=5))
def test_rows_of_a_batch_may_hold_different_documents(first: list[int], second: list[int]) -> None:
    length = min(sum(first), sum(second))
    document_BS = torch.stack([document_ids(first)[:length], document_ids(second)[:length]])
    model = scrambled(tiny_config(), torch.float32).requires_grad_(False)
    tokens_BS = tokens(model.config, batch=2, length=length)
    together = model(tokens_BS, rope_base=ROPE_BASE, document_BS=document_BS)[0]
    for row in range(2):
        alone = model(tokens_BS[[row]], rope_base=ROPE_BASE, document_BS=document_BS[[row]])[0]
        torch.testing.assert_close(together[[row]], alone, rtol=1e-4, atol=1e-4)


def test_without_isolation_a_document_sees_the_one_before() -> None:
    model = scrambled(tiny_config()).requires_grad_(False)
    tokens_1S = tokens(model.config, batch=1)
    document_1S = document_ids([4, 5]).unsqueeze(0)
    apart = model(tokens_1S, rope_base=ROPE_BASE, document_BS=document_1S)[0]
    joined = model(tokens_1S, rope_base=ROPE_BASE)[0]
    difference = (apart - joined).abs().amax(dim=-1)[0]
    assert (difference[:4] < 1e-12).all()
    assert (difference[4:] > 1e-6).all()


def test_an_id_that_comes_back_is_another_document() -> None:
    model = scrambled(tiny_config()).requires_grad_(False)
    tokens_1S = tokens(model.config, batch=1, length=6)
    again, fresh = (
        model(tokens_1S, rope_base=ROPE_BASE, document_BS=torch.tensor([ids]))[0]
        for ids in ([7, 7, 2, 2, 7, 7], [0, 0, 1, 1, 2, 2])
    )
    assert torch.equal(again, fresh)


def test_an_end_token_is_the_last_of_its_document() -> None:
    tokens_BS = torch.tensor([[5, 1, 1, 6, 7, 1, 8], [1, 5, 6, 7, 8, 9, 9]])
    assert documents_of(tokens_BS, end_token=1).tolist() == [[0, 0, 1, 2, 2, 2, 3], [0, 1, 1, 1, 1, 1, 1]]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("changes", VARIANTS, ids=str)
def test_padding_changes_nothing_and_counts_nowhere(side: str, changes: dict[str, Any]) -> None:
    model = scrambled(tiny_config(**changes))
    kept = [9, 5, 1]
    position_S = torch.arange(9)
    lengths_B1 = torch.tensor(kept).unsqueeze(1)
    valid_BS = position_S < lengths_B1 if side == "right" else position_S >= 9 - lengths_B1
    tokens_BS = tokens(model.config, batch=3, length=9)
    targets_BS = tokens(model.config, batch=3, length=9, seed=1)
    logits, counts = model(tokens_BS, rope_base=ROPE_BASE, valid_BS=valid_BS)
    alone = [
        model(row[keep].unsqueeze(0), rope_base=ROPE_BASE) for row, keep in zip(tokens_BS, valid_BS, strict=True)
    ]
    torch.testing.assert_close(logits[valid_BS], torch.cat([one[0] for one, _ in alone]))
    assert torch.equal(counts, sum(one for _, one in alone))
    assert logits.isfinite().all()

    padded_loss = model(tokens_BS, targets_BS, rope_base=ROPE_BASE, valid_BS=valid_BS)[0]
    padded_loss.backward()
    padded = gradients(model)
    losses = []
    for row, target, keep in zip(tokens_BS, targets_BS, valid_BS, strict=True):
        loss, _ = model(row[keep].unsqueeze(0), target[keep].unsqueeze(0), rope_base=ROPE_BASE)
        loss.backward()
        losses.append(loss.detach())
    torch.testing.assert_close(padded_loss.detach(), torch.stack(losses).sum())
    for one, other in zip(padded, gradients(model), strict=True):
        torch.testing.assert_close(one, other)


def test_documents_and_padding_go_together() -> None:
    model = scrambled(tiny_config()).requires_grad_(False)
    tokens_BS = tokens(model.config, batch=2, length=8)
    valid_BS = torch.tensor([[True] * 8, [True] * 6 + [False] * 2])
    document_BS = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1, 1, 1]])
    logits, counts = model(tokens_BS, rope_base=ROPE_BASE, valid_BS=valid_BS, document_BS=document_BS)
    pieces = [tokens_BS[0, :3], tokens_BS[0, 3:], tokens_BS[1, :2], tokens_BS[1, 2:6]]
    alone = [model(piece.unsqueeze(0), rope_base=ROPE_BASE) for piece in pieces]
    torch.testing.assert_close(logits[valid_BS], torch.cat([one[0] for one, _ in alone]))
    assert torch.equal(counts, sum(one for _, one in alone))


def test_whole_sequences_need_no_mask() -> None:
    packing = pack(torch.arange(4), rotary_dim=4, rope_base=ROPE_BASE, reach=2, dtype=torch.float32)
    assert packing.attend_B1SS is None and packing.linked is None and packing.valid_BS1 is None


def test_the_setting_isolates_documents_in_training(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    header = BundleHeader(vocab_size=64, tokenizer_sha256="a" * 64, end_token=1, source="tests")
    corpus = tmp_path / "corpus.h5"
    with BundleWriter(corpus, header) as writer:
        for _ in range(200):
            words = generator.integers(2, 64, int(generator.integers(2, 9)))
            writer.append(np.array([*words, 1], dtype=np.uint32))
    losses = {}
    for isolate in (False, True):
        run = make_run(
            tmp_path / f"isolate-{isolate}",
            corpus,
            steps=2,
            data={"path": str(corpus), "isolate_documents": isolate},
        )
        result = train_on(run, ranks=1)
        assert result.returncode == 0, result.stderr
        losses[isolate] = losses_of(run)
    assert len(losses[True]) == len(losses[False]) == 2
    assert losses[True][0] != losses[False][0]
    assert losses[True][0] == pytest.approx(losses[False][0], rel=0.05)
