"""Compute next tokens of many sequences, any number of each, in one pass without padding.

The tokens are in one row of the batch [1, T], sequence after sequence, so that projections, norms, router, experts
and head see no padding. Inside of attention three things know of sequences:

    convolutions    before each sequence's tokens go the projections of those before them, as where ranks share a
                    sequence (`train/context/halos.py`); what becomes of these is dropped
    value shift     the first token of each sequence gets what its last one left
    attention       queries [B, H, N, P] padded to the longest of them. Where all sequences begin, keys are those
                    of the batch and causality is all it takes; else they are gathered from the pages and masked.

All indices are made once for a batch and serve every layer (`Batch`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from zslurm.kernels.qk_conv import JoinedKernel, qk_conv
from zslurm.train.model.attention_backends.sdpa import attend
from zslurm.train.model.cache import Slots
from zslurm.train.model.rope import RotaryTable


class Batch(NamedTuple):
    """Where the next tokens of some sequences are, and what they see. `counts` of all ones make a plain step.

    Attributes:
        slots: of the sequences, on the host.
        starts: tokens that each had.
        counts: tokens that each gets.
        slot_B: the same as `slots`, on the device.
        position_T: position of each token in its sequence.
        write_T: where each token's keys go among all places of all pages.
        table_BN: the pages of each sequence, as many as the longest has; page 0 where it has fewer.
        seen_BNS: which query of a sequence sees which key of it; None: all of them see all.
        last_B: of each sequence its last token in the row.
    """

    slots: tuple[int, ...]
    starts: tuple[int, ...]
    counts: tuple[int, ...]
    slot_B: Tensor
    position_T: Tensor
    write_T: Tensor
    table_BN: Tensor
    seen_BNS: Tensor | None
    last_B: Tensor

    @classmethod
    def of(
        cls,
        slots: Sequence[int],
        starts: Sequence[int],
        counts: Sequence[int],
        tables: Sequence[Sequence[int]],
        page: int,
        device: torch.device,
    ) -> Batch:
        """Work the indices out on the host, and bring them to the device."""
        start_B, count_B = torch.tensor(starts), torch.tensor(counts)
        end_B = start_B + count_B
        token_BN = torch.arange(max(counts))
        position_BN = start_B.unsqueeze(1) + token_BN
        is_token_BN = token_BN < count_B.unsqueeze(1)
        pages = -(-int(end_B.max()) // page)
        table_BN = torch.zeros(len(slots), pages, dtype=torch.long)
        for row, table in zip(table_BN, tables, strict=True):
            row[: len(table)] = torch.tensor(table, dtype=torch.long)
        position_T = position_BN[is_token_BN]
        row_T = torch.arange(len(slots)).repeat_interleave(count_B)
        write_T = table_BN[row_T, position_T // page] * page + position_T % page
        seen_BNS = None
        if any(starts) and (max(counts) > 1 or len(set(starts)) > 1):
            seen_BNS = position_BN.unsqueeze(2) >= torch.arange(int(end_B.max()))
        moved = (torch.tensor(slots), position_T, write_T, table_BN, seen_BNS, count_B.cumsum(0) - 1)
        on_device = [None if each is None else each.to(device, non_blocking=True) for each in moved]
        return cls(tuple(slots), tuple(starts), tuple(counts), *on_device)  # type: ignore[arg-type]

    @property
    def is_step(self) -> bool:
        """Return whether each sequence gets one token."""
        return max(self.counts) == 1

    @property
    def is_fresh(self) -> bool:
        """Return whether all of the sequences begin."""
        return not any(self.starts)


class Rows(NamedTuple):
    """Where tokens and their padding are, with `reach` tokens before each sequence.

    Attributes:
        extended_X: for each row of the extended batch, its place among [all rows before, all tokens].
        token_T: place of each token in the extended batch.
        kept_BW: of each sequence the last `reach` rows of the extended batch.
        previous_T: for each token the place of the one before among [what each sequence left, all tokens].
        padded_BN: for each query of a padded batch its place in the extended batch.
        unpadded_T: for each token its place in a flat padded batch.
    """

    extended_X: Tensor
    token_T: Tensor
    kept_BW: Tensor
    previous_T: Tensor
    padded_BN: Tensor
    unpadded_T: Tensor

    @classmethod
    def of(cls, counts: Sequence[int], reach: int, device: torch.device) -> Rows:
        """Work them out on the host, and bring them to the device."""
        count_B = torch.tensor(counts)
        first_B = count_B.cumsum(0) - count_B
        row_T = torch.arange(len(counts)).repeat_interleave(count_B)
        token_T = torch.arange(int(count_B.sum()))
        # In the extended batch each sequence is behind (its number + 1) * reach rows more.
        extended_T = token_T + (row_T + 1) * reach
        before_BW = (first_B + torch.arange(len(counts)) * reach).unsqueeze(1) + torch.arange(reach)
        extended_X = torch.empty(len(token_T) + before_BW.numel(), dtype=torch.long)
        extended_X[before_BW.flatten()] = torch.arange(before_BW.numel())
        extended_X[extended_T] = before_BW.numel() + token_T
        end_B = (first_B + count_B) + (torch.arange(len(counts)) + 1) * reach
        kept_BW = end_B.unsqueeze(1) - reach + torch.arange(reach)
        previous_T = len(counts) + token_T - 1
        previous_T[first_B] = torch.arange(len(counts))
        longest = max(counts)
        inside_BN = torch.arange(longest).clamp(max=count_B.unsqueeze(1) - 1)
        padded_BN = extended_T[first_B.unsqueeze(1) + inside_BN]
        unpadded_T = row_T * longest + token_T - first_B[row_T]
        made = (extended_X, extended_T, kept_BW, previous_T, padded_BN, unpadded_T)
        return cls(*(each.to(device, non_blocking=True) for each in made))


@dataclass
class PagedLayer:
    """One layer's part of all caches; a `NextTokens` for the batch that is set.

    Attributes:
        projection_QD: the layer's four projections as one matrix.
        kernel: both convolutions as one.
        keys: rotated keys [pages, tokens of a page, J, P].
        values: the same.
        before: projections of the last tokens of each slot [slots, W, Q].
        delayed: what the last token of each slot leaves for the next one's values [slots, 1, half].
        batch: the sequences whose next tokens are computed.
        rows: where their tokens are; None for a plain step.
    """

    projection_QD: Tensor
    kernel: JoinedKernel
    keys: Tensor
    values: Tensor
    before: Tensor
    delayed: Tensor
    batch: Batch | None = None
    rows: Rows | None = None

    @property
    def before_BWQ(self) -> Tensor:  # noqa: N802  # shapes
        """Return what the batch's sequences have."""
        return self.before.index_select(0, self._batch.slot_B)

    @before_BWQ.setter
    def before_BWQ(self, new_BWQ: Tensor) -> None:  # noqa: N802
        self.before.index_copy_(0, self._batch.slot_B, new_BWQ)

    @property
    def delayed_B1Q(self) -> Tensor:  # noqa: N802  # shapes
        """Return what the batch's sequences have."""
        return self.delayed.index_select(0, self._batch.slot_B)

    @delayed_B1Q.setter
    def delayed_B1Q(self, new_B1Q: Tensor) -> None:  # noqa: N802
        self.delayed.index_copy_(0, self._batch.slot_B, new_B1Q)

    def convolve(self, z_1TQ: Tensor, temperature_J: Tensor, rotary: RotaryTable) -> tuple[Tensor, Tensor]:
        """Return queries and keys [1, H, X, P] of the extended batch; `rotary` is that of its rows."""
        rows = self._rows
        both_YQ = torch.cat([self.before_BWQ.flatten(0, 1), z_1TQ[0]])
        z_XQ = both_YQ.index_select(0, rows.extended_X)
        if rows.kept_BW.numel():
            self.before_BWQ = z_XQ.index_select(0, rows.kept_BW.flatten()).view(*rows.kept_BW.shape, -1)
        return qk_conv(z_XQ.unsqueeze(0), self.kernel, temperature_J, *rotary)

    def shift(self, delayed_1TQ: Tensor) -> Tensor:
        """Return the token before's share of each token's values."""
        both_YQ = torch.cat([self.delayed_B1Q[:, 0], delayed_1TQ[0]])
        self.delayed_B1Q = delayed_1TQ[0].index_select(0, self._batch.last_B).unsqueeze(1)
        return both_YQ.index_select(0, self._rows.previous_T).unsqueeze(0)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, slots: Slots | None) -> Tensor:
        """Add keys and values, and return the attention of each query.

        For a plain step all are [B, H, 1, P]; else queries and keys are those of the extended batch [1, H, X, P],
        values those of the tokens, and so is what is returned [1, H, T, P].
        """
        batch = self._batch
        if self.rows is None:
            self._keep(k[:, :, 0], v[:, :, 0])
            return self._attend_in_pages(q)
        rows = self.rows
        k_JTP, v_JTP = k[0].index_select(1, rows.token_T), v[0]
        self._keep(k_JTP.transpose(0, 1), v_JTP.transpose(0, 1))
        if len(batch.slots) == 1:
            q_BHNP = q[:, :, rows.token_T] if rows.kept_BW.numel() else q
        else:
            q_BHNP = (
                q[0].index_select(1, rows.padded_BN.flatten()).unflatten(1, rows.padded_BN.shape).transpose(0, 1)
            )
        if batch.is_fresh:
            if len(batch.slots) == 1:
                k_BJNP, v_BJNP = k_JTP.unsqueeze(0), v
            else:
                place_T = rows.unpadded_T
                k_BJNP, v_BJNP = (_padded(each, place_T, rows.padded_BN.shape) for each in (k_JTP, v_JTP))
            y_BNHP = attend(q_BHNP, k_BJNP, v_BJNP, None).unflatten(-1, (q.shape[1], -1))
        else:
            y_BNHP = self._attend_in_pages(q_BHNP).transpose(1, 2)
        return y_BNHP.flatten(0, 1).index_select(0, rows.unpadded_T).transpose(0, 1).unsqueeze(0)

    def _keep(self, k_TJP: Tensor, v_TJP: Tensor) -> None:
        self.keys.flatten(0, 1).index_copy_(0, self._batch.write_T, k_TJP)
        self.values.flatten(0, 1).index_copy_(0, self._batch.write_T, v_TJP)

    def _attend_in_pages(self, q_BHNP: Tensor) -> Tensor:
        """Return [B, H, N, P]: queries see keys of their sequence up to themselves."""
        batch = self._batch
        longest = max(start + count for start, count in zip(batch.starts, batch.counts, strict=True))
        k_BJSP, v_BJSP = (
            pool.index_select(0, batch.table_BN.flatten())
            .view(len(batch.slots), -1, *pool.shape[2:])[:, :longest]
            .transpose(1, 2)
            for pool in (self.keys, self.values)
        )
        seen_BNS = batch.seen_BNS
        if q_BHNP.shape[2] == 1:
            # Query heads of one key head are like positions that all see the same keys.
            q_BJGP = q_BHNP.flatten(1, 2).unflatten(1, (k_BJSP.shape[1], -1))
            mask = None if seen_BNS is None else seen_BNS.unsqueeze(1)
            return F.scaled_dot_product_attention(q_BJGP, k_BJSP, v_BJSP, mask).view(q_BHNP.shape)
        mask = None if seen_BNS is None else seen_BNS.unsqueeze(1)
        return F.scaled_dot_product_attention(
            q_BHNP, k_BJSP, v_BJSP, mask, is_causal=mask is None, enable_gqa=True
        )

    @property
    def _batch(self) -> Batch:
        assert self.batch is not None
        return self.batch

    @property
    def _rows(self) -> Rows:
        assert self.rows is not None
        return self.rows


def _padded(x_JTP: Tensor, place_T: Tensor, shape: torch.Size) -> Tensor:
    """[J, T, P] as [B, J, N, P] with zeros as padding."""
    flat_JYP = x_JTP.new_zeros(x_JTP.shape[0], shape[0] * shape[1], x_JTP.shape[2])
    flat_JYP.index_copy_(1, place_T, x_JTP)
    return flat_JYP.unflatten(1, tuple(shape)).transpose(0, 1)
