"""Weights from files into a model of torch, range by range: no second copy of them is ever held."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

from zslurm.checkpoint_tools import Extent
from zslurm.train.hub import Weights
from zslurm.train.hub.folder import BUFFER_ELEMENTS
from zslurm.train.model.zaya import Zaya


@torch.no_grad()
def load_model(weights: Weights, *, dtype: torch.dtype, device: torch.device | str = "cpu") -> Zaya:
    """Return a model with these weights, rounded to `dtype`; its balancing biases are in fp32.

    Raises:
        HubIOError, CheckpointError: the files cannot be read.
    """
    with torch.device("meta"):
        model = Zaya(weights.settings.model, dtype)
    model.to_empty(device=device)
    buffer = np.empty(BUFFER_ELEMENTS, np.float32)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        flat = tensor.view(-1)
        for start in range(0, flat.numel(), BUFFER_ELEMENTS):
            values = buffer[: min(BUFFER_ELEMENTS, flat.numel() - start)]
            weights.read(name, start, values)
            flat[start : start + values.size].copy_(torch.from_numpy(values))
    return model


@torch.no_grad()
def load_extents(weights: Weights, extents: Iterable[Extent], chunk: torch.Tensor) -> None:
    """Fill the extents of a rank's flat chunk, in its format and on its device; nothing else is read.

    Raises:
        HubIOError, CheckpointError: the files cannot be read, or are damaged.
    """
    buffer = np.empty(BUFFER_ELEMENTS, np.float32)
    for extent in extents:
        for start in range(0, extent.numel, BUFFER_ELEMENTS):
            values = buffer[: min(BUFFER_ELEMENTS, extent.numel - start)]
            weights.read(extent.tensor, extent.start + start, values)
            offset = extent.offset_in_chunk + start
            chunk[offset : offset + values.size].copy_(torch.from_numpy(values))
