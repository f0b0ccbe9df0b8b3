"""Which fault is the root among the lines of logs, for `zslurm why`.

The job is over and may be anybody's, so the order of the lines counts, and what passed again counts less.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import islice

from zslurm.aegis.types import Fault

_COMPLETED = re.compile(r"last completed (?:NCCL )?work: (-?\d+)")
_ROOT_CAUSE = "Root Cause (first observed failure)"
_SEQUENCE = re.compile(r"\bSeqNum=(\d+)")


def root_of_log(faults: Sequence[Fault]) -> tuple[Fault | None, bool]:
    """Return the root among the faults that logs show, in their order, and whether it is a cause by itself.

    Consequences (cascades, teardown) are the root only if there is nothing else, and advisories never are. A
    fault that passed before anything followed from it is none; a vague one gives way to one that Slurm logs late.
    """
    roots = [(n, fault) for n, fault in enumerate(faults) if fault.role == "root"]
    first = next((fault for n, fault in roots if not _passed(fault, faults, n + 1)), None)
    if first is not None:
        if first.rule.vague:
            first = next((fault for _, fault in roots if fault.rule.logged_late), first)
        return first, True
    for role in ("cascade", "teardown"):
        of_role = [fault for fault in faults if fault.role == role]
        if of_role:
            return _furthest_behind(of_role) or _named(of_role) or of_role[0], False
    return None, False


def _named(faults: Sequence[Fault]) -> Fault | None:
    """Return the first fault that names a rank or a node; in torchrun's summary the root cause."""
    start = next((n for n, fault in enumerate(faults) if _ROOT_CAUSE in fault.line), 0)
    for fault in (*faults[start:], *faults):
        if fault.rank is not None or fault.node is not None:
            return fault
    return None


def _passed(fault: Fault, faults: Sequence[Fault], after: int) -> bool:
    """Return whether a fault ended before anything followed from it; `faults` are read from `after` on."""
    if not fault.rule.may_pass:
        return False
    for later in islice(faults, after, None):
        if later.cleared and later.kind == fault.kind and _same(later.nic, fault.nic):
            return True
        if later.role in ("cascade", "teardown"):
            return False
    return False


def _same(one: str | None, other: str | None) -> bool:
    return one is None or other is None or one == other


def _furthest_behind(faults: Sequence[Fault]) -> Fault | None:
    """Return the fault of the rank that came least far in the collective operations, if ranks differ."""
    for pattern in (_COMPLETED, _SEQUENCE):
        reached: dict[int, tuple[int, Fault]] = {}
        for fault in faults:
            match = pattern.search(fault.line)
            if match and fault.rank is not None:
                reached.setdefault(fault.rank, (int(match[1]), fault))
        numbers = [number for number, _ in reached.values()]
        if numbers and min(numbers) < max(numbers):
            return min(reached.values(), key=lambda pair: pair[0])[1]
    return None
