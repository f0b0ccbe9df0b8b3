"""Can a process open enough files, and a user start enough threads?"""

from __future__ import annotations

import re

from zslurm.core.files import read_text
from zslurm.doctor.check import Check, Outcome, failed, unavailable, warned, worst
from zslurm.hardware.node_sources import Sources

_FAR_TOO_FEW = 1 / 16
"""A limit below this share of what is wanted is a failure rather than a warning."""


def check(sources: Sources) -> Outcome:
    """Open files and processes, as /proc/self/limits has them."""
    text = read_text(sources.path("/proc/self/limits"))
    wanted = (
        ("open files", "Max open files", sources.limits.open_files, "nofile"),
        ("processes", "Max processes", sources.limits.processes, "nproc"),
    )
    found = {what: _soft(text or "", row) for what, row, _, _ in wanted}
    if text is None or not all(found.values()):
        return unavailable("/proc/self/limits cannot be read")
    problems = []
    for what, _, least, name in wanted:
        if found[what] == "unlimited" or int(found[what] or 0) >= least:
            continue
        result = failed if int(found[what] or 0) < least * _FAR_TOO_FEW else warned
        remedy = f"raise {name}: LimitNOFILE and LimitNPROC in slurmd's unit, or `ulimit` in cluster.setup"
        problems.append(result(f"{found[what]} {what}, {least:g} wanted", remedy))
    return worst(problems, ", ".join(f"{value} {what}" for what, value in found.items()))


def _soft(text: str, row: str) -> str | None:
    match = re.search(rf"^{row}\s+(\d+|unlimited)", text, re.MULTILINE)
    return match[1] if match else None


CHECK = Check("ulimits", "limits", "open files, processes and threads (nofile, nproc)", "node", check)
