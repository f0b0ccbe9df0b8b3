"""The model over the next tokens of sequences whose caches are in pages."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zslurm.train.inference.next_tokens import Batch, Rows
from zslurm.train.inference.pages import Pages
from zslurm.train.model.block import Stream
from zslurm.train.model.cache import NextTokens
from zslurm.train.model.packing import Packing
from zslurm.train.model.rope import RotaryTable, rotary_table


class Decoder:
    """Computes hidden states of next tokens; logits are `train.model.head.logits` of them.

    Attributes:
        pages: the caches, whose sequences it continues.
    """

    def __init__(self, pages: Pages, rope_base: float) -> None:
        """Continue the sequences of `pages`, rotated with that base."""
        self.pages, self._rope_base = pages, rope_base
        self._table: RotaryTable | None = None

    @torch.inference_mode()
    def hidden(self, slots: Sequence[int], tokens: Sequence[Sequence[int]]) -> Tensor:
        """Return the normed hidden states [T, D] of the next tokens of some sequences, one sequence after another.

        Raises:
            NoPageLeft: see `Pages.reserve`.
        """
        pages = self.pages
        batch = pages.reserve(slots, [len(each) for each in tokens])
        row = [token for each in tokens for token in each]
        length = max(pages.lengths[slot] for slot in slots)
        if batch.is_step and pages.step is not None:
            self._set(batch, None)
            embedded_TD = pages.model.embedding(torch.tensor(row, device=pages.device))
            return pages.step(embedded_TD, self._angles(length), batch.position_T.unsqueeze(1), None)
        reach = pages.layers[0].before.shape[1]
        rows = Rows.of(batch.counts, reach, pages.device)
        self._set(batch, rows)
        # Any position does for the rows before, whose queries and keys are dropped.
        position_X = torch.cat([batch.position_T.new_zeros(len(slots) * reach), batch.position_T])
        return self.through(row, position_X.index_select(0, rows.extended_X), length, pages.layers)

    @torch.inference_mode()
    def through(
        self, tokens: Sequence[int], position_X: Tensor, length: int, parts: Sequence[NextTokens]
    ) -> Tensor:
        """Return the normed hidden states [T, D] of a row of tokens, of which `parts` know what they follow.

        Args:
            tokens: the row.
            position_X: positions of the rows that `parts` make of it for the convolutions.
            length: no position is as large.
            parts: of each layer.
        """
        model, table = self.pages.model, self._angles(length)
        packing = Packing(RotaryTable(*(part.index_select(0, position_X) for part in table)))
        embedded_TD = model.embedding(torch.tensor(tokens, device=self.pages.device))
        stream = Stream(hidden_BSD=embedded_TD.unsqueeze(0), residual_BSD=None, router_TR=None)
        for layer, bias_C, part in zip(model.all_layers(), model.balancing_bias, parts, strict=True):
            stream, _ = layer.forward(stream, packing, bias_C, part)  # as it is, even where calls are compiled
        x_1TD, _ = model.head_entry(stream.hidden_BSD, stream.residual_BSD)
        return x_1TD[0]

    def _set(self, batch: Batch, rows: Rows | None) -> None:
        for part in self.pages.layers:
            part.batch, part.rows = batch, rows

    def _angles(self, length: int) -> RotaryTable:
        if self._table is None or len(self._table.cos_SA) < length:
            model = self.pages.model
            wide = torch.promote_types(model.embedding.weight.dtype, torch.float32)
            position_S = torch.arange(max(1024, 2 * length), device=self.pages.device)
            self._table = rotary_table(position_S, model.config.rotary_dim, self._rope_base, wide)
        return self._table
