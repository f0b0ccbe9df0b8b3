"""Documents and padding in the sequences of a microbatch, and what attention must know of them.

A sequence is usually one stream: every token sees all before it. Two things change that:

    valid_BS      marks padding as false. A padding position's input to attention is zero, no other position
                  attends to it, and it is counted neither in the loss nor in the experts' load. What the
                  model returns for it means nothing.
    document_BS   numbers documents packed into one sequence; a new one begins wherever the number changes.
                  Attention, convolutions and the value shift then stay inside a document and positions start
                  again at 0, so that each is computed as if it were alone.

Both cost an attention mask [B, 1, S, S]; without them attention takes its causal path. For kernels that know
documents (`attention_backends/packages.py`) a list of the documents' bounds takes the mask's place; padding is
then documents of padding alone. It is made when the tokens are read, on the host (`document_bounds`,
`train/data/sequences.py`). If it is not given, and there is no padding, the host waits for the device once per
forward pass, to learn how many documents there are.

If ranks share sequences (`train/context`), all of this is computed for whole sequences and each rank takes its
part. Labels of tokens then take the mask's place: they are as long as the sequence.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from zslurm.train.context.attention import SequenceLabels
from zslurm.train.context.context_parallel import ContextParallel
from zslurm.train.model.cache import Slots
from zslurm.train.model.rope import RotaryTable, rotary_table


class Packing(NamedTuple):
    """What every attention stage of one forward pass shares."""

    rotary: RotaryTable  # angles of all positions, [S, A] or [B, S, A]
    attend_B1SS: Tensor | None = None  # which query (third dimension) sees which key; None: all up to itself
    # Element j - 1 [B, S, 1]: whether the token j before is of the same document; None: sequences are not divided.
    linked: tuple[Tensor, ...] | None = None
    valid_BS1: Tensor | None = None  # false for padding; None where there is none
    slots: Slots | None = None  # of the cache that the tokens before are in
    # Instead of a mask: where each document begins among the B * S tokens, and their number, int32.
    bounds_N: Tensor | None = None
    # Ranks that share the sequences. All above is then of this rank's tokens, rotary and linked with a halo of
    # tokens before each chunk; instead of a mask there are labels.
    context: ContextParallel | None = None
    labels: SequenceLabels | None = None


def pack(
    positions_S: Tensor,
    *,
    rotary_dim: int,
    rope_base: float,
    reach: int,
    dtype: torch.dtype,
    valid_BS: Tensor | None = None,
    document_BS: Tensor | None = None,
    bounds_N: Tensor | None = None,
    by_bounds: bool = False,
    context: ContextParallel | None = None,
) -> Packing:
    """Compute masks and angles of one forward pass over tokens at consecutive positions.

    `reach` is how many tokens the convolutions look back (the value shift one), `dtype` the format of the angles,
    at least fp32. With `by_bounds` bounds of documents take the place of a mask: `bounds_N`, which must be those
    of `document_BS` and separate padding from documents, or, without padding, what the device finds. With
    `context` what is returned is this rank's part of it, see `Packing`.
    """
    if valid_BS is None and document_BS is None and context is None:
        return Packing(rotary_table(positions_S, rotary_dim, rope_base, dtype))

    linked, positions, segment_BS = None, positions_S, None
    if document_BS is not None:
        segment_BS = _segments(document_BS)
        linked = tuple(_same_as_before(segment_BS, distance) for distance in range(1, max(1, reach) + 1))
        # Less the position of the first token of each token's document.
        positions = positions_S - torch.where(_starts(segment_BS), positions_S, 0).cummax(dim=1).values
    if context is not None:
        tokens = context.positions(len(positions_S), halo=reach, device=positions.device)
        tokens = tokens.clamp_(0, len(positions_S) - 1)  # what is beyond is zero, or padding
        return Packing(
            rotary_table(positions.index_select(-1, tokens), rotary_dim, rope_base, dtype),
            linked=linked and tuple(link.index_select(1, tokens) for link in linked),
            valid_BS1=_local_valid(context, positions_S, valid_BS),
            context=context,
            labels=_labels(context, segment_BS, valid_BS),
        )
    rotary = rotary_table(positions, rotary_dim, rope_base, dtype)
    if by_bounds and segment_BS is not None and (valid_BS is None or bounds_N is not None):
        bounds_N = bounds_of_segments(segment_BS) if bounds_N is None else bounds_N
        valid_BS1 = None if valid_BS is None else valid_BS.unsqueeze(-1)
        return Packing(rotary, linked=linked, bounds_N=bounds_N, valid_BS1=valid_BS1)

    seen_BSS = positions_S.unsqueeze(1) >= positions_S
    if segment_BS is not None:
        seen_BSS = seen_BSS & (segment_BS.unsqueeze(2) == segment_BS.unsqueeze(1))
    if valid_BS is not None:
        # Padding sees itself, or its softmax would have nothing to share out.
        itself_SS = torch.eye(positions_S.shape[0], dtype=torch.bool, device=positions_S.device)
        seen_BSS = seen_BSS & valid_BS.unsqueeze(1) | itself_SS
    return Packing(rotary, seen_BSS.unsqueeze(1), linked, None if valid_BS is None else valid_BS.unsqueeze(-1))


def pack_next(angles: RotaryTable, tokens: int, start: int, slots: Slots) -> Packing:
    """For `tokens` tokens that follow `start` others, which are in a cache; angles are those of all positions."""
    return Packing(RotaryTable(*(angles_of[start : start + tokens] for angles_of in angles)), slots=slots)


def documents_of(tokens_BS: Tensor, end_token: int) -> Tensor:
    """Count the documents of each sequence, int64 [B, S]; an end token is the last of its document."""
    ends_BS = tokens_BS == end_token
    return ends_BS.cumsum(dim=1) - ends_BS.long()


def document_bounds(tokens_BS: NDArray[np.integer[Any]], end_token: int) -> Tensor:
    """Return, of tokens on the host, the `bounds_N` of the documents that `documents_of` numbers, on the host."""
    is_start_BS = np.ones(tokens_BS.shape, np.bool_)
    is_start_BS[:, 1:] = tokens_BS[:, :-1] == end_token
    return torch.from_numpy(np.append(np.flatnonzero(is_start_BS), tokens_BS.size).astype(np.int32))


def documents_by_bounds(bounds_N: Tensor, tokens_BS: Tensor) -> Tensor:
    """Count the documents of all sequences by their starts, `bounds_N`, int64 [B, S]."""
    places_T = torch.arange(tokens_BS.numel(), device=tokens_BS.device, dtype=bounds_N.dtype)
    return torch.bucketize(places_T, bounds_N, right=True).view_as(tokens_BS)


def valid_positions(filled_B: Tensor, tokens_BS: Tensor) -> Tensor:
    """Return which inputs are no padding, bool [B, S]: the first `filled_B` of each sequence."""
    return torch.arange(tokens_BS.shape[1], device=tokens_BS.device) < filled_B.unsqueeze(1)


def _segments(document_BS: Tensor) -> Tensor:
    """Count the runs of equal ids 0, 1, ...: an id that comes back later is another document."""
    changed_BS = document_BS[:, 1:] != document_BS[:, :-1]
    return torch.cat([changed_BS.new_zeros(changed_BS.shape[0], 1), changed_BS], dim=1).cumsum(dim=1)


def _same_as_before(segment_BS: Tensor, distance: int) -> Tensor:
    same_BS = torch.zeros_like(segment_BS, dtype=torch.bool)
    same_BS[:, distance:] = segment_BS[:, distance:] == segment_BS[:, :-distance]
    return same_BS.unsqueeze(-1)


def bounds_of_segments(segment_BS: Tensor) -> Tensor:
    """Return the starts of documents, row by row, and last the number of tokens; int32 [documents + 1].

    The host waits for the device.
    """
    starts_N = _starts(segment_BS).flatten().nonzero().squeeze(1)
    return F.pad(starts_N, (0, 1), value=segment_BS.numel()).int()


def _starts(segment_BS: Tensor) -> Tensor:
    """Return which tokens are the first of their document."""
    starts_BS = torch.ones_like(segment_BS, dtype=torch.bool)
    starts_BS[:, 1:] = segment_BS[:, 1:] != segment_BS[:, :-1]
    return starts_BS


def _local_valid(context: ContextParallel, positions_S: Tensor, valid_BS: Tensor | None) -> Tensor | None:
    """Return which of this rank's tokens are no padding, [B, S, 1] or for all sequences [1, S, 1]."""
    if valid_BS is None:
        if len(positions_S) % (2 * context.size) == 0:
            return None
        valid_BS = torch.ones_like(positions_S, dtype=torch.bool).unsqueeze(0)
    return context.take(valid_BS, fill=False).unsqueeze(-1)


def _labels(context: ContextParallel, segment_BS: Tensor | None, valid_BS: Tensor | None) -> SequenceLabels | None:
    """Count the documents of this rank's tokens, and of every rank's as keys: there padding is none of them.

    Nothing sees the padding of the last chunks, which comes after all other tokens.
    """
    if segment_BS is None:
        if valid_BS is None:
            return None
        segment_BS = torch.zeros_like(valid_BS, dtype=torch.long)
    keys_BS = segment_BS if valid_BS is None else segment_BS.where(valid_BS, -1)
    every_rank = [context.take(keys_BS, fill=-1, rank=rank) for rank in range(context.size)]
    return SequenceLabels(context.take(segment_BS), torch.stack(every_rank))
