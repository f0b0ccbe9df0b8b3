"""Contexts that each continue in several ways, in one pass: a row of the batch is a small tree, without a cache.

    row             the context's tokens, then those of each continuation; the next row follows without padding
    positions       a continuation's follow the context's last one
    convolutions    before a continuation's tokens go the projections of the context's last ones, as rows that are
                    dropped again; the value shift takes them from there as well
    attention       rows padded to the longest; a token sees its context, and its own continuation before it

All rows can follow one sequence that has been read already (few-shot examples): its keys are seen by all of them.

Compared with reading contexts first and continuing forks of their caches, half of the passes are left, and nothing
is copied. The mask takes (longest row)² for each row, so this is for short ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from zslurm.kernels.qk_conv import JoinedKernel, qk_conv
from zslurm.train.inference.forward import Decoder
from zslurm.train.inference.next_tokens import PagedLayer
from zslurm.train.inference.pages import Pages
from zslurm.train.model.cache import Slots
from zslurm.train.model.rope import RotaryTable

Tokens = tuple[int, ...]


class Tree(NamedTuple):
    """A context, at least one token, and its continuations, which may be empty."""

    context: Tokens
    branches: tuple[Tokens, ...]

    @property
    def size(self) -> int:
        """Return its tokens."""
        return len(self.context) + sum(map(len, self.branches))


class TreeBatch(NamedTuple):
    """Where the tokens of some trees are, and what they see; the same for every layer.

    Attributes:
        tokens: of all trees, one after another.
        position_X: position of each row of the extended batch.
        extended_X: for each row of the extended batch its place among [the rows before, all tokens].
        token_T: place of each token in the extended batch.
        previous_T: for each token the place of the one before among [what the sequence before left, all tokens].
        padded_BN: for each place of the padded batch its token.
        unpadded_T: for each token its place in the flat padded batch.
        seen_B1NS: which token of a tree sees which key; keys of the sequence before come first.
    """

    tokens: list[int]
    position_X: Tensor
    extended_X: Tensor
    token_T: Tensor
    previous_T: Tensor
    padded_BN: Tensor
    unpadded_T: Tensor
    seen_B1NS: Tensor

    @classmethod
    def of(cls, trees: Sequence[Tree], before: int, reach: int, device: torch.device) -> TreeBatch:
        """Work the indices out on the host, and bring them to the device; `before` tokens precede each tree."""
        tokens, labels = list[int](), list[int]()
        position_X, extended_X, token_T, previous_T = list[int](), list[int](), list[int](), list[int]()

        def segment(part: Tokens, label: int, start: int, rows_before: Sequence[int], previous: int) -> None:
            first = len(tokens)
            position_X.extend((0,) * reach)  # any does for rows that are dropped
            position_X.extend(range(start, start + len(part)))
            extended_X.extend(rows_before)
            token_T.extend(range(len(extended_X), len(extended_X) + len(part)))
            extended_X.extend(range(reach + first, reach + first + len(part)))
            previous_T.extend((previous, *range(first + 1, first + len(part))))
            tokens.extend(part)
            labels.extend((label,) * len(part))

        for tree in trees:
            first, length = len(tokens), len(tree.context)
            segment(tree.context, 0, before, range(reach), 0)
            last = [*range(length, reach), *range(reach + first + max(0, length - reach), reach + first + length)]
            for label, branch in enumerate(tree.branches, 1):
                if branch:
                    segment(branch, label, before + length, last, first + length)
        count_B = torch.tensor([tree.size for tree in trees])
        first_B = count_B.cumsum(0) - count_B
        longest = int(count_B.max())
        inside_BN = torch.arange(longest).minimum(count_B.unsqueeze(1) - 1)
        padded_BN = first_B.unsqueeze(1) + inside_BN
        row_T = torch.arange(len(trees)).repeat_interleave(count_B)
        unpadded_T = row_T * longest + torch.arange(len(tokens)) - first_B[row_T]
        label_BN = torch.tensor(labels)[padded_BN]
        own_BNN = (label_BN.unsqueeze(1) == 0) | (label_BN.unsqueeze(1) == label_BN.unsqueeze(2))
        seen_BNN = own_BNN & torch.ones(longest, longest, dtype=torch.bool).tril_()
        seen_B1NS = F.pad(seen_BNN, (before, 0), value=True).unsqueeze(1)
        lists = [torch.tensor(each) for each in (position_X, extended_X, token_T, previous_T)]
        moved = [each.to(device, non_blocking=True) for each in (*lists, padded_BN, unpadded_T, seen_B1NS)]
        return cls(tokens, *moved)


@dataclass
class TreeLayer:
    """One layer's part: a `NextTokens` for trees that all follow one sequence, or none.

    Attributes:
        projection_QD: the layer's four projections as one matrix.
        kernel: both convolutions as one.
        before_BWQ: projections of the last tokens of the sequence before.
        delayed_B1Q: what its last token leaves for the next one's values.
        keys_JSP: its rotated keys.
        values_JSP: its values.
        batch: the trees.
    """

    projection_QD: Tensor
    kernel: JoinedKernel
    before_BWQ: Tensor
    delayed_B1Q: Tensor
    keys_JSP: Tensor
    values_JSP: Tensor
    batch: TreeBatch

    @classmethod
    def of(cls, layer: PagedLayer, state: tuple[int, Sequence[int], int] | None, batch: TreeBatch) -> TreeLayer:
        """Take the sequence before from its slot, its pages and its length; without one nothing is before."""
        slot, pages, length = (0, (), 0) if state is None else state
        page_N = torch.tensor(pages, dtype=torch.long, device=layer.keys.device)
        keys_JSP, values_JSP = (
            pool.index_select(0, page_N).flatten(0, 1)[:length].transpose(0, 1)
            for pool in (layer.keys, layer.values)
        )
        before_1WQ, delayed_11Q = layer.before[slot : slot + 1], layer.delayed[slot : slot + 1]
        if state is None:
            before_1WQ, delayed_11Q = torch.zeros_like(before_1WQ), torch.zeros_like(delayed_11Q)
        return cls(layer.projection_QD, layer.kernel, before_1WQ, delayed_11Q, keys_JSP, values_JSP, batch)

    def convolve(self, z_1TQ: Tensor, temperature_J: Tensor, rotary: RotaryTable) -> tuple[Tensor, Tensor]:
        """Return queries and keys [1, H, X, P] of the extended batch; `rotary` is that of its rows."""
        z_XQ = torch.cat([self.before_BWQ[0], z_1TQ[0]]).index_select(0, self.batch.extended_X)
        return qk_conv(z_XQ.unsqueeze(0), self.kernel, temperature_J, *rotary)

    def shift(self, delayed_1TQ: Tensor) -> Tensor:
        """Return the token before's share of each token's values."""
        both_YQ = torch.cat([self.delayed_B1Q[0], delayed_1TQ[0]])
        return both_YQ.index_select(0, self.batch.previous_T).unsqueeze(0)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, slots: Slots | None) -> Tensor:
        """Return the attention of each query [1, H, T, P]; queries and keys are those of the extended batch."""
        batch = self.batch
        rows, padded_N = len(batch.padded_BN), batch.padded_BN.flatten()
        extended_N = batch.token_T.index_select(0, padded_N)
        q_BHNP, k_BJNP, v_BJNP = (
            x[0].index_select(1, place_N).unflatten(1, (rows, -1)).transpose(0, 1)
            for x, place_N in ((q, extended_N), (k, extended_N), (v, padded_N))
        )
        if self.keys_JSP.shape[1]:
            k_BJNP, v_BJNP = (
                torch.cat([shared.expand(rows, -1, -1, -1), own], dim=2)
                for shared, own in ((self.keys_JSP, k_BJNP), (self.values_JSP, v_BJNP))
            )
        y_BHNP = F.scaled_dot_product_attention(q_BHNP, k_BJNP, v_BJNP, batch.seen_B1NS, enable_gqa=True)
        y_TH = y_BHNP.transpose(1, 2).flatten(0, 1).index_select(0, batch.unpadded_T)
        return y_TH.transpose(0, 1).unsqueeze(0)


@torch.inference_mode()
def hidden_of_trees(decoder: Decoder, trees: Sequence[Tree], after: int | None = None) -> Tensor:
    """Return the normed hidden states [T, D] of trees, one after another: contexts, then their continuations.

    Args:
        decoder: of the model; its pages do not change.
        trees: the contexts, and their continuations.
        after: slot of the sequence that all of them follow.
    """
    pages: Pages = decoder.pages
    state = None if after is None else (after, pages.table(after), pages.lengths[after])
    before = 0 if state is None else state[2]
    reach = pages.layers[0].before.shape[1]
    batch = TreeBatch.of(trees, before, reach, pages.device)
    parts = [TreeLayer.of(layer, state, batch) for layer in pages.layers]
    length = before + max(tree.size for tree in trees)
    return decoder.through(batch.tokens, batch.position_X, length, parts)
