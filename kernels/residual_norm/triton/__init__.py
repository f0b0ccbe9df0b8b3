"""Join two streams and normalise their sum on a GPU: one kernel forward, two backward.

Forward, every row is read once and written once. A tile of a workgroup is one row of up to 8,192 elements, or
several rows if those are narrow, and is held in registers; longer rows are read in pieces, twice, for LayerNorm
three times, of which all but the first mostly come from a cache.

Backward, the rows' kernel recomputes t from both streams, which it needs anyway for the gradients of their scales,
instead of reading it. Each workgroup adds up the gradients of scales, biases and weights over its rows and writes
them once; a second kernel adds up these partial sums, in an order that depends on the number of rows and the card
alone: the result has the same bits every time. Of long rows, a workgroup takes 16 together, piece by piece, twice.

The grid is persistent: no more workgroups than keep the card's compute units busy, each with every n-th tile.
"""

from __future__ import annotations

from zslurm.kernels.residual_norm.triton.backward import backward
from zslurm.kernels.residual_norm.triton.forward import forward
from zslurm.kernels.residual_norm.triton.launches import launches

__all__ = ["backward", "forward", "launches"]
