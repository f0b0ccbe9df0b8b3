"""The published rates of faults that `zslurm plan run` knows."""

from __future__ import annotations

from docs.tables.markdown import table
from zslurm.plan.failures import KINDS, PRESETS


def failure_presets() -> str:
    """Return the presets: faults in a thousand days of a node with eight GPUs, and where that is from."""
    days = 8 * 24 * 1000
    rows = [
        [
            f"`{name}`",
            *(f"{days * rate:.3g}" if rate else "-" for rate in rates.per_gpu_hour),
            f"{1 / (16384 * rates.total):.3g} h" if rates.total else "-",
            rates.source,
        ]
        for name, rates in PRESETS.items()
        if rates.total
    ]
    return table(["preset", *KINDS, "on 16,384 GPUs every", "source"], rows)


TABLES = (failure_presets,)
