"""Ranks that share sequences compute what one rank computes: the loss, the load of the experts, every gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.train.models import ROPE_BASE, scrambled, tiny_config, tokens
from tests.train.ranks import in_group
from zslurm.train.context.context_parallel import ContextParallel
from zslurm.train.model.head import IGNORED_TARGET
from zslurm.train.model.zaya import Zaya

WIDTHS = [(2, 2), (3, 4), (1, 1)]
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}


@dataclass(frozen=True)
class Case:
    """A microbatch, and how it is computed."""

    length: int
    batch: int
    attention: Literal["ring", "all_gather", "auto"]
    dtype: torch.dtype
    widths: tuple[int, int]
    documents: bool
    padding: bool
    recompute: bool
    seed: int

    def model(self) -> Zaya:
        """Make the same model on every rank."""
        model = scrambled(tiny_config(conv_widths=self.widths, vocab_size=13), self.dtype)
        model.run_with(recompute=self.recompute)
        return model

    def microbatch(self) -> dict[str, Tensor | None]:
        """Make the same sequences on every rank, with some targets that do not count."""
        config = tiny_config(vocab_size=13)
        generator = torch.Generator().manual_seed(self.seed)
        shape = (self.batch, self.length)
        drawn = torch.rand(3, *shape, generator=generator)
        targets = tokens(config, self.batch, self.length, self.seed + 1)
        return {
            "tokens_BS": tokens(config, self.batch, self.length, self.seed),
            "targets_BS": targets.masked_fill(drawn[0] < 0.2, IGNORED_TARGET),
            "document_BS": (drawn[1] < 0.2).long().cumsum(1) if self.documents else None,
            "valid_BS": drawn[2] < 0.8 if self.padding else None,
        }


Result = tuple[float, np.ndarray[Any, Any], dict[str, np.ndarray[Any, Any]]]


def trained(case: Case, context: ContextParallel | None) -> Result:
    """Loss, counts and gradients of a microbatch: this rank's part."""
    model = case.model()
    losses, counts = model.losses(**case.microbatch(), rope_base=ROPE_BASE, z_weight=0.01, context=context)  # type: ignore[arg-type]
    losses.objective.backward()
    gradients = {name: x.grad.double().numpy() for name, x in model.named_parameters() if x.grad is not None}
    return losses.objective.item(), counts.numpy(), gradients


def trained_together(group: dist.ProcessGroup, cases: list[Case]) -> list[Result]:
    return [trained(case, ContextParallel(group, case.attention)) for case in cases]


def check(case: Case, parts: list[Result]) -> None:
    """Compare the sum of all ranks' parts with one rank's result."""
    loss, counts, gradients = trained(case, None)
    tolerance = TOLERANCE[case.dtype]
    assert sum(part[0] for part in parts) == pytest.approx(loss, rel=tolerance)
    assert np.array_equal(sum(part[1] for part in parts), counts)
    norm = np.sqrt(sum(np.square(gradient).sum() for gradient in gradients.values()))
    for name, gradient in gradients.items():
        difference = np.linalg.norm(sum(part[2][name] for part in parts) - gradient)
        assert difference <= tolerance * norm, (name, case)


def cases(ranks: int) -> st.SearchStrategy[Case]:
    def any_of(shortest: int, widths: tuple[int, int]) -> st.SearchStrategy[Case]:
        return st.builds(
            Case,
            length=st.integers(shortest, shortest + 24),
            batch=st.integers(1, 2),
            attention=st.sampled_from(["ring", "all_gather"]),
            dtype=st.sampled_from([torch.float64, torch.float64, torch.float32]),
            widths=st.just(widths),
            documents=st.booleans(),
            padding=st.booleans(),
            recompute=st.booleans(),
            seed=st.integers(0, 1000),
        )

    return st.sampled_from(WIDTHS).flatmap(
        lambda widths: any_of(max(2 * ranks, 2 * ranks * (sum(widths) - 3) + 1), widths)
    )


def check_drawn(ranks: int, data: st.DataObject, number: int) -> None:
    drawn = data.draw(st.lists(cases(ranks), min_size=number, max_size=number))
    for case, *parts in zip(drawn, *in_group(trained_together, ranks, drawn), strict=True):
        check(case, parts)


# To shrink an example would take minutes.
PHASES = [Phase.explicit, Phase.generate]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@settings(max_examples=1, deadline=None, phases=PHASES)
@given(data=st.data())
def test_loss_and_every_gradient_are_those_of_one_rank(ranks: int, data: st.DataObject) -> None:
    check_drawn(ranks, data, 8)


@pytest.mark.soak
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5])
@settings(max_examples=5, deadline=None, phases=PHASES)
@given(data=st.data())
def test_the_same_at_length(ranks: int, data: st.DataObject) -> None:
    check_drawn(ranks, data, 30)
