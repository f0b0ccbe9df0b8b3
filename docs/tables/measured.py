"""What was measured or compiled: results of `make gpu`, and the code objects of the kernels."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.gpu.summary import AIMS, memory_rows, shares, statuses
from docs.tables.markdown import RESULTS, table

_NOT_YET = "not yet measured"


def _gpus() -> dict[str, dict[str, Any]]:
    """Return the result of each card, by its name."""
    files = sorted(RESULTS.glob("gpu-*.json"))
    bodies = [json.loads(file.read_text(encoding="utf-8")) for file in files if "rehearsal" not in file.name]
    return {body["card"]: body for body in bodies}


def gpu_figures() -> str:
    """Return the figures that `make gpu` is for, with a column for each card that was measured."""
    cards = _gpus()
    rows = (
        (each.what, each.peer, each.aim or "-", *_of_cards(cards, lambda body, each=each: each.found(body)))
        for each in AIMS
    )
    return table(("figure", "peer", "aim", *(cards or ("measured",))), rows)


def gpu_parts() -> str:
    """Return the share of each part in a training step of zaya1-1b, with a column for each card."""
    cards = _gpus()
    parts = dict.fromkeys(part for body in cards.values() for part in shares(body)) or PARTS_OF_A_STEP

    def share(body: dict[str, Any], part: str) -> str | None:
        return f"{shares(body)[part]['share']:.1%}" if part in shares(body) else None

    rows = ((part, *_of_cards(cards, lambda body, part=part: share(body, part))) for part in parts)
    return table(("part of a step", *(cards or ("share",))), rows)


PARTS_OF_A_STEP = (
    *("attention", "convolutions", "router", "experts", "head", "norms", "embedding", "optimizer"),
    *("communication", "sums of gradients", "other", "host gaps"),
)


def gpu_memory() -> str:
    """Return the peak memory of a step of each recipe next to the plan's, for each card."""
    rows = [(card, *row) for card, body in _gpus().items() for row in memory_rows(body)]
    head = ("card", "recipe", "microbatch", "planned", "measured", "measured / planned")
    return table(head, rows or [(_NOT_YET, *["-"] * 5)])


def gpu_checks() -> str:
    """Return what came of the builds, checks and tests on each card."""
    cards = _gpus()
    rows = (
        (
            card,
            *(body[key] or "-" for key in ("date", "driver")),
            *(statuses(body).get(part, "-") for part in _CHECKS),
        )
        for card, body in cards.items()
    )
    head = ("card", "date", "driver", "kernels built", "results next to the references", "tests marked `gpu`")
    return table(head, rows if cards else [(_NOT_YET, *["-"] * 5)])


_CHECKS = ("build", "check", "tests")


def _of_cards(cards: dict[str, dict[str, Any]], found: Callable[[dict[str, Any]], str | None]) -> Iterator[str]:
    """Yield a cell for each card, or the one that nothing was measured."""
    if not cards:
        yield _NOT_YET
    for body in cards.values():
        yield found(body) or "-"


def code_objects() -> str:
    """Return what the compilers make of each kernel for gfx942: benchmarks/results/code_objects.json."""
    figures = json.loads((RESULTS / "code_objects.json").read_text(encoding="utf-8"))
    rows = [
        (
            f"`{folder}`",
            f"`{row['kernel']}`",
            row["operands"] or "-",
            *(row[key] for key in ("waves", "registers")),
            f"{row['lds_bytes']:,}",
            *(row[key] for key in ("occupancy", "spills", "wide_accesses", "matrix_instructions")),
            row.get("flops_per_lds_byte") or "-",
        )
        for language in ("triton", "hip")
        for folder, kernels in figures[language].items()
        for row in kernels
    ]
    head = (
        "source",
        "kernel",
        "operands",
        "waves",
        "registers",
        "LDS, bytes",
        "occupancy",
        "spills",
        "16 bytes",
        "MFMA",
        "FLOPs a byte of LDS",
    )
    return table(head, rows)


def host_time() -> str:
    """Return what the host does for a layer: benchmarks/results/host_time.json."""
    figures = json.loads((RESULTS / "host_time.json").read_text(encoding="utf-8"))
    layer, model = figures["choosing_per_layer_us"], figures["choosing_per_microbatch_of_40_layers_ms"]
    before, after = "checked and chosen", "remembered"
    rows = [
        ("operators of torch that compute or copy", f"{figures['operators_of_torch_per_layer']}", "-"),
        ("launches in Triton", f"{figures['launches_in_triton_per_layer']}", "-"),
        ("operations of `kernels/`", f"{figures['operations_per_layer']}", "-"),
        (
            "time until their implementations run, if checked and chosen",
            f"{layer[before]:.0f} us",
            f"{model[before]:.1f} ms",
        ),
        ("the same, if remembered", f"{layer[after]:.0f} us", f"{model[after]:.1f} ms"),
    ]
    return table(("what", "a layer", "40 layers"), rows)


def integrity_flips() -> str:
    """Return how many flipped bits the checks of a run found, and with the right rank."""
    body = json.loads((RESULTS / "integrity.json").read_text(encoding="utf-8"))
    rows = (
        (target, flips["flips"], flips["found"], flips.get("right_rank", "-"), flips.get("steps_at_most") or "-")
        for target, flips in body["flips"].items()
    )
    return table(("a bit of", "flips", "found", "right rank", "within steps"), rows)


def integrity_clean() -> str:
    """Return the steps of sound runs without and with an alarm."""
    body = json.loads((RESULTS / "integrity.json").read_text(encoding="utf-8"))
    rows = (
        (
            shape["ranks"],
            shape["ranks_of_a_node"],
            ", ".join(f"{name} {value}" for name, value in shape["parallel"].items()),
            *(shape[name] for name in ("steps", "checks", "alarms")),
        )
        for shape in body["clean"]
    )
    return table(("ranks", "of a node", "parallel", "steps", "checks", "alarms"), rows)


TABLES = (
    code_objects,
    integrity_flips,
    integrity_clean,
    host_time,
    gpu_figures,
    gpu_parts,
    gpu_memory,
    gpu_checks,
)
