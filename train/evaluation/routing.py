"""How the router routes, counted while the validation loss is measured: specialisation and overlap of experts.

For each layer, of the tokens that are no padding (E classes of the router, the skip class included):

    by class     n[c, e]: choices of tokens of class c (`token_classes.py`) that fell on e
    by type      m[v, e]: the same by token id, in groups of ids that are equal modulo TYPES
    in a row     k[e, f]: tokens whose first choice is e in this layer and f in the next

and from these, with p the shares:

    specialisation   I(C; E) / min(H(C), H(E)): mutual information of class and expert, 0 if routing looks at
                     nothing of the class, 1 if one gives the other (normalised as by Strehl and Ghosh 2002)
    distance         sum over e of |p(e | c) - p(e)| / 2: the share of a class's tokens that is routed differently
                     than all tokens are
    overlap          sum over v of min(p(v | e), p(v | f)): the share of token types that two experts have in
                     common (histogram intersection, Swain and Ballard 1991); what the OLMoE report (arXiv
                     2409.02060) looks at as vocabulary specialisation, by pairs
    followed         I(E; F) / min(H(E), H(F)) of neighbouring layers: how far a layer's choice gives that of the
                     next

Cost: three counts of integers for each layer and microbatch, without a wait for the device; L E (C + TYPES + E)
numbers of 8 bytes, 4 MB for ZAYA1-base, and one all-reduce of them.

If layers are compiled (parallel.compile) a router cannot be looked at: these passes run the layers as they are.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from zslurm.checkpoint_tools.durable import replace_durably
from zslurm.train.evaluation.token_classes import TOKEN_CLASSES
from zslurm.train.model.block import Layer
from zslurm.train.model.router import Routing
from zslurm.train.model.zaya import Zaya

ROUTING_FILE = "routing.json"
"""In the run's directory: the matrices of the last evaluation."""
TYPES = 512


class RoutingCounter:
    """Counts of one evaluation on one rank, on its device."""

    def __init__(self, model: Zaya, class_of_V: Tensor | None) -> None:
        """Count nothing yet; `class_of_V` are the classes of the ids, None if they are not known."""
        config, device = model.config, model.embedding.weight.device
        self._model, self._class_of_V = model, class_of_V
        self._experts, self._types = config.router_classes, min(TYPES, config.vocab_size)
        shape = (len(TOKEN_CLASSES), self._types, self._experts)
        self._counts_LXE = torch.zeros(config.layers, sum(shape), self._experts, dtype=torch.int64, device=device)
        self._sizes = list(shape)

    @contextmanager
    def counting(self, tokens_BS: Tensor, valid_BS: Tensor | None) -> Iterator[None]:
        """Count what the model routes in the body: one forward pass over these tokens."""
        chosen: list[Tensor] = []

        def note(router: torch.nn.Module, inputs: Any, routing: Routing) -> None:
            chosen.append(routing.classes_TK)

        layers = [layer for layer in self._model.layers if isinstance(layer, Layer)]
        hooks = [layer.router.register_forward_hook(note) for layer in layers]
        try:
            with self._model.without_graphs():
                yield
        finally:
            for hook in hooks:
                hook.remove()
        tokens_T = tokens_BS.flatten()
        weight_T = None if valid_BS is None else valid_BS.expand_as(tokens_BS).flatten()
        self._add(tokens_T, weight_T, chosen)

    def _add(self, tokens_T: Tensor, valid_T: Tensor | None, chosen: list[Tensor]) -> None:
        class_T = torch.zeros_like(tokens_T) if self._class_of_V is None else self._class_of_V[tokens_T].long()
        type_T = tokens_T % self._types
        for layer, classes_TK in enumerate(chosen):
            by_class_CE, by_type_VE, in_a_row_EE = self._counts_LXE[layer].split(self._sizes)
            for choice_T in classes_TK.unbind(dim=1):
                _count(by_class_CE, class_T, choice_T, valid_T)
                _count(by_type_VE, type_T, choice_T, valid_T)
            if layer + 1 < len(chosen):
                _count(in_a_row_EE, classes_TK[:, 0], chosen[layer + 1][:, 0], valid_T)

    def figures(self, group: dist.ProcessGroup | None) -> RoutingFigures:
        """Return what was counted on all ranks, which call it together."""
        dist.all_reduce(self._counts_LXE, group=group)
        parts = self._counts_LXE.cpu().numpy().astype(np.float64)
        by_class_LCE, by_type_LVE, in_a_row_LEE = np.split(parts, np.cumsum(self._sizes)[:-1], axis=1)
        if self._class_of_V is None:
            by_class_LCE = by_class_LCE[:, :1]
        return RoutingFigures.of(by_class_LCE, by_type_LVE, in_a_row_LEE[:-1], named=self._class_of_V is not None)


