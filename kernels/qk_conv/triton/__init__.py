"""Make queries and keys on a GPU in one kernel, and their gradients in one more and a sum.

The forward's workgroup computes some tokens of one sequence and one head: the products of its window, tap by tap,
each tap's rows loaded from their place in memory; then skip, norm, temperature and rotation, in fp32.

The gradient needs, of each output, du = s (g - u (u g) / |u|^2), g being the gradient turned back and s the scale.
The forward keeps u in fp32 and s, so du is a few operations on what is loaded, and every workgroup computes the du
that it needs, shifted by a tap or of another head. The backward's launch has workgroups of two kinds:

    of weights      one head, one tap and every so many tokens: z^T du, and the sums for bias and temperature. What
                    it sums up is one row of partial sums; torch adds the rows: no atomics, always the same bits
    of inputs       some tokens of one head: du of the tokens ahead times the weight, and the skip's part

The first kind has more to do and comes first. Of windows, or of du, nothing is written to memory.
"""

from __future__ import annotations

from zslurm.kernels.qk_conv.triton.backward import backward
from zslurm.kernels.qk_conv.triton.forward import forward
from zslurm.kernels.qk_conv.triton.launches import launches

__all__ = ["backward", "forward", "launches"]
