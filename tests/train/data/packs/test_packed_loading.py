"""Packed phases: the same microbatches on any ranks and from any step on, and documents that are as if alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.train.data.numbered import phase
from tests.train.data.packs.documents import corpus_of
from tests.train.models import ROPE_BASE, scrambled, tiny_config
from zslurm.train.data.loader import Loader, Microbatch
from zslurm.train.data.order import DataOrder
from zslurm.train.data.training_data import TrainingData
from zslurm.train.errors import ConfigError, DataError
from zslurm.train.model.head import IGNORED_TARGET
from zslurm.train.model.packing import pack
from zslurm.train.schedule import Plan

CPU = torch.device("cpu")
PHASES = (phase(16, 24), phase(16, 36, packing="best_fit"), phase(9, 24, packing="best_fit"))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> TrainingData:
    directory = tmp_path_factory.mktemp("data")
    lengths = np.random.default_rng(2).choice([1, 2, 11, 12, 13, 16, 17, 30], 90).tolist()
    chats = corpus_of(directory / "chats", lengths[:50], lengths[50:], masked=True)
    return TrainingData({"chats": chats, "web": corpus_of(directory / "web", lengths, first=500_000)})


def microbatches(
    data: TrainingData, first: int = 0, *, rank: int = 0, ranks: int = 1, **keys: Any
) -> list[Microbatch]:
    order = DataOrder(data, Plan(PHASES), seed=5)
    with Loader(
        order, rank=rank, world_size=ranks, device=CPU, prefetch=keys.pop("prefetch", 0), **keys
    ) as loader:
        steps = range(first, order.plan.total_steps)
        return [microbatch for step in steps for microbatch in loader.microbatches(step)]


def rows(found: list[Microbatch]) -> dict[tuple[int, int], list[Any]]:
    """What a microbatch is to the model, by step and number; where documents begin, not how they are numbered."""
    result = {}
    for each in found:
        valid = None if each.valid_BS is None else each.valid_BS.tolist()
        bounds = None if each.bounds_N is None else each.bounds_N.tolist()
        result[each[:2]] = [each.tokens_BS.tolist(), each.targets_BS.tolist(), each.targets, valid, bounds]
    return result


@settings(max_examples=10, deadline=None)
@given(ranks=st.sampled_from([1, 3]), first=st.integers(0, 13), prefetch=st.sampled_from([0, 3]))
def test_any_number_of_ranks_from_any_step_on_reads_the_same_microbatches(
    data: TrainingData, ranks: int, first: int, prefetch: int
) -> None:
    alone = {key: row for key, row in rows(microbatches(data)).items() if key[0] >= first}
    shares = [microbatches(data, first, rank=rank, ranks=ranks, prefetch=prefetch) for rank in range(ranks)]
    assert rows([microbatch for share in shares for microbatch in share]) == alone


def test_documents_and_padding_are_numbered_in_packed_phases_only(data: TrainingData) -> None:
    kinds = set()
    for each in microbatches(data):
        if each.step < 4:
            assert each.document_BS is each.bounds_N is each.valid_BS is None
            continue
        assert each.document_BS is not None and each.bounds_N is not None and each.valid_BS is not None
        assert each.targets == int((each.targets_BS != IGNORED_TARGET).sum())
        assert not (each.targets_BS[~each.valid_BS] != IGNORED_TARGET).any()
        starts = torch.zeros(each.tokens_BS.numel(), dtype=torch.bool)
        starts[each.bounds_N[:-1].long()] = True
        changed = torch.diff(each.document_BS.flatten(), prepend=torch.tensor([-1])) != 0
        assert torch.equal(starts, changed)
        follows = each.valid_BS & (each.targets_BS != IGNORED_TARGET)
        assert torch.equal(each.targets_BS[follows], each.tokens_BS[follows] + 1)
        kinds.add(bool(each.valid_BS.all()))
    assert kinds == {False, True}, "with padding and without"


def test_an_epoch_of_packs_trains_on_every_target_once(data: TrainingData) -> None:
    web = TrainingData({"": data.corpora["web"]})
    packs = web.sequences("", 16, packed=True)
    order = DataOrder(web, Plan((phase(16, packs, global_batch=packs, micro_batch=1),)), 1, "best_fit")
    with Loader(order, rank=0, world_size=1, device=CPU, prefetch=0) as loader:
        found = torch.cat([each.targets_BS.flatten() for each in loader.microbatches(0)])
    targets = sorted(found[found != IGNORED_TARGET].tolist())
    offsets = data.corpora["web"].bundles[0].documents.astype(int).tolist()
    assert targets == [500_000 + t for t in range(offsets[-1]) if t not in set(offsets)]


@pytest.mark.parametrize("by_bounds", [False, True])
def test_every_document_has_the_loss_that_it_has_alone(by_bounds: bool) -> None:
    """Three documents and padding in one sequence; in fp64, with the mask that torch's attention gets."""
    model = scrambled(tiny_config())
    generator = torch.Generator().manual_seed(1)
    documents = [torch.randint(2, 31, (length,), generator=generator) for length in (5, 2, 6)]
    tokens = torch.cat([*documents, torch.ones(4, dtype=torch.int64)])
    targets = torch.cat([*(torch.cat([each[1:], torch.tensor([IGNORED_TARGET])]) for each in documents),
                         torch.full((4,), IGNORED_TARGET)])  # fmt: skip
    numbers = torch.tensor([0] * 5 + [1] * 2 + [2] * 6 + [3] * 4)
    valid = numbers < 3
    bounds = torch.tensor([0, 5, 7, 13, 17], dtype=torch.int32) if by_bounds else None
    loss, counts = model(
        tokens[None],
        targets[None],
        rope_base=ROPE_BASE,
        valid_BS=valid[None],
        document_BS=numbers[None],
        bounds_N=bounds,
    )
    alone = [model(each[None, :-1], each[None, 1:], rope_base=ROPE_BASE)[0] for each in documents]
    assert loss.item() == pytest.approx(sum(each.item() for each in alone), rel=1e-12)
    assert counts.sum(dim=1).tolist() == [13 * model.config.experts_per_token] * model.config.layers


