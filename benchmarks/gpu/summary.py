"""The figures of a result of `python -m benchmarks gpu`, for its page and for the tables of the documents."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

NOT_YET = "not yet measured"

Body = dict[str, Any]
Row = dict[str, Any]


@dataclass(frozen=True)
class Aim:
    """A figure that is aimed at.

    Attributes:
        what: is measured.
        peer: against what.
        aim: in words.
        found: returns the figure of a result in words, or None if it is not there.
    """

    what: str
    peer: str
    aim: str
    found: Callable[[Body], str | None]


def rows_of(body: Body, part: str) -> list[Row]:
    """Return the rows of a part; none if it did not run."""
    rows: list[Row] = body.get("parts", {}).get(part, {}).get("rows", [])
    return rows


def _figure(start: str, key: str = "ratio") -> Callable[[Body], str | None]:
    def found(body: Body) -> str | None:
        rows = [row for row in rows_of(body, "figures") if row.get("what", "").startswith(start)]
        return _number(rows[0].get(key)) if rows else None

    return found


def _muon(peer: str) -> Callable[[Body], str | None]:
    def found(body: Body) -> str | None:
        rows = (row for row in rows_of(body, "muon_step") if row.get("peer") == peer)
        return next((_number(row["ratio"]) for row in rows), None)

    return found


def _train_step(peer: str, to: str = "ours") -> Callable[[Body], str | None]:
    def found(body: Body) -> str | None:
        timed = [row["seconds"] for row in rows_of(body, "train_step") if "seconds" in row]
        both = [seconds for seconds in timed if peer in seconds and to in seconds]
        return _number(both[-1][peer] / both[-1][to]) if both else None

    return found


def _step(body: Body) -> str | None:
    found = [row for row in rows_of(body, "profile") if "tokens_per_s" in row]
    return f"{found[0]['tokens_per_s']:,.0f} tokens/s" if found else None


def _memory(body: Body) -> str | None:
    ratios = [row["ratio"] for row in rows_of(body, "memory") if "ratio" in row]
    return f"{min(ratios):.2f} to {max(ratios):.2f}" if ratios else None


def _number(value: float | None) -> str | None:
    return None if value is None else f"{value:.3g}"


_PASSES = {
    "Muon's momentum and norms": "Muon's momentum",
    "Muon's update": "Muon's update",
    "residual and norm, forward": "residual and norm, forward,",
    "residual and norm, both ways": "residual and norm, forward and",
}
"""Passes that memory bounds, and how their figures begin."""

AIMS = (
    Aim("head forward", "operands widened to fp32", "8 times", _figure("head forward")),
    *(
        Aim(
            f"symmetric product, {count} x {side:,}, bf16",
            "the library's product",
            aim,
            _figure(f"symmetric product, {count} x {side}"),
        )
        for count, side, aim in (
            (5, 2048, "1.5 times (limit 2)"),
            (1, 4096, "1.6 times (limit 2)"),
            (1, 8192, "1.75 times (limit 2)"),
        )
    ),
    *(
        aim
        for name, start in _PASSES.items()
        for aim in (
            Aim(name, "a triad", "0.9", _figure(start, "share_of_triad")),
            Aim(name, "`torch.compile`", "1.2 times", _figure(start)),
        )
    ),
    Aim("Muon step of zaya1-8b's share at 64 ranks", "`torch.optim.Muon`", "4 times", _muon("torch.optim.Muon")),
    Aim("the same", "compiled, batched", "1.5 times", _muon("compiled, batched")),
    Aim(
        "grouped products, 1,024 rows an expert",
        "one dense product of the same FLOPs",
        "0.8",
        _figure("16 groups of 1024 rows"),
    ),
    Aim("forward and backward of zaya1-1b", "transformers, eager", "2 times", _train_step("transformers")),
    Aim(
        "the same, both compiled",
        "transformers, compiled",
        "1 time",
        _train_step("transformers compiled", "ours compiled"),
    ),
    Aim("the same, ours eager", "transformers, compiled", "", _train_step("transformers compiled")),
    Aim("a whole training step of zaya1-1b on one card", "-", "", _step),
    Aim("peak memory of a step", "`zslurm plan memory`", "0.9 to 1.1", _memory),
)
"""What `make gpu` is for, in the order of the documents."""


def shares(body: Body) -> dict[str, dict[str, float]]:
    """Return seconds and share of each part in a profiled step, largest first; empty if it was not profiled."""
    return next((row["parts"] for row in rows_of(body, "profile") if "parts" in row), {})


def statuses(body: Body) -> dict[str, str]:
    """Return what came of the checks and tests of a result, by part."""
    found: dict[str, str] = {}
    for part in ("build", "check", "tests"):
        rows, status = rows_of(body, part), body.get("parts", {}).get(part, {}).get("status")
        if status is None:
            continue
        if part == "build":
            bad = sum(row.get("problem") is not None for row in rows)
            found[part] = f"{status}: {len(rows) - bad} of {len(rows)} kernels"
        elif part == "check":
            good, ran = (sum(row.get("status") in known for row in rows) for known in (_OK, _RAN))
            found[part] = f"{status}: {good} of {ran} right"
        else:
            counts = next((row for row in rows if "passed" in row), None)
            words = (
                ""
                if counts is None
                else ", ".join(f"{counts[key]} {key}" for key in ("passed", "failed", "skipped"))
            )
            found[part] = f"{status}: {words}"
    return found


_OK, _RAN = ("ok",), ("ok", "wrong", "failed")


def memory_rows(body: Body) -> Iterator[tuple[str, ...]]:
    """Yield recipe, microbatch, planned and allocated memory, and their ratio, of what was measured."""
    for row in rows_of(body, "memory"):
        if "ratio" in row:
            size = f"{row['micro_batch']} x {row['context']:,}" + (", recomputed" if row["recompute"] else "")
            planned, allocated = (f"{row[key] / 2**30:.2f} GiB" for key in ("planned_bytes", "allocated_bytes"))
            yield row["recipe"], size, f"{planned} planned", f"{allocated} allocated", f"{row['ratio']:.3f}"
