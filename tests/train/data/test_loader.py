"""A rank gets its microbatches: the same bits at any number of ranks, read ahead or not, from any step on."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.train.data.numbered import HEADER, numbered, order_of, phase
from tests.waiting import wait_for
from zslurm.train.data import reader
from zslurm.train.data.build.bundle_writer import BundleWriter
from zslurm.train.data.bundle import Corpus
from zslurm.train.data.loader import Loader, Microbatch
from zslurm.train.data.order import DataOrder
from zslurm.train.data.sequences import Sequences
from zslurm.train.data.shares import share_of
from zslurm.train.data.training_data import TrainingData
from zslurm.train.errors import DataError
from zslurm.train.model.head import IGNORED_TARGET

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def order(tmp_path_factory: pytest.TempPathFactory) -> DataOrder:
    """Three phases with two contexts, two mixtures and a ramp, over sources of several bundles."""
    directory = tmp_path_factory.mktemp("data")
    corpora = {
        "code": numbered(directory / "code", 700, 3, 800, first=10_000),
        "web": numbered(directory / "web", 900, 40),
    }
    ramp = [{"until_tokens": 8 * 24, "global_batch": 4}]
    phases = [
        phase(8, 84, batch_ramp=ramp, mix={"web": 2, "code": 1}),
        phase(20, 30, global_batch=10, micro_batch=1),
        phase(8, 36, mix={"web": 1}),
    ]
    return order_of(corpora, phases)


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    assert not [thread for thread in threading.enumerate() if thread.name == "train-data"]


def loader(order: DataOrder, rank: int = 0, world_size: int = 1, prefetch: int = 0, **keys: Any) -> Loader:
    return Loader(order, rank=rank, world_size=world_size, device=CPU, prefetch=prefetch, **keys)


def steps(loader: Loader, first: int, last: int) -> list[Microbatch]:
    """All microbatches of some steps; ends the loader's thread."""
    with loader:
        return [microbatch for step in range(first, last) for microbatch in loader.microbatches(step)]


def expected(order: DataOrder, step: int) -> torch.Tensor:
    """The sequences of a step, [global_batch, context + 1], from the corpora themselves."""
    here = order.plan.at(step)
    numbers = here.sequence + np.arange(here.global_batch)
    places = zip(*order.at(here.phase_index, numbers), strict=True)
    names = order.data.names
    rows = [order.data.corpora[names[source]].window(int(index), here.phase.context) for source, index in places]
    return torch.from_numpy(np.stack(rows))


def same(ours: list[Microbatch], theirs: list[Microbatch]) -> bool:
    pairs = zip(ours, theirs, strict=True)
    return all(
        (a[:2], a.targets) == (b[:2], b.targets)
        and torch.equal(a.tokens_BS, b.tokens_BS)
        and torch.equal(a.targets_BS, b.targets_BS)
        for a, b in pairs
    )


def whole(pieces: Iterable[Microbatch]) -> list[Microbatch]:
    """Microbatches put together again, in order; later ranks have later sequences of them."""
    together = []
    for _, group in itertools.groupby(sorted(pieces, key=lambda each: each[:2]), key=lambda each: each[:2]):
        parts = list(group)
        tokens, targets = (torch.cat(rows) for rows in zip(*(part[2:4] for part in parts), strict=True))
        together.append(
            parts[0]._replace(tokens_BS=tokens, targets_BS=targets, targets=sum(p.targets for p in parts))
        )
    return together


def test_a_step_is_the_orders_sequences_in_microbatches(order: DataOrder) -> None:
    for step in range(order.plan.total_steps):
        here = order.plan.at(step)
        found = steps(loader(order), step, step + 1)
        assert [microbatch[:2] for microbatch in found] == [(step, j) for j in range(here.microbatches)]
        rows = expected(order, step)
        assert torch.equal(torch.cat([microbatch.tokens_BS for microbatch in found]), rows[:, :-1])
        assert torch.equal(torch.cat([microbatch.targets_BS for microbatch in found]), rows[:, 1:])
        assert {microbatch.tokens_BS.dtype for microbatch in found} == {torch.int64}
        assert {microbatch.targets for microbatch in found} == {here.phase.micro_batch * here.phase.context}


