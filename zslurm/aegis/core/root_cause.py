"""Which fault is the root: decided here for a live run and for `logs --errors`.

Roots are found in two kinds of records, with a part of this module for each. A third are lines of logs
(aegis/logs/root_of_log.py).

**Faults of an attempt**, as sensors, logs and srun report them. The earliest root counts; never what the run
overcame, which is what logs and sensors reported before all ranks finished another step. Clocks, sensors and
logs do not report in order of time, so a fault that explains why a rank ended (its own last lines, its host out
of memory, a file system that stalled on several nodes) goes before that end, and a rank that only waits for
another one, or is merely slow, counts if there is nothing else.

**What ranks recorded when they ended.** Peers of a dead rank fail as well, with their errors about broken
connections, often before srun has reported the dead one: they count only if there is nothing else.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from zslurm.aegis.fault_kinds import (
    AGENT_LOST,
    EARLY_EXIT,
    NODE_DEAD,
    RANK_HANG,
    SLURM_CANCELLED,
    STORAGE_FAULT,
    STRAGGLER,
)
from zslurm.aegis.types import OF_STEP, AttemptSummary, Fault
from zslurm.core.errors import Exit
from zslurm.slurm.on_nodes.srun_output import TaskFailure

if TYPE_CHECKING:  # pydantic takes longer to import than `zslurm logs --errors` takes to run
    from zslurm.config.aegis import AegisSection

# --- faults of an attempt --------------------------------------------------------------------------------------

_ENDS_OF_RANKS = OF_STEP | {"rank"}
"""Sources that report a rank's end: nothing of the rank runs after it."""
_OF_SLURM = frozenset({"srun", "slurm"})
"""Sources that report what Slurm did with the job or the step."""
_CLOCKS_S = 2.0
"""What the clocks of nodes and sensors may differ by."""


def roots_of(attempt_state: AttemptSummary, settings: AegisSection) -> list[Fault]:
    """Return the faults of an attempt that may be its root, by time."""
    by_time = sorted(attempt_state.faults, key=lambda fault: (fault.time, fault.rank is None, fault.rank or 0))
    ends = ends_of(attempt_state.faults)
    return [fault for fault in by_time if _may_be_root(fault, ends, attempt_state, settings)]


def without_overcome(attempt_state: AttemptSummary, settings: AegisSection) -> list[Fault]:
    """Return the faults of a running attempt without those that it overcame for good, and what took these back.

    None of them can be the root any more, and in weeks they become many.
    """
    ends = ends_of(attempt_state.faults)

    def is_open(fault: Fault) -> bool:
        if fault.kind == STRAGGLER or fault.source in _OF_SLURM:
            return True
        end = taken_back(fault, ends)
        lasts = end is None and _stays(fault)
        return not fault.cleared and (lasts or not _overcome(fault, end, attempt_state, settings))

    open_faults = {fault for fault in attempt_state.faults if is_open(fault)}
    open_faults |= {end for fault in open_faults if (end := taken_back(fault, ends)) is not None}
    networks = {fault.node for fault in open_faults if fault.rule.of_network}
    open_faults |= {fault for fault in attempt_state.faults if fault.kind == AGENT_LOST and fault.node in networks}
    return [fault for fault in attempt_state.faults if fault in open_faults]


def ends_of(faults: Sequence[Fault]) -> list[Fault]:
    """Return what reports that a fault is over, by time."""
    return sorted((fault for fault in faults if fault.cleared), key=lambda end: end.time)


def _may_be_root(
    fault: Fault, ends: Sequence[Fault], attempt_state: AttemptSummary, settings: AegisSection
) -> bool:
    running = attempt_state.outcome is None
    if fault.cleared:
        return False
    if fault.kind == STRAGGLER:
        return settings.straggler.act and fault.node in attempt_state.nodes
    # While it runs, a collective operation that timed out is a reason to end the attempt, whoever it waited for.
    if fault.role != "root" and not (running and fault.rule.waits and fault.role == "cascade"):
        return False
    elsewhere = fault.node is not None and fault.node not in attempt_state.nodes
    if attempt_state.nodes and elsewhere and fault.rule.exclude_after is not None:
        return False  # on a spare, perhaps
    if (end := taken_back(fault, ends)) is not None:
        return not running and not _overcome(fault, end, attempt_state, settings)
    overcome = _overcome(fault, None, attempt_state, settings)
    return (not overcome or _stays(fault)) and not _is_outdated(fault, attempt_state)


def _is_outdated(fault: Fault, attempt_state: AttemptSummary) -> bool:
    """Return whether it is unknown if a network is up again, since its node's agent is silent."""
    lost = (loss for loss in attempt_state.faults if loss.kind == AGENT_LOST and loss.node == fault.node)
    return fault.rule.of_network and any(loss.time > fault.time for loss in lost)


def _stays(fault: Fault) -> bool:
    """Return whether a fault is a state that lasts until something takes it back, though the run continues."""
    return fault.rule.while_running == "give up" or fault.rule.lasting or fault.source in _ENDS_OF_RANKS


