"""Why a job waits, in plain words: Slurm's reason code and what it means for its owner.

Meanings from https://slurm.schedmd.com/job_reason_codes.html and squeue(1), JOB REASON CODES. A code that is not
here (sites and later versions have more) is shown as it is.
"""

from __future__ import annotations

import re

_MEANINGS = {
    "Priority": "jobs of higher priority come first",
    "Resources": "next in line; waits for nodes to become free",
    "Dependency": "waits for another job to end",
    "DependencyNeverSatisfied": "waits for a job that ended otherwise than required: it will never start",
    "BeginTime": "must not start before its begin time",
    "JobHeldUser": "held by its owner; `zslurm requeue` lets it start",
    "JobHeldAdmin": "held by an administrator, or failed to start too often; ask the site",
    "JobHoldMaxRequeue": "was requeued too often and is held; `zslurm requeue` lets it start",
    "JobLaunchFailure": "could not be started on a node, whose prolog or file system may be at fault",
    "BadConstraints": "no set of nodes fits what it asks for, excluded nodes counted in",
    "Cleaning": "its last start is still being cleaned up on its nodes",
    "InactiveLimit": "reached the limit of inactivity",
    "InvalidAccount": "its account does not exist",
    "InvalidQOS": "its QOS does not exist",
    "AccountNotAllowed": "its account may not use the partition",
    "QOSNotAllowed": "its QOS may not be used with the account or partition",
    "Licenses": "waits for a license",
    "NodeDown": "a node that it asks for by name is down",
    "PartitionDown": "the partition is down",
    "PartitionInactive": "the partition is inactive",
    "PartitionNodeLimit": "asks for more nodes than the partition has or allows",
    "PartitionTimeLimit": "asks for more time than the partition allows",
    "PartitionConfig": "asks for what the partition does not allow",
    "ReqNodeNotAvail": "a node that it needs is down, drained or reserved",
    "Reservation": "waits for its reservation to begin",
    "ReservationDeleted": "its reservation no longer exists",
    "ReservationInvalid": "its reservation cannot be used",
    "SchedDefer": "the site's scheduler starts jobs in its next round, not at submission",
    "MpiPortsBusy": "waits for network ports of MPI to become free on its nodes",
    "NvidiaImexChannels": "waits for an IMEX channel of NVIDIA's fabric to become free",
    "DeadLine": "it could not end before its deadline",
    "RaisedSignal": "it ended by a signal",
    "Prolog": "the prolog still runs on its nodes",
    "FrontEndDown": "no front end node is available",
    "NonZeroExitCode": "it ended with an exit code other than zero",
    "TimeLimit": "it reached its time limit",
    "SystemFailure": "Slurm, a file system or the network failed",
    "OutOfMemory": "it ran out of memory",
    "job requeued in held state": "requeued and held; `zslurm requeue` lets it start",
    "launch failed requeued held": "could not be started and is held; `zslurm requeue` tries again on other nodes",
}
_FAMILIES = (
    (re.compile(r"AssocGrp(\w+)"), "the account has reached its common limit ({})"),
    (re.compile(r"AssocMax(\w+)"), "exceeds the account's limit for one job or user ({})"),
    (re.compile(r"QOSGrp(\w+)"), "the QOS has reached its common limit ({})"),
    (re.compile(r"QOSM(?:ax|in)(\w+)"), "outside the QOS's limits for one job or user ({})"),
    (re.compile(r"Max(\w+)PerAccount"), "exceeds the QOS's limit for one account ({})"),
    (re.compile(r"JobArrayTaskLimit()"), "the array runs as many tasks at once as it may"),
)
_CAPITALS = re.compile(r"(?<=[a-z])(?=[A-Z])")


def explain(reason: str) -> str:
    """Slurm's reason with its meaning, if that is known; nodes that it names after a comma are kept."""
    code, _, details = reason.strip("() ").partition(",")
    meaning = _MEANINGS.get(code.strip())
    if meaning is None:
        meaning = _MEANINGS.get(reason.strip("() ")) or _of_family(code.strip())
    nodes = details.strip().removeprefix("UnavailableNodes:")
    shown = f"{meaning} ({nodes})" if meaning and nodes else meaning
    return f"{code.strip()}: {shown}" if shown else reason


def _of_family(code: str) -> str | None:
    for pattern, meaning in _FAMILIES:
        if match := pattern.fullmatch(code):
            return meaning.format(" ".join(_CAPITALS.split(match[1])).lower().removesuffix(" limit"))
    return None
