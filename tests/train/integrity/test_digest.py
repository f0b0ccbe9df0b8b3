"""Digests of bits: any bit counts, and where it is."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.train.integrity.flips import flip
from tests.train.ranks import in_group
from zslurm.train.integrity.digest import ROW, digest, digest_of_weights, mixed
from zslurm.train.parallel.comm import Comm


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8])
@pytest.mark.parametrize("elements", [0, 1, 7, 4099, 3 * 8 * ROW + 5])
def test_a_flipped_bit_changes_the_digest(dtype: torch.dtype, elements: int) -> None:
    values = torch.arange(elements).to(dtype)
    before = digest(values)
    assert torch.equal(before, digest(values.clone()))
    if dtype == torch.uint8 or not elements:
        return
    for element in {0, elements // 2, elements - 1}:
        for bit in (0, 8 * dtype.itemsize - 1):
            flip(values, element, bit)
            assert digest(values) != before, (element, bit)
            flip(values, element, bit)
    assert torch.equal(digest(values), before)


def test_a_part_of_a_buffer_has_the_digest_of_its_copy() -> None:
    buffer = torch.randn(5000, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    for start in range(5):
        assert torch.equal(digest(buffer[start:]), digest(buffer[start:].clone()))


def test_rows_and_tensors_that_change_places_change_the_digest() -> None:
    values = torch.arange(4 * ROW)
    swapped = torch.cat([values[ROW : 2 * ROW], values[:ROW], values[2 * ROW :]])
    assert digest(values) != digest(swapped)
    assert mixed(torch.tensor([3, 5])) != mixed(torch.tensor([5, 3]))


def _digests_of_ranks(group: dist.ProcessGroup) -> list[str]:
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(300, 4), nn.Linear(2, 2))
    return [digest_of_weights(model), digest_of_weights(model, Comm(group))]


def test_ranks_that_read_a_part_each_get_the_digest_of_one_that_reads_all() -> None:
    values = [value for pair in in_group(_digests_of_ranks, 3) for value in pair]
    assert len(values) == 6
    assert len(set(values)) == 1