@settings(max_examples=25, deadline=None)
@given(
    world_size=st.integers(1, 7),
    prefetch=st.integers(0, 5),
    data=st.data(),
    read_tokens=st.sampled_from([1, 64, 1 << 18]),
    ordered=st.sampled_from([1, 10, 4096]),
)
def test_any_number_of_ranks_reading_ahead_or_not_from_any_step_on_gets_the_same_microbatches(
    order: DataOrder, world_size: int, prefetch: int, data: st.DataObject, read_tokens: int, ordered: int
) -> None:
    total = order.plan.total_steps
    first = data.draw(st.integers(0, total - 1))
    alone = steps(loader(order), first, total)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reader, "READ_TOKENS", read_tokens)
        patch.setattr(reader, "ORDERED_SEQUENCES", ordered)
        patch.setattr(reader, "FIRST_SEQUENCES", 1 + first % 3)
        shares = [steps(loader(order, rank, world_size, prefetch), first, total) for rank in range(world_size)]
    for rank, share in enumerate(shares):
        due = [share_of(order.plan.at(step), rank, world_size) for step in range(first, total)]
        found = [(each.number, len(each.tokens_BS)) for each in share]
        assert found == [(piece.number, piece.sequences) for pieces in due for piece in pieces]
    assert same(whole(microbatch for share in shares for microbatch in share), alone)


