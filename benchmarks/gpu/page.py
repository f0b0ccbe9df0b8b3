"""The page that `make gpu` ends with: what was measured, the limit of the card, and the estimate for an MI300X.

Estimates come from the code objects of gfx942 at the shapes of zaya1-8b, counted instructions and bytes, a memory
bandwidth of 4.0 TB/s and 400 to 550 TFLOPS of the library's products; nothing was executed for them. They are
within about a quarter, and on another card only show which kernel or part needs attention.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.gpu.parts import PARTS
from benchmarks.gpu.summary import AIMS, memory_rows, rows_of, shares, statuses
from docs.tables.markdown import table

Body = dict[str, Any]
Row = dict[str, Any]

KERNEL_ESTIMATES = {
    "grouped_gemm.multiply": "40 to 48 % forward",
    "grouped_gemm.weight_gradient": "38 to 45 %",
    "qk_conv.forward": "50 %",
    "qk_conv.backward": "20 to 25 %",
    "residual_norm.forward": "80 to 88 %",
    "residual_norm.backward": "70 to 80 %",
    "experts.gather": "80 to 90 %",
    "experts.activate": "80 to 90 %",
    "experts.activate_backward": "80 to 90 %",
    "experts.combine": "80 to 90 %",
    "muon.momentum": "75 to 88 %",
    "muon.update": "75 to 88 %",
}
"""Share of the peak of products, or of the memory bandwidth, by operation."""

STEP_ESTIMATES = {
    "head": "32 %",
    "experts": "27 %",
    "attention": "23 %",
    "router": "4 %",
    "norms": "7 %",
    "convolutions": "2 %",
    "sums of gradients": "2 %",
    "optimizer": "1 %",
    "host gaps": "2 %",
}
"""Share of a step of zaya1-8b on one MI300X, 16,384 tokens a microbatch, attention with its projections."""

_FLOPS_PER_BYTE = 100
"""Operations with more arithmetic than this are limited by the matrix units, the others by memory."""


def page_of(body: Body) -> Iterator[str]:
    """Yield the lines of the page, in Markdown."""
    yield f"# {body['card']}"
    yield ""
    if body["card"].startswith("rehearsal"):
        yield "A rehearsal with small sizes on a CPU: the figures show that the program runs, and nothing else."
        yield ""
    names = ("driver", "runtime", "torch", "triton", "transformers")
    yield ", ".join([body["date"], *(f"{name} {body[name]}" for name in names if body.get(name))])
    yield ""
    for title, head, rows in (
        ("Checks", ("part", "result"), list(statuses(body).items())),
        ("Kernels", _KERNEL_HEAD, list(_kernels(body))),
        ("Figures", ("figure", "peer", "aim", "measured"), list(_figures(body))),
        ("A training step", ("part", "ms", "share", "estimate of zaya1-8b on an MI300X"), list(_step(body))),
        ("Memory", ("recipe", "microbatch", "planned", "measured", "ratio"), list(memory_rows(body))),
        ("Not measured", ("part", "status"), list(_not_measured(body))),
    ):
        if rows:
            yield f"## {title}"
            yield ""
            yield table(head, rows)


_KERNEL_HEAD = ("operation", "case", "fastest", "reached", "of the limit", "estimate for an MI300X")


def _kernels(body: Body) -> Iterator[tuple[str, ...]]:
    """Yield what the fastest implementation reaches at the largest bf16 case of each operation."""
    largest: dict[str, Row] = {}
    for row in (*rows_of(body, "products"), *rows_of(body, "crossovers")):
        if row.get("operation") and row["sizes"].get("dtype") in ("bfloat16", "float32"):
            before = largest.get(row["operation"])
            if before is None or row["bytes"] >= before["bytes"]:
                largest[row["operation"]] = row
    triad = next((row["bytes_per_s"] for row in rows_of(body, "figures") if row.get("what") == "triad"), None)
    peak = _peak(body)
    for name, row in largest.items():
        fastest = min(row["seconds"], key=lambda each: row["seconds"][each])
        seconds = row["seconds"][fastest]
        products = row["flops"] > _FLOPS_PER_BYTE * row["bytes"]
        rate, limit = (row["flops"] / seconds, peak) if products else (row["bytes"] / seconds, triad)
        reached = f"{rate / 1e12:.0f} TFLOPS" if products else _bandwidth(rate)
        of_limit = f"{rate / limit:.0%} of the {'peak' if products else 'triad'}" if limit else "-"
        yield name, row["case"], fastest, reached, of_limit, KERNEL_ESTIMATES.get(name, "-")


def _bandwidth(rate: float) -> str:
    return f"{rate / 1e12:.3g} TB/s" if rate >= 1e12 else f"{rate / 1e9:.3g} GB/s"


def _peak(body: Body) -> float | None:
    """Return the published bf16 peak of the card in FLOP/s, or None if it is unknown."""
    try:
        from zslurm.train.telemetry.flops import peak_of
    except ImportError:  # packages are missing, and the kernels were measured without them
        return None
    return peak_of(body["card"], body.get("compute_units", 0), "bf16")


def _figures(body: Body) -> Iterator[tuple[str, ...]]:
    for each in AIMS:
        measured = each.found(body)
        if measured is not None:
            yield each.what, each.peer, each.aim or "-", measured


def _step(body: Body) -> Iterator[tuple[str, ...]]:
    for part, of_step in shares(body).items():
        estimate = STEP_ESTIMATES.get(part, "-")
        yield part, f"{1e3 * of_step['seconds']:.2f}", f"{of_step['share']:.1%}", estimate


def _not_measured(body: Body) -> Iterator[tuple[str, str]]:
    for name in PARTS:
        status = body["parts"].get(name, {"status": "not run"})["status"]
        if status != "done":
            yield name, status