def test_kernels_that_know_documents_get_bounds_of_padding_too_and_no_mask() -> None:
    numbers, valid = torch.tensor([[0, 0, 1, 2, 2]]), torch.tensor([[True, True, True, False, False]])
    bounds = torch.tensor([0, 2, 3, 5], dtype=torch.int32)
    made = pack(
        torch.arange(5), rotary_dim=4, rope_base=ROPE_BASE, reach=2, dtype=torch.float32, valid_BS=valid,
        document_BS=numbers, bounds_N=bounds, by_bounds=True,
    )  # fmt: skip
    assert made.attend_B1SS is None
    assert made.bounds_N is bounds
    assert made.valid_BS1 is not None and torch.equal(made.valid_BS1[..., 0], valid)


# --------------------------------------------------------------------------- what checkpoints record


def test_packs_and_windows_of_one_context_have_orders_that_do_not_mix(data: TrainingData) -> None:
    order = DataOrder(data, Plan(PHASES), seed=5)
    taken = order.record(order.plan.total_steps)["sequences"]
    assert {cut: sum(of_cut.values()) for cut, of_cut in taken.items()} == {
        "16": 24,
        "16 best_fit": 36,
        "9 best_fit": 24,
    }


def test_a_packing_that_changed_is_reported_or_refused(data: TrainingData) -> None:
    plan = Plan(PHASES)
    recorded = DataOrder(data, plan, seed=5).record(6)
    assert DataOrder(data, plan, seed=5).changes(recorded, 6) == []
    trimmed = TrainingData(data.corpora, "trim")
    assert DataOrder(trimmed, plan, seed=5).changes(recorded, 6) == [
        "data.long_documents was changed: from here on other documents are packed together"
    ]
    windows = Plan((PHASES[0], phase(16, 36), PHASES[2]))
    with pytest.raises(ConfigError, match=r"phases\[\]\.mix or packing: the 6 steps .* packs of "):
        DataOrder(data, windows, seed=5).changes(recorded, 6)
    older = {key: value for key, value in recorded.items() if key != "packs"}
    assert DataOrder(trimmed, plan, seed=5).changes(older, 6) == []


def test_a_long_document_that_is_refused_is_refused_before_training(tmp_path: Path) -> None:
    refused = TrainingData({"": corpus_of(tmp_path / "corpus", [4, 40])}, "refuse")
    with pytest.raises(DataError, match=r"^data\.path: data\.long_documents: document 1 of .* has 40 tokens"):
        DataOrder(refused, Plan((phase(16, 24),)), 1, "best_fit")
