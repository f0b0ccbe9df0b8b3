"""What both passes work on, the convolutions as one."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class ConvolutionOperands(NamedTuple):
    """The tensors of one call; h counts query heads, then key heads.

    Attributes:
        z_BSQ: projected queries and keys, side by side.
        weight_hIP: of the joined kernel, for windows of I = taps * P channels.
        bias_hP: of the joined kernel.
        temperature_J: of each key head.
        cos: [S, A] or [B, S, A].
        sin: likewise.
        seen_BSW: whether a token sees each of those before it, itself first; None if it sees all.
        before_BWQ: z of the tokens before the first, or None for zeros.
    """

    z_BSQ: Tensor
    weight_hIP: Tensor
    bias_hP: Tensor
    temperature_J: Tensor
    cos: Tensor
    sin: Tensor
    seen_BSW: Tensor | None
    before_BWQ: Tensor | None

    @property
    def mixed_shape(self) -> tuple[int, int, int, int]:
        """Return the shape [h, B, S, P] of what the norm takes."""
        (heads, _, head_dim), (batch, length, _) = self.weight_hIP.shape, self.z_BSQ.shape
        return heads, batch, length, head_dim

    def empty(self, keeps: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return queries, keys, and what the gradient takes, without elements unless the forward `keeps` it."""
        heads, batch, length, head_dim = self.mixed_shape
        keys = self.temperature_J.shape[0]
        kept = heads if keeps else 0
        return (
            self.z_BSQ.new_empty(batch, heads - keys, length, head_dim),
            self.z_BSQ.new_empty(batch, keys, length, head_dim),
            self.bias_hP.new_empty(kept, batch, length, head_dim),
            self.bias_hP.new_empty(kept, batch, length, 1),
        )