def taken_back(fault: Fault, ends: Sequence[Fault]) -> Fault | None:
    """Return the first of `ends`, by time, that takes a fault back: of its kind and location, or its network."""

    def over(end: Fault) -> bool:
        same = end.kind == fault.kind or (end.rule.of_network and fault.rule.of_network)
        places = ((end.node, fault.node), (end.nic, fault.nic), (end.gpu, fault.gpu), (end.rank, fault.rank))
        agree = all(
            place_of_fault == place_of_end
            for place_of_fault, place_of_end in places
            if place_of_fault is not None and place_of_end is not None
        )
        return same and agree

    later = range(bisect_left(ends, fault.time, key=lambda end: end.time), len(ends))
    return next((ends[i] for i in later if over(ends[i])), None)


def stalled_networks(faults: Sequence[Fault]) -> set[str]:
    """Return the nodes with a fault of the network that lasts: every rank waits for theirs."""
    lasting = [f for f in faults if f.role == "root" and f.rule.of_network and not f.cleared]
    ends = ends_of(faults) if lasting else []
    return {fault.node for fault in lasting if fault.node is not None and taken_back(fault, ends) is None}


def _overcome(fault: Fault, end: Fault | None, attempt_state: AttemptSummary, settings: AegisSection) -> bool:
    """Return whether the run continued after a fault, so that it cannot be why it ended later."""
    if attempt_state.progressed_at is not None:
        return attempt_state.progressed_at > fault.time + _CLOCKS_S
    return end is not None and attempt_state.now - end.time > settings.tolerate_s


def believable(roots: Sequence[Fault], attempt_state: AttemptSummary) -> list[Fault]:
    """Return the roots without dead nodes if all of several are: then it is the reporter that is cut off."""
    dead = {fault.node for fault in roots if fault.kind == NODE_DEAD}
    cut_off = len(attempt_state.nodes) > 1 and dead >= set(attempt_state.nodes)
    return [fault for fault in roots if not (cut_off and fault.kind == NODE_DEAD)]


def first_cause(roots: Sequence[Fault]) -> Fault | None:
    """Return the earliest of those that are neither slow nor waiting, or what explains it; else the earliest."""
    if not roots:
        return None
    active = [fault for fault in roots if not fault.rule.waits and fault.kind != STRAGGLER]
    slow = [fault for fault in roots if fault.kind == STRAGGLER]
    root = next(iter(active or [fault for fault in roots if fault not in slow] or slow))
    if not root.rule.unexplained:
        return root
    return next((fault for fault in active if _explains(fault, root)), root)


def _explains(fault: Fault, end: Fault) -> bool:
    """Return whether a fault explains why a rank ended, though it was noticed later."""
    if fault.rule.unexplained:
        return False
    if fault.kind == SLURM_CANCELLED and fault.source in _OF_SLURM:  # every rank of the step
        return True
    if fault.kind == EARLY_EXIT and end.kind == RANK_HANG:  # all who are left wait for the one that has gone
        return True
    if fault.rank is not None:
        return fault.rank == end.rank
    if fault.kind == STORAGE_FAULT and fault.node is None:
        return end.kind == RANK_HANG
    return fault.rule.explains_rank_ends and (fault.node is None or fault.node == end.node)


# --- what ranks recorded when they ended -----------------------------------------------------------------------

# What gloo, NCCL and RCCL, and the store say when it was somebody else who left.
_CASCADE = re.compile(
    r"Connection (closed by|reset by) peer|Broken pipe|Read error|Write error|Timed out waiting|"
    r"remote process exited|DistNetworkError|Socket Timeout|ncclRemoteError|ncclSystemError|"
    r"watchdog .*caught collective operation timeout|wait timeout after|recvValue failed|sendBytes failed",
    re.IGNORECASE,
)


def is_orderly(end: Mapping[str, Any]) -> bool:
    """Return whether a rank recorded that it finished, or saved and stopped; not by an error or `sys.exit`."""
    return end["exit_code"] in (Exit.DONE, Exit.INTERRUPTED) and not end.get("error")


def root_failure(
    failures: Sequence[TaskFailure], ends_by_rank: Mapping[int, Mapping[str, Any]]
) -> TaskFailure | None:
    """Return the first failure that is no mere consequence of another; None while there are only cascades."""
    return next((failure for failure in failures if not _is_cascade(failure, ends_by_rank)), None)


def _is_cascade(failure: TaskFailure, by_rank: Mapping[int, Mapping[str, Any]]) -> bool:
    """Return whether every rank of the failure recorded that a peer had left."""
    if failure.exit_code is None:
        return False
    return all(rank in by_rank and reports_lost_peer(by_rank[rank]) for rank in failure.ranks)


def reports_lost_peer(end: Mapping[str, Any]) -> bool:
    """Return whether what a rank recorded is a complaint about another rank that left.

    A hook that catches such an error may end its rank by `sys.exit`: then the traceback holds the complaint.
    """
    where = "traceback" if end.get("error") == "SystemExit" else "message"
    return bool(_CASCADE.search(str(end.get(where))))


def earliest_root(end: Mapping[str, Any]) -> tuple[bool, float]:
    """Sort what ranks recorded: own errors before complaints about peers, then by time."""
    return reports_lost_peer(end), float(end["time"])
