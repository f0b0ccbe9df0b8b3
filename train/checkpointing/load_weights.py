"""Load weights from files into a model of torch, range by range: no second copy of them is ever held."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from numpy.typing import NDArray

from zslurm.checkpoint_tools import Extent
from zslurm.train.hub import Weights
from zslurm.train.hub.folder import BUFFER_ELEMENTS
from zslurm.train.model.zaya import Zaya, empty_model


@torch.no_grad()
def load_model(weights: Weights, *, dtype: torch.dtype, device: torch.device | str = "cpu") -> Zaya:
    """Return a model with these weights, rounded to `dtype`; its balancing biases are in fp32.

    Raises:
        HubIOError, CheckpointError: the files cannot be read.
    """
    model = empty_model(weights.settings.model, dtype=dtype, device=device)
    buffer = np.empty(BUFFER_ELEMENTS, np.float32)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        _fill(tensor.view(-1), weights, name, 0, buffer)
    return model


@torch.no_grad()
def load_extents(weights: Weights, extents: Iterable[Extent], chunk: torch.Tensor) -> None:
    """Fill the extents of a rank's flat chunk, in its format and on its device; nothing else is read.

    Raises:
        HubIOError, CheckpointError: the files cannot be read, or are damaged.
    """
    buffer = np.empty(BUFFER_ELEMENTS, np.float32)
    for extent in extents:
        _fill(chunk[extent.in_chunk], weights, extent.tensor, extent.start, buffer)


def _fill(flat: torch.Tensor, weights: Weights, name: str, start: int, buffer: NDArray[np.float32]) -> None:
    """Read the elements from `start` on of a tensor into `flat`, in portions of the buffer."""
    for part in flat.split(len(buffer)):
        values = buffer[: len(part)]
        weights.read(name, start, values)
        part.copy_(torch.from_numpy(values))
        start += len(part)
