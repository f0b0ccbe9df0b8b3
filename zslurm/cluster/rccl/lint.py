"""Check variables of RCCL, NCCL and PyTorch that a user has set: dead, misspelt, dangerous, contradictory.

The checks of the network are in `lint_network`; what a finding is, in `finding`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import replace

from zslurm.checkpoint_tools.quantities import counted, show_duration
from zslurm.cluster.rccl.conf_files import NO_FILES, Conf
from zslurm.cluster.rccl.finding import LEVELS, FindingFields, RcclFinding, is_on, number
from zslurm.cluster.rccl.lint_network import CHECKS
from zslurm.cluster.rccl.rules import (
    LONGEST_TIMEOUT,
    in_range,
    patience_s,
    rccl_version,
    rules,
    variables,
    vendor_of,
)
from zslurm.config.spec import ClusterSection

OURS = ("NCCL_", "RCCL_", "TORCH_NCCL_", "TORCH_FR_", "HSA_", "FI_", "MSCCL", "NET_OPTIONAL_RECV_COMPLETION")
"""What the names begin with that are looked at."""

# RCCL's and NCCL's own defaults where a variable is not set.
_TIMEOUT, _RETRIES = 20, 7
_HOUR_S = 3600
# What difflib gives TIMOUT for TIMEOUT is 0.92, AGLO for ALGO and NCLL for NCCL 0.75, GIN for GID 0.67.
_NEAR = 0.75
_PREFIXES = ("NCCL", "RCCL", "TORCH_NCCL", "HSA")
_SLIP = re.compile(r"(TORCH_)?[NR][CL]{2,4}_")  # NCLL_, RCL_


def lint(given: Mapping[str, str], cluster: ClusterSection, conf: Conf = NO_FILES) -> list[RcclFinding]:
    """Check the variables of a job on a cluster; faults first, else by name. Only those of `OURS` are checked.

    What the vendor of the GPUs publishes for the cluster's network, name and value, is no finding (`documented` in
    variables.yaml). `given` is what the ranks will see: the login environment as far as it is exported, under the
    job's variables; what the libraries read from files (`conf`) holds if `given` sets nothing.
    """
    behind = {setting.name: setting for setting in conf.settings if setting.name not in given}
    everything = {name: setting.value for name, setting in behind.items()} | dict(given)
    looked_at = {name: value for name, value in sorted(everything.items()) if concerns_us(name)}
    entries = [
        RcclFinding(name, looked_at.get(name), level, message)
        for check in _CHECKS
        for level, name, message in check(looked_at, cluster)
    ]
    entries = [entry for entry in entries if not variables().is_documented(entry.name, entry.value, cluster)]
    entries = [_placed(entry, behind[entry.name].place) if entry.name in behind else entry for entry in entries]
    entries += _of_files(conf, looked_at, {entry.name for entry in entries})
    return sorted(entries, key=lambda finding: (LEVELS.index(finding.level), finding.name))


def _placed(finding: RcclFinding, place: str) -> RcclFinding:
    return replace(finding, message=f"{finding.message} (set in {place}, which the library reads by itself)")


def _of_files(conf: Conf, looked_at: Mapping[str, str], found: set[str]) -> Iterator[RcclFinding]:
    if conf.unreadable is not None:
        message = "this file cannot be read here; is it there on the compute nodes?"
        yield RcclFinding("NCCL_CONF_FILE", conf.unreadable, "warning", message)
    for setting in conf.settings:
        if setting.name in looked_at and setting.name not in found:
            message = f"set in {setting.place}, which the library reads by itself; cluster.env would show it"
            yield RcclFinding(setting.name, setting.value, "note", message)


def overridden(exported: Mapping[str, str], job: Mapping[str, str]) -> list[RcclFinding]:
    """Variables of the login environment that the job sets to something else."""
    return [
        RcclFinding(name, value, "note", f"the job sets {job[name]}; to keep yours, put it into cluster.env")
        for name, value in sorted(exported.items())
        if concerns_us(name) and job.get(name, value) != value
    ]


def concerns_us(name: str) -> bool:
    """Return whether a variable is one of RCCL, NCCL, their plugins or the ROCm runtime, or meant to be."""
    return name.startswith(OURS) or _SLIP.match(name) is not None


# --- names ------------------------------------------------------------------------------------------------------


def _names(given: Mapping[str, str], cluster: ClusterSection) -> Iterator[FindingFields]:
    shipped = variables()
    names, gone = shipped.names, shipped.gone
    slips = {entry.name: entry for entry in shipped.misspelt}
    for name in given:
        if name in slips:
            entry = slips[name]
            yield "warning", name, f"nothing reads this name; meant is {entry.meant} ({entry.source})"
        elif name in gone:
            end = gone[name]
            library = "RCCL" if end.vendor == "amd" else "NCCL and RCCL"
            is_dropped = end.vendor == vendor_of(cluster) and in_range(rccl_version(cluster), f">={end.since}")
            if (
                end.vendor is None or is_dropped
            ):  # what both have dropped was gone before any PyTorch that runs this
                yield "warning", name, f"has no effect since {library} {end.since}: {end.why} ({end.source})"
        elif (meant := meant_by(name, names | gone.keys())) is not None:
            yield "warning", name, f"nothing is known to read this name; did you mean {meant}?"


def meant_by(name: str, known: Set[str]) -> str | None:
    """Return the known name that `name` is a slip of; None if it is known itself, or a slip of none.

    Only a slip of the pen counts: one word that no name has and that is nearly one of theirs (TIMOUT), the words
    of a name in another order, with another prefix, or with an underscore too few or too many. Similarity alone
    does not: NCCL_RMA_DISABLE is as near to NCCL_SHM_DISABLE as a slip would be, and is another name.
    """
    if name in known:
        return None
    words = name.split("_")
    return (
        _other_prefix(words, known)
        or _first(known, lambda candidate: candidate.replace("_", "") == name.replace("_", ""))
        or _first(known, lambda candidate: sorted(candidate.split("_")) == sorted(words))
        or _one_word_off(words, known)
    )


def _first(known: Set[str], fits: Callable[[str], bool]) -> str | None:
    return min((name for name in known if fits(name)), default=None)


def _other_prefix(words: list[str], known: Set[str]) -> str | None:
    if words[0] == "FI":  # libfabric has FI_LOG_LEVEL, as RCCL has RCCL_LOG_LEVEL
        return None
    stem = "_".join(words[1:])
    return next((candidate for prefix in _PREFIXES if (candidate := f"{prefix}_{stem}") in known), None)


def _one_word_off(words: list[str], known: Set[str]) -> str | None:
    """Return the nearest name that differs in a single word, which no name has."""
    vocabulary = {word for name in known for word in name.split("_")}
    strange = [index for index, word in enumerate(words) if word not in vocabulary]
    if len(strange) != 1:
        return None
    at = strange[0]
    near: dict[str, float] = {}
    for name in known:
        others = name.split("_")
        if len(others) == len(words) and others[:at] == words[:at] and others[at + 1 :] == words[at + 1 :]:
            near[name] = difflib.SequenceMatcher(None, words[at], others[at]).ratio()
    best = max(sorted(near), key=lambda name: near[name], default=None)
    return best if best is not None and near[best] >= _NEAR else None


# --- timeouts ---------------------------------------------------------------------------------------------------


def _timeouts(given: Mapping[str, str], cluster: ClusterSection) -> Iterator[FindingFields]:
    timeout = number(given.get("NCCL_IB_TIMEOUT", str(_TIMEOUT)))
    retries = number(given.get("NCCL_IB_RETRY_CNT", str(_RETRIES)))
    if timeout is None:
        yield "fault", "NCCL_IB_TIMEOUT", f"not a number from 1 to {LONGEST_TIMEOUT}"
        return
    if retries is None or not 0 <= retries <= 7:
        yield "fault", "NCCL_IB_RETRY_CNT", "not a number from 0 to 7 (it has 3 bits)"
        return
    if timeout <= 0 or timeout > LONGEST_TIMEOUT:
        message = f"waits forever on a peer that is gone; valid are 1 to {LONGEST_TIMEOUT}, 21 is a minute"
        yield "fault", "NCCL_IB_TIMEOUT", message
        return
    if variables().is_documented("NCCL_IB_TIMEOUT", given.get("NCCL_IB_TIMEOUT"), cluster):
        return  # nor is a heartbeat that is shorter than it a finding
    patience = patience_s(timeout, retries)
    shown = f"4.096 us * 2^{timeout} * {counted(retries, 'retry')} is {show_duration(patience)}"
    limits = rules().limits
    if patience >= _HOUR_S:
        message = f"{shown} on a peer that is gone; {limits.ib_timeout} is {limits.network_patience_s} s"
        yield "fault", "NCCL_IB_TIMEOUT", message
    elif "NCCL_IB_TIMEOUT" in given and patience < limits.network_patience_s and cluster.rdma_network:
        message = f"{shown}: a link that flaps for longer ends the job; {limits.ib_timeout} rides over a minute"
        yield "warning", "NCCL_IB_TIMEOUT", message
    heartbeat = number(given.get("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"))
    if heartbeat is not None and cluster.rdma_network and 0 < heartbeat <= patience:
        message = f"PyTorch ends the process before the network gives up: {shown}"
        yield "fault", "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", message


# --- what a hang leaves, and what hides -------------------------------------------------------------------------


def _traces(given: Mapping[str, str], cluster: ClusterSection) -> Iterator[FindingFields]:
    sizes = [given[name] for name in ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE") if name in given]
    if is_on(given, "TORCH_NCCL_DUMP_ON_TIMEOUT") and sizes and all(number(size) == 0 for size in sizes):
        yield (
            "warning",
            "TORCH_NCCL_DUMP_ON_TIMEOUT",
            "there is nothing to dump: TORCH_NCCL_TRACE_BUFFER_SIZE is 0",
        )


def _hidden(given: Mapping[str, str], cluster: ClusterSection) -> Iterator[FindingFields]:
    if (plugin := given.get("NCCL_ENV_PLUGIN", "none")) != "none":
        message = f"the plugin {plugin} gives variables other values than these, which no check here sees"
        yield "warning", "NCCL_ENV_PLUGIN", message


_CHECKS = (_names, _timeouts, *CHECKS, _traces, _hidden)
