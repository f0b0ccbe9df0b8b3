"""Digests of tensors: one 64-bit number, from the bits, the same on every device.

The bits are read as 64-bit words in rows of ROW. The sum of each row, modulo 2^64, is multiplied by an odd number
that belongs to the row, and the products are added, modulo 2^64:

    one bit that differs       changes the digest for certain: 2^b times an odd number is not 0 modulo 2^64
    other differences          are missed by chance once in 2^64
    words that change places   inside of one row are missed; whole rows are not

The cost is one pass over the memory; nothing is copied but the last few elements.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from heapq import heappop, heappush

import torch
from torch import Tensor, nn

from zslurm.train.parallel.comm import Comm

ROW = 1024
"""64-bit words of a row: 8 KiB."""
_FACTOR = -7046029254386353131  # 2^64 divided by the golden ratio, which is odd; as a signed number
_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def digest(values: Tensor) -> Tensor:
    """Return the digest of a contiguous tensor's bits, an int64 scalar of its device."""
    flat = values.detach().reshape(-1)
    words, rest = _words(flat)
    rows = len(words) // ROW
    sums = [words[: rows * ROW].view(rows, ROW).sum(1), words[rows * ROW :].sum().view(1), rest.sum().view(1)]
    return mixed(torch.cat(sums))


def digests(tensors: Sequence[Tensor]) -> Tensor:
    """Return the digest of each tensor, int64 [n]."""
    return torch.stack([digest(values) for values in tensors])


def digest_of_weights(model: nn.Module, comm: Comm | None = None) -> str:
    """Return the digest of a model's parameters, which all must be there: the same on any number of ranks.

    With `comm` its ranks, which hold the same weights, call it together, and each reads a part of them.
    """
    weights = [parameter for _, parameter in sorted(model.named_parameters())]
    rank, size = (0, 1) if comm is None else (comm.rank, comm.size)
    is_read = [reader == rank for reader in _readers([parameter.numel() for parameter in weights], size)]
    sums = torch.zeros(len(weights), dtype=torch.int64, device=weights[0].device)
    if any(is_read):
        sums[torch.tensor(is_read, device=sums.device)] = digests(
            [parameter for parameter, read in zip(weights, is_read, strict=True) if read]
        )
    if comm is not None:
        comm.all_reduce(sums)
    return hashlib.sha256(sums.cpu().numpy().tobytes()).hexdigest()[:32]


def _readers(sizes: Sequence[int], ranks: int) -> list[int]:
    """Return which rank reads each tensor: the largest first, each by the rank that has least to read."""
    loads, readers = [(0, rank) for rank in range(ranks)], [0] * len(sizes)
    for number in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        load, readers[number] = heappop(loads)
        heappush(loads, (load + sizes[number], readers[number]))
    return readers


def mixed(sums: Tensor) -> Tensor:
    """Return one number for numbers in their order, int64 each."""
    places = torch.arange(len(sums), dtype=torch.int64, device=sums.device)
    return (sums * ((2 * places + 1) * _FACTOR)).sum()


def _words(flat: Tensor) -> tuple[Tensor, Tensor]:
    """Return the bits as 64-bit words, and the last few elements as integers."""
    whole = 8 // flat.element_size()
    bits = flat.view(_INTEGER[flat.element_size()])
    count = len(bits) // whole * whole
    head = bits[:count]
    if whole > 1 and head.storage_offset() % whole:
        head = head.clone()
    return (head if whole == 1 else head.view(torch.int64)), bits[count:].to(torch.int64)
