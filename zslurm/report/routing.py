"""The figures of a report on the router: load over time, specialisation and overlap of the experts.

How they are defined: `train/evaluation/routing.py`. The load is of training, all else of the validation data.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from zslurm.checkpoint_tools.quantities import counted, show_count
from zslurm.report.page_parts import Drawing, Item, PageTable, Text
from zslurm.report.plots import Curve, Plot, draw, heat_map
from zslurm.run.metrics.columns import LoadRow, Metrics

_MOST_LAYERS = 4
_DEFINITIONS = (
    "Specialisation is the mutual information of a token's class and its expert, divided by the smaller of their "
    "entropies: 0 where routing ignores the class, 1 where one gives the other. The distance of a class is the "
    "share of its tokens that is routed differently than all tokens are. The overlap of two experts is the share "
    "of token types (ids, in groups) that they have in common. A layer is followed by the next as far as its "
    "choice gives the next one's (mutual information again)."
)


def load_over_time(rows: Sequence[LoadRow]) -> Iterator[Item]:
    """Yield the share of each class over the steps: of the least even layer, the first, a middle one, the last."""
    import numpy as np

    layers = len(rows[-1].shares)
    classes = len(rows[-1].shares[0])
    rows = [
        row
        for row in rows
        if len(row.shares) == layers and all(len(layer_shares) == classes for layer_shares in row.shares)
    ]
    if len(rows) < 2:
        return
    shares = np.array([row.shares for row in rows], float)  # [steps, layers, classes]
    least = int(np.argmin(rows[-1].entropy))
    for layer in list(dict.fromkeys([least, 0, layers // 2, layers - 1]))[:_MOST_LAYERS]:
        yield Drawing(
            heat_map(
                f"Load of each expert over time, layer {layer}" + (", the least even" if layer == least else ""),
                shares[:, layer].T,
                0.0,
                float(shares[:, layer].max()),
                x=(f"step {rows[0].step}", f"step {rows[-1].step}"),
                y=counted(classes, "class", "classes"),
                unit="share of the choices",
            )
        )


def routing_items(metrics: Metrics, matrices: Mapping[str, Any]) -> Iterator[Item]:
    """Yield what evaluations found of the routing: over the run, and the matrices of the last one."""
    import numpy as np

    last = {row["step"]: row for row in metrics.rows("routing") if isinstance(row.get("step"), int)}
    rows = [last[step] for step in sorted(last)]
    curves = []
    for color, (name, label) in enumerate(
        (("specialisation", "specialisation"), ("overlap", "overlap"), ("followed", "followed")), start=1
    ):
        points = [(row["step"], _mean(row.get(name))) for row in rows]
        points = [(step, mean) for step, mean in points if mean is not None]
        if len(points) > 1:
            x, y = (np.array(coordinates, float) for coordinates in zip(*points, strict=True))
            curves.append(Curve(label, x, y, color))
    if curves:
        yield Drawing(draw(Plot("Specialisation and overlap", "means over layers", curves, from_zero=True)))
    if _is_sound(matrices):
        yield from _matrices(matrices)
        yield Text(_DEFINITIONS)


def _matrices(found: Mapping[str, Any]) -> Iterator[Item]:
    import numpy as np

    step, classes = found["step"], list(found["classes"])
    layers = [f"layer {number}" for number in (0, len(found["overlap"]) - 1)]
    if classes:
        special = np.array([np.nan if x is None else x for x in found["specialisation"]], float)
        distance = np.array(found["distance"], float).T
        rows = [
            (name, f"{values.mean():.3f}", f"{values.max():.3f}", str(int(values.argmax())))
            for name, values in zip(classes, distance, strict=True)
        ]
        tokens = counted(found["tokens"], "token", shown=show_count(found["tokens"]))
        yield Text(
            f"At step {step}, of {tokens} of validation data: how differently each class of tokens is routed."
        )
        columns = ("class of tokens", "mean distance", "largest", "in layer")
        yield PageTable(columns, rows, numbers=columns[1:])
        names = ", ".join(classes)
        yield _map(
            f"Distance by class at step {step}", distance, (layers[0], layers[1]), names, "of all tokens' routing"
        )
        if np.isfinite(special).any():
            most = int(np.nanargmax(special))
            shares = np.array(found["shares"][most], float)
            title = f"Experts of each class of tokens, layer {most}, the most specialised ({special[most]:.3f})"
            yield _map(title, shares, ("expert 0", f"class {shares.shape[1] - 1}"), names, "share of a class")
    overlap = np.array(
        [[[np.nan if x is None else x for x in row] for row in layer] for layer in found["overlap"]], float
    )
    experts = overlap.shape[1]
    off = overlap.copy()
    off[:, np.arange(experts), np.arange(experts)] = np.nan
    usable = np.isfinite(off).any(axis=(1, 2))
    if usable.any():
        means = np.array([np.nanmean(layer) if ok else -1.0 for layer, ok in zip(off, usable, strict=True)])
        most = int(means.argmax())
        title = f"Overlap of the experts, layer {most}, where it is largest (mean {means[most]:.3f})"
        ends = ("expert 0", f"class {experts - 1}")
        yield _map(title, off[most], ends, counted(experts, "class", "classes"), "of token types in common")


def _map(name: str, values: Any, x: tuple[str, str], y: str, unit: str) -> Drawing:
    import numpy as np

    return Drawing(heat_map(name, values, 0.0, float(np.nanmax(values)) or 1.0, x=x, y=y, unit=unit))


def _mean(values: object) -> float | None:
    numbers = [x for x in values if isinstance(x, float | int)] if isinstance(values, list) else []
    return sum(numbers) / len(numbers) if numbers else None


def _is_sound(found: Mapping[str, Any]) -> bool:
    """Return whether the file of matrices has the shapes that are drawn; one that was damaged is left out."""
    import numpy as np

    try:
        layers, classes = len(found["overlap"]), len(found["classes"])
        experts = len(found["overlap"][0])
        as_numbers = [[[x or 0.0 for x in row] for row in layer] for layer in found["overlap"]]
        shapes = [np.shape(np.array(as_numbers, float)), np.shape(np.array(found["distance"], float))]
        expected = [(layers, experts, experts), (layers, classes)]
        if classes:
            shapes.append(np.shape(np.array(found["shares"], float)))
            expected.append((layers, classes, experts))
        named = isinstance(found["classes"], list) and all(isinstance(name, str) for name in found["classes"])
        sound = named and len(found["specialisation"]) in (0, layers)
        return sound and shapes == expected and isinstance(found["step"], int) and isinstance(found["tokens"], int)
    except (KeyError, TypeError, ValueError, IndexError):
        return False
