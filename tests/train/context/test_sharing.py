"""What sharing sequences costs and saves: bytes sent, tensors kept for backward; and that it can be compiled."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.train.models import ROPE_BASE, scrambled, tiny_config, tokens
from tests.train.ranks import in_group
from zslurm.train.context.bytes import context_bytes
from zslurm.train.context.context_parallel import ContextParallel, context_groups
from zslurm.train.errors import ConfigError
from zslurm.train.model.zaya import Zaya

Sent = tuple[int, int]


def loss_of(model: Zaya, context: ContextParallel | None, batch: int, length: int) -> Tensor:
    tokens_BS = tokens(model.config, batch, length)
    losses, _ = model.losses(tokens_BS, tokens_BS, rope_base=ROPE_BASE, context=context)
    return losses.objective


def sent_by(group: dist.ProcessGroup, attention: str, dtype: torch.dtype, batch: int, length: int) -> Sent:
    """Bytes of a forward and of a backward pass."""
    context = ContextParallel(group, attention)  # type: ignore[arg-type]
    model = scrambled(tiny_config(), dtype)
    loss = loss_of(model, context, batch, length)
    forward = context.sent.total()
    loss.backward()
    return forward, context.sent.total() - forward


@pytest.mark.parametrize(
    ("ranks", "attention", "dtype", "length"),
    [(2, "ring", torch.bfloat16, 40), (3, "all_gather", torch.float64, 37), (3, "ring", torch.float32, 36)],
)
def test_bytes_sent_are_those_of_the_formula(ranks: int, attention: str, dtype: torch.dtype, length: int) -> None:
    config, batch = tiny_config(), 2
    formula = context_bytes(config, length, batch, ranks, attention, dtype.itemsize)  # type: ignore[arg-type]
    sent = in_group(sent_by, ranks, attention, dtype, batch, length)
    assert max(forward for forward, _ in sent) == config.layers * formula.forward
    assert max(backward for _, backward in sent) == config.layers * formula.backward


def kept_by(group: dist.ProcessGroup, sizes: list[int], attention: str, length: int) -> list[int]:
    """Bytes kept for backward, next to weights, if groups of these sizes share a sequence."""
    groups, kept = context_groups(sizes), []
    model = scrambled(tiny_config(hidden_size=24), torch.float32)
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    for size in sizes:
        storages: dict[int, int] = {}

        def keep(x: Tensor) -> Tensor:
            storage = x.untyped_storage()
            if storage.data_ptr() not in weights:
                storages[storage.data_ptr()] = storage.nbytes()  # noqa: B023
            return x

        alone = (
            dist.new_subgroups_by_enumeration([[rank] for rank in range(group.size())])[0] if size == 1 else None
        )
        context = ContextParallel(alone) if alone is not None else groups[size]
        context = ContextParallel(context.group, attention)  # type: ignore[arg-type]
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            loss_of(model, context, 1, length).backward()
        kept.append(sum(storages.values()))
    return kept


@pytest.mark.parametrize("attention", ["ring", "all_gather"])
def test_what_is_kept_for_backward_falls_as_ranks_share_it(attention: str) -> None:
    for kept in in_group(kept_by, 4, [1, 2, 4], attention, 1024):
        assert kept[0] / kept[1] == pytest.approx(2, rel=0.02)
        assert kept[0] / kept[2] == pytest.approx(4, rel=0.04)


def compiled(group: dist.ProcessGroup) -> list[float]:
    """Loss and gradient norm of a compiled and of an eager model."""
    found = []
    for is_compiled in (False, True):
        model = scrambled(tiny_config(layers=1))
        model.run_with(compile=is_compiled, context_parallel=True, backend="eager")
        loss = loss_of(model, ContextParallel(group), 1, 16)
        loss.backward()
        norms = [x.grad.norm() for x in model.parameters() if x.grad is not None]
        found += [loss.item(), torch.stack(norms).norm().item()]
    return found


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.soak)])
def test_a_compiled_layer_ends_its_graphs_where_ranks_communicate(ranks: int) -> None:
    for loss, norm, compiled_loss, compiled_norm in in_group(compiled, ranks):
        assert compiled_loss == pytest.approx(loss, rel=1e-9)
        assert compiled_norm == pytest.approx(norm, rel=1e-9)


def refusals(group: dist.ProcessGroup) -> list[str]:
    """What sequences that are too short are refused with."""
    messages = []
    for widths, length in (((2, 2), 3), ((3, 4), 16)):
        model = scrambled(tiny_config(conv_widths=widths))
        with pytest.raises(ConfigError) as error:
            loss_of(model, ContextParallel(group), 1, length)
        messages.append(str(error.value))
    return messages


def test_sequences_too_short_to_be_shared_are_refused_in_one_line() -> None:
    for few, narrow in in_group(refusals, 2):
        assert few.startswith("context_parallel: 2 cuts a sequence into 4 chunks, but it has 3 tokens")
        assert narrow.startswith("context_parallel: 2 cuts a sequence of 16 tokens into chunks of 4")


def groups_made(group: dist.ProcessGroup) -> tuple[int, list[list[int]]]:
    """Return how many groups a rank takes part in making, and the ranks of the group that it is in."""
    made, new_group = [], dist.new_group
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "new_group", lambda *args, **kwargs: made.append(args) or new_group(*args, **kwargs))
        groups = context_groups([1, 2, 4, 2])
    return len(made), [dist.get_process_group_ranks(each.group) for each in groups.values()]


def test_a_rank_makes_its_own_groups_alone() -> None:
    """With NCCL each further group is a collective of all ranks: hundreds of them, made one after the other."""
    for rank, (made, groups) in enumerate(in_group(groups_made, 4)):
        first = rank // 2 * 2
        assert (made, groups) == (2, [[first, first + 1], [0, 1, 2, 3]])