@dataclass(frozen=True)
class RoutingFigures:
    """What the module's text defines, of one evaluation.

    Attributes:
        tokens: that were looked at.
        classes: names of the classes of which there were tokens; empty if classes are not known.
        specialisation: of each layer; None without classes, or if nothing can be said.
        distance: of each layer and class.
        shares: p(e | c) of each layer, class and expert.
        overlap: of each layer and pair of experts; None if one of them got no token.
        followed: of each layer but the last.
    """

    tokens: int
    classes: list[str]
    specialisation: list[float | None]
    distance: list[list[float]]
    shares: list[list[list[float]]]
    overlap: list[list[list[float | None]]]
    followed: list[float | None]

    @classmethod
    def of(
        cls, by_class_LCE: NDArray[Any], by_type_LVE: NDArray[Any], in_a_row_LEE: NDArray[Any], *, named: bool
    ) -> RoutingFigures:
        """Work them out from counts."""
        occurs = by_class_LCE.sum(axis=(0, 2)) > 0
        counts_LCE = by_class_LCE[:, occurs] if named else by_class_LCE[:, :0]
        shares_LCE = counts_LCE / np.maximum(1, counts_LCE.sum(axis=2, keepdims=True))
        load_L1E = by_class_LCE.sum(axis=1, keepdims=True) / np.maximum(
            1, by_class_LCE.sum(axis=(1, 2), keepdims=True)
        )
        return cls(
            tokens=int(by_class_LCE[0].sum()),
            classes=[name for name, is_there in zip(TOKEN_CLASSES, occurs, strict=True) if is_there]
            if named
            else [],
            specialisation=[normalised_information(counts_CE) for counts_CE in counts_LCE] if named else [],
            distance=_rounded(np.abs(shares_LCE - load_L1E).sum(axis=2) / 2),
            shares=_rounded(shares_LCE),
            overlap=[_overlap(counts_VE) for counts_VE in by_type_LVE],
            followed=[normalised_information(counts_EE) for counts_EE in in_a_row_LEE],
        )

    def summary(self) -> dict[str, Any]:
        """Return its fields in metrics.jsonl: a number for each layer; `overlap` is the mean over pairs."""
        means = []
        for matrix in self.overlap:
            pairs = [x for row, values in enumerate(matrix) for x in values[row + 1 :] if x is not None]
            means.append(round(sum(pairs) / len(pairs), 4) if pairs else None)
        specialisation, followed = self.specialisation, self.followed
        return {"tokens": self.tokens, "specialisation": specialisation, "overlap": means, "followed": followed}

    def write(self, directory: Path, step: int, phase: str) -> None:
        """Write ROUTING_FILE, in place of an earlier evaluation's.

        Raises:
            OSError: it cannot be written.
        """
        path = directory / ROUTING_FILE
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps({"step": step, "phase": phase, **vars(self)}) + "\n")
        replace_durably(partial, path)


def normalised_information(counts: NDArray[np.float64]) -> float | None:
    """Return I(X; Y) / min(H(X), H(Y)) of counts [x, y]; None if one of the two is always the same."""
    p = counts / max(1.0, float(counts.sum()))
    of_x, of_y = p.sum(axis=1), p.sum(axis=0)
    least = min(_entropy(of_x), _entropy(of_y))
    if least < 1e-12:
        return None
    return round(max(0.0, _entropy(of_x) + _entropy(of_y) - _entropy(p)) / least, 4)


def _entropy(p: NDArray[np.float64]) -> float:
    p = p[p > 0]
    return float(-(p * np.log(p)).sum())


def _overlap(counts_VE: NDArray[np.float64]) -> list[list[float | None]]:
    """Return the share of types that each pair of experts has in common."""
    total_E = counts_VE.sum(axis=0)
    p_VE = counts_VE / np.maximum(1, total_E)
    used = total_E > 0
    rows = []
    for first in range(len(total_E)):
        common = np.minimum(p_VE[:, first : first + 1], p_VE).sum(axis=0)
        both = used & used[first]
        rows.append([round(float(x), 3) if is_used else None for x, is_used in zip(common, both, strict=True)])
    return rows


def _rounded(values: NDArray[np.float64]) -> Any:
    return np.round(values, 4).tolist()


def _count(counts_XY: Tensor, x_T: Tensor, y_T: Tensor, valid_T: Tensor | None) -> None:
    """Add one at [x, y] for each token, and none for padding."""
    one_T = torch.ones_like(x_T) if valid_T is None else valid_T.to(x_T.dtype)
    counts_XY.view(-1).index_add_(0, x_T * counts_XY.shape[1] + y_T, one_T)
