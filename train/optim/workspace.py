"""How many matrices Muon works on at once, and the memory that takes. Pure arithmetic, without torch.

Of the matrices of one shape, as many are worked on together as keep the temporary tensors of a step within
`CHUNK_BYTES` (one matrix alone may need more). Small matrices then share their calls, and the temporary memory of
a step does not grow with the model. On a CPU it is less: what is worked on should stay in the caches.

For one matrix of m x n elements, s the shorter side, in formats of b bytes (products) and w bytes (masters):

    input and result of the steps          b m n
    the steps' other end, two squares      b (m n + 2 s^2)
    or, before and after the steps, a copy w m n
"""

from __future__ import annotations

CHUNK_BYTES = 256 * 2**20
"""Bytes of temporary tensors on an accelerator."""

CPU_CHUNK_BYTES = 8 * 2**20
"""Bytes of temporary tensors on a CPU."""


def update_bytes(rows: int, columns: int, itemsize: int, master_itemsize: int) -> int:
    """Return the bytes of all temporary tensors of one matrix's Muon step."""
    elements = rows * columns
    steps = itemsize * (elements + 2 * min(rows, columns) ** 2)
    return itemsize * elements + max(steps, master_itemsize * elements)


def matrices_at_once(bytes_per_matrix: int, device_type: str) -> int:
    """Return how many matrices are worked on together: at least one."""
    limit = CPU_CHUNK_BYTES if device_type == "cpu" else CHUNK_BYTES
    return max(1, limit // max(1, bytes_per_matrix))