def test_the_step_that_is_waited_for_is_read_before_many_that_follow(
    order: DataOrder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the start, and after a recovery in memory: to order and read thousands of sequences takes longer."""
    assert reader.FIRST_SEQUENCES < reader.ORDERED_SEQUENCES
    monkeypatch.setattr(reader, "FIRST_SEQUENCES", 1)
    here, found = order.plan.at(0), [sum(read.sizes) for read in reader.read_from(order, 0, 0, 1)]
    assert found[0] == here.microbatches * here.phase.micro_batch
    assert max(found) > found[0], "later reads are of several steps"


@pytest.mark.parametrize("prefetch", [0, 3])
def test_steps_may_be_asked_for_in_any_order_and_left_in_the_middle(order: DataOrder, prefetch: int) -> None:
    with loader(order, prefetch=prefetch) as ours:
        for step in (3, 4, 0, 0, 9, 8):
            rows = torch.cat([microbatch.tokens_BS for microbatch in ours.microbatches(step)])
            assert torch.equal(rows, expected(order, step)[:, :-1])
        next(ours.microbatches(5))
        rows = torch.cat([microbatch.tokens_BS for microbatch in ours.microbatches(6)])
        assert torch.equal(rows, expected(order, 6)[:, :-1])


@pytest.mark.parametrize("prefetch", [0, 2])
def test_ranks_without_a_microbatch_get_none(order: DataOrder, prefetch: int) -> None:
    assert order.plan.at(0).microbatches == 2
    with loader(order, rank=2, world_size=3, prefetch=prefetch) as ours:
        assert list(ours.microbatches(0)) == []
        later = next(step for step in range(order.plan.total_steps) if order.plan.at(step).microbatches > 2)
        assert [microbatch.number for microbatch in ours.microbatches(later)] == [2]


def test_documents_are_numbered_where_they_are_kept_apart(tmp_path: Path) -> None:
    with BundleWriter(tmp_path / "tokens.h5", HEADER) as writer:
        for length in (3, 5, 9):
            writer.append(np.array([*range(10, 9 + length), 1]))
    order = order_of({"": Corpus.open(tmp_path / "tokens.h5")}, [phase(16, 2, global_batch=2, micro_batch=1)])
    (first, _) = steps(loader(order, isolate_documents=True), 0, 1)
    assert first.document_BS is not None
    assert first.document_BS.tolist() == [[0] * 3 + [1] * 5 + [2] * 8]
    assert first.bounds_N is not None
    assert (first.bounds_N.dtype, first.bounds_N.tolist()) == (torch.int32, [0, 3, 8, 16])
    (plain, _) = steps(loader(order), 0, 1)
    assert plain.document_BS is plain.bounds_N is None


@pytest.mark.parametrize("prefetch", [0, 2])
def test_masked_targets_are_ignored_and_not_counted(tmp_path: Path, prefetch: int) -> None:
    """One source has a mask, the other has none."""
    with BundleWriter(tmp_path / "asked.h5", HEADER, masked=True) as writer:
        for start in range(10, 300, 10):
            writer.append(np.arange(start, start + 10), np.arange(10) >= 7)
    corpora = {"asked": Corpus.open(tmp_path / "asked.h5"), "web": numbered(tmp_path / "web", 400, first=1000)}
    order = order_of(corpora, [phase(20, 48, mix={"asked": 1, "web": 1})])
    kinds = set()
    for microbatch in steps(loader(order, prefetch=prefetch), 0, order.plan.total_steps):
        tokens, targets = microbatch.tokens_BS, microbatch.targets_BS
        masked = (tokens < 1000) & ((tokens + 1) % 10 < 7)
        assert torch.equal(targets, torch.where(masked, IGNORED_TARGET, tokens + 1))
        assert microbatch.targets == int((~masked).sum())
        kinds.add(microbatch.targets)
    assert kinds == {12, 26, 40}, "two sequences with a mask, one, and none"


# --------------------------------------------------------------------------- the thread


class Watched(TrainingData):
    """Data that count how many sequences were read."""

    def watch(self) -> Watched:
        object.__setattr__(self, "sequences_read", 0)
        return self

    def read(self, sequences: Sequences) -> Any:
        object.__setattr__(self, "sequences_read", self.sequences_read + len(sequences))
        return super().read(sequences)


def test_it_reads_ahead_as_far_as_it_was_told_and_no_further(
    order: DataOrder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "READ_TOKENS", 1)  # one microbatch a read
    data = Watched(order.data.corpora).watch()
    watched = DataOrder(data, order.plan, order.seed)
    with loader(watched, prefetch=3) as ours:
        assert data.sequences_read == 0, "nothing before it is asked for"
        taken = ours.microbatches(0)
        for microbatches in (1, 2):
            next(taken)
            ahead = (microbatches + 3) * 2
            wait_for(lambda wanted=ahead: data.sequences_read >= wanted, "three microbatches")
            assert data.sequences_read == ahead


@pytest.mark.parametrize("prefetch", [0, 2])
def test_what_goes_wrong_in_reading_reaches_the_trainer(tmp_path: Path, prefetch: int) -> None:
    corpus = numbered(tmp_path / "web", 2000)
    with h5py.File(corpus.bundles[0].path, "r+") as file:
        file["tokens"][:] = 65_000
    order = order_of({"": Corpus.open(corpus.path)}, [phase(8, 60)])
    with loader(order, prefetch=prefetch) as ours, pytest.raises(DataError, match="has id 65000"):
        list(ours.microbatches(0))


def test_what_was_read_before_an_error_is_still_delivered(
    order: DataOrder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "READ_TOKENS", 1)
    data = Watched(order.data.corpora).watch()
    whole = steps(loader(order), 0, 1)

    def read(self: Watched, sequences: Sequences) -> Any:
        if self.sequences_read == 2 * len(whole):
            raise OSError(5, "Input/output error")
        return original(self, sequences)

    original = Watched.read
    monkeypatch.setattr(Watched, "read", read)
    with loader(DataOrder(data, order.plan, order.seed), prefetch=8) as ours:
        assert same(list(ours.microbatches(0)), whole)
        with pytest.raises(OSError, match="Input/output error"):
            list(ours.microbatches(1))


def test_it_ends_with_its_block_whatever_happens_there(order: DataOrder) -> None:
    ours = loader(order, prefetch=2)
    with pytest.raises(KeyError), ours:
        next(ours.microbatches(0))
        raise KeyError
    ours.close()
    rows = torch.cat([microbatch.tokens_BS for microbatch in ours.microbatches(1)])
    assert torch.equal(rows, expected(order, 1)[:, :-1]), "it may be used again"
    ours.close()


def test_a_file_system_that_hangs_does_not_hang_the_end(order: DataOrder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zslurm.train.data.loader.CLOSING_S", 0.05)
    answers, asked = threading.Event(), threading.Event()

    def read(self: TrainingData, sequences: Sequences) -> Any:
        asked.set()
        answers.wait()
        return original(self, sequences)

    original = TrainingData.read
    monkeypatch.setattr(TrainingData, "read", read)
    ours = loader(order, prefetch=1)
    waiting = threading.Thread(target=lambda: next(ours.microbatches(0)))
    waiting.start()
    asked.wait()
    # The thread reads before the one that started it has noted down whom to end.
    wait_for(lambda: ours.reads_ahead, "the loader to know its thread")
    ours.close()
    answers.set()
    waiting.join()
    wait_for(lambda: not any(thread.name == "train-data" for thread in threading.enumerate()), "the thread's end")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_gpu_gets_the_same_bits(order: DataOrder, prefetch: int) -> None:
    total = order.plan.total_steps
    there = Loader(order, rank=0, world_size=1, device=torch.device("cuda", 0), prefetch=prefetch)
    found = [
        each._replace(tokens_BS=each.tokens_BS.cpu(), targets_BS=each.targets_BS.cpu())
        for each in steps(there, 0, total)
    ]
    assert same(found, steps(loader(order), 0, total))
