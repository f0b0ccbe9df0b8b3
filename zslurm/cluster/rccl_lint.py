"""Judge variables of RCCL, NCCL and PyTorch that somebody has set: dead, misspelt, dangerous, contradictory.

A finding is a fault where the job would fail, hang or leave the fast network; else it is a warning.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from zslurm.cluster.rccl_rules import (
    LONGEST_TIMEOUT,
    ROCE,
    in_range,
    patience_s,
    rules,
    variables,
    vendor_of,
)
from zslurm.config.spec import ClusterSection

OURS = ("NCCL_", "RCCL_", "TORCH_NCCL_", "TORCH_FR_", "HSA_", "MSCCL", "NET_OPTIONAL_RECV_COMPLETION")
"""What the names begin with that are looked at."""

# RCCL's and NCCL's own defaults where a variable is not set.
_TIMEOUT, _RETRIES = 20, 7
_HOUR_S = 3600
_SLIP = re.compile(r"(TORCH_)?[NR][CL]{2,4}_")  # NCLL_, RCL_
_ADDRESS = re.compile(r"\d+\.\d+\.\d+\.\d+(/\d+)?|[0-9a-fA-F]*:[0-9a-fA-F:]+")
# Alike enough to be a slip, as difflib counts: NCCL_IB_TIMOUT and NCCL_AGLO are, NCCL_IB_FOO is not.
_NEAR = 0.85


@dataclass(frozen=True)
class Finding:
    """Something about one variable.

    Attributes:
        level: `fault` or `warning`.
        value: the variable's; None where it is not set at all.
        message: what is wrong, and what to do.
    """

    name: str
    value: str | None
    level: Literal["fault", "warning"]
    message: str

    @property
    def line(self) -> str:
        """`NCCL_PXN_DISABLE=1: ...`"""
        shown = self.name if self.value is None else f"{self.name}={self.value}"
        return f"{shown}: {self.message}"


Check = Callable[[Mapping[str, str], ClusterSection], Iterator[Finding]]


def lint(given: Mapping[str, str], cluster: ClusterSection) -> list[Finding]:
    """Judge the variables of a job on a cluster; faults first, else by name. Others than `OURS` are left alone.

    Args:
        given: what the ranks will see: the login environment as far as it is exported, under the job's own.
        cluster: the profile.
    """
    looked_at = {name: value for name, value in sorted(given.items()) if concerns_us(name)}
    found = [finding for check in _CHECKS for finding in check(looked_at, cluster)]
    return sorted(found, key=lambda finding: (finding.level != "fault", finding.name))


def overridden(exported: Mapping[str, str], job: Mapping[str, str]) -> list[Finding]:
    """Variables of the login environment that the job sets to something else."""
    return [
        Finding(name, value, "warning", f"the job sets {job[name]}; to keep yours, put it into cluster.env")
        for name, value in sorted(exported.items())
        if concerns_us(name) and job.get(name, value) != value
    ]


def concerns_us(name: str) -> bool:
    """Whether a variable is one of RCCL, NCCL, their plugins or the ROCm runtime, or meant to be."""
    return name.startswith(OURS) or _SLIP.match(name) is not None


def _fault(given: Mapping[str, str], name: str, message: str) -> Finding:
    return Finding(name, given.get(name), "fault", message)


def _warning(given: Mapping[str, str], name: str, message: str) -> Finding:
    return Finding(name, given.get(name), "warning", message)


def _is_on(given: Mapping[str, str], name: str) -> bool:
    return _number(given.get(name)) not in (None, 0)


def _number(text: str | None) -> int | None:
    try:
        return int(text, 0) if text is not None else None
    except ValueError:
        return None


# --- names ------------------------------------------------------------------------------------------------------


def _names(given: Mapping[str, str], cluster: ClusterSection) -> Iterator[Finding]:
    shipped = variables()
    names, gone = shipped.names, shipped.gone
    slips = {entry.name: entry for entry in shipped.misspelt}
    for name in given:
        if name in slips:
            entry = slips[name]
            yield _warning(given, name, f"nothing reads this name; meant is {entry.meant} ({entry.source})")
        elif name in gone:
            end = gone[name]
            library = "RCCL" if end.vendor == "amd" else "NCCL and RCCL"
            known = end.vendor == vendor_of(cluster) and in_range(cluster.rccl_version, f">={end.since}")
            if end.vendor is None or known:  # what both have dropped was gone before any PyTorch that runs this
                message = f"has no effect since {library} {end.since}: {end.why} ({end.source})"
                yield _warning(given, name, message)
        elif name not in names and (near := difflib.get_close_matches(name, names | gone.keys(), 1, _NEAR)):
            yield _warning(given, name, f"nothing is known to read this name; did you mean {near[0]}?")


# --- timeouts ---------------------------------------------------------------------------------------------------


def _timeouts(given: Mapping[str, str], cluster: ClusterSection) -> Iterator[Finding]:
    timeout = _number(given.get("NCCL_IB_TIMEOUT", str(_TIMEOUT)))
    retries = _number(given.get("NCCL_IB_RETRY_CNT", str(_RETRIES)))
    if timeout is None:
        yield _fault(given, "NCCL_IB_TIMEOUT", f"not a number from 1 to {LONGEST_TIMEOUT}")
        return
    if retries is None or not 0 <= retries <= 7:
        yield _fault(given, "NCCL_IB_RETRY_CNT", "not a number from 0 to 7 (it has 3 bits)")
        return
    if timeout <= 0 or timeout > LONGEST_TIMEOUT:
        message = f"waits for ever on a peer that is gone; valid are 1 to {LONGEST_TIMEOUT}, 21 is a minute"
        yield _fault(given, "NCCL_IB_TIMEOUT", message)
        return
    patience = patience_s(timeout, retries)
    said = f"4.096 us * 2^{timeout} * {retries} retries is {_duration(patience)}"
    wanted = rules().limits
    if patience >= _HOUR_S:
        message = f"{said} on a peer that is gone; {wanted.ib_timeout} is {wanted.network_patience_s} s"
        yield _fault(given, "NCCL_IB_TIMEOUT", message)
    elif "NCCL_IB_TIMEOUT" in given and patience < wanted.network_patience_s and cluster.network:
        message = f"{said}: a link that flaps for longer ends the job; {wanted.ib_timeout} rides over a minute"
        yield _warning(given, "NCCL_IB_TIMEOUT", message)
    heartbeat = _number(given.get("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"))
    if heartbeat is not None and cluster.network and 0 < heartbeat <= patience:
        message = f"PyTorch ends the process before the network gives up: {said}"
        yield _fault(given, "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", message)


def _duration(seconds: float) -> str:
    for unit, length in (("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.1f} s"


# --- rails and NICs ---------------------------------------------------------------------------------------------


def _rails(given: Mapping[str, str], cluster: ClusterSection) -> Iterator[Finding]:
    if not cluster.rails_only:
        return
    no_path = "there is no path from one rail to another"
    if _is_on(given, "NCCL_PXN_DISABLE"):
        message = f"{no_path}: without PXN an all-to-all cannot reach the GPUs of other rails; set 0"
        yield _fault(given, "NCCL_PXN_DISABLE", message)
    if _number(given.get("NCCL_P2P_PXN_LEVEL")) == 0:
        yield _fault(given, "NCCL_P2P_PXN_LEVEL", f"{no_path}: 0 is send and receive without PXN; leave it unset")
    if _is_on(given, "NCCL_P2P_DISABLE"):
        yield _fault(given, "NCCL_P2P_DISABLE", f"{no_path}, and PXN needs the GPUs of a node to reach each other")
    if _is_on(given, "NCCL_CROSS_NIC"):
        yield _fault(given, "NCCL_CROSS_NIC", f"{no_path}; set 0")


def _gid(given: Mapping[str, str], cluster: ClusterSection) -> Iterator[Finding]:
    index = given.get("NCCL_IB_GID_INDEX")
    if index is None or cluster.network not in ROCE or index == "-1":
        return
    usual = rules().gid_index[cluster.network]
    if cluster.gid_index is not None and index != str(cluster.gid_index):
        message = f"the profile says that RoCE v2 has GID index {cluster.gid_index} (cluster.gid_index)"
        yield _fault(given, "NCCL_IB_GID_INDEX", message)
    elif cluster.gid_index is None and index != str(usual):
        message = (
            f"RoCE v2 usually has GID index {usual} on {cluster.network}; if it is {index} here, say "
            f"cluster.gid_index: {index} (`zslurm rails` shows it)"
        )
        yield _warning(given, "NCCL_IB_GID_INDEX", message)


def _devices(given: Mapping[str, str], cluster: ClusterSection) -> Iterator[Finding]:
    text = given.get("NCCL_IB_HCA", "")
    if not text or text.startswith("^"):
        return
    names = [entry.partition(":")[0] for entry in text.removeprefix("=").split(",") if entry]
    if not text.startswith("="):
        # A name without a number is meant as a prefix; `ionic_1` hardly ever is.
        numbered = [name for name in names if name[-1:].isdigit()]
        for name in numbered:
            others = [nic for nic in cluster.nics if nic.startswith(name) and nic not in names]
            if others:
                message = f"{name} also takes {others[0]}; write ={text} for exactly these"
                yield _fault(given, "NCCL_IB_HCA", message)
                return
        if numbered:
            also = f"{numbered[0]} also takes {numbered[0]}0 if there is one"
            yield _warning(given, "NCCL_IB_HCA", f"{also}; write ={text}")
            return
        names = [nic for nic in cluster.nics if nic.startswith(tuple(names))]
    unknown = [name for name in names if cluster.nics and name not in cluster.nics]
    missing = [nic for nic in cluster.nics if nic not in names]
    if unknown:
        message = f"{', '.join(unknown)}: not among the profile's NICs ({', '.join(cluster.nics)})"
        yield _fault(given, "NCCL_IB_HCA", message)
    elif missing:
        yield _warning(given, "NCCL_IB_HCA", f"leaves out {', '.join(missing)} of the profile's NICs")


def _network(given: Mapping[str, str], cluster: ClusterSection) -> Iterator[Finding]:
    if cluster.network and _is_on(given, "NCCL_IB_DISABLE"):
        yield _fault(given, "NCCL_IB_DISABLE", "everything between nodes goes over TCP sockets")
    if cluster.network and given.get("NCCL_NET", "").lower() == "socket":
        yield _fault(given, "NCCL_NET", "everything between nodes goes over TCP sockets")
    interface = given.get("NCCL_SOCKET_IFNAME", "").removeprefix("^").removeprefix("=")
    if _ADDRESS.fullmatch(interface):
        yield _fault(given, "NCCL_SOCKET_IFNAME", "is an address; name an interface, such as =eth0")


# --- what a hang leaves, and signals ----------------------------------------------------------------------------


def _traces(given: Mapping[str, str], cluster: ClusterSection) -> Iterator[Finding]:
    sizes = [given[name] for name in ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE") if name in given]
    if _is_on(given, "TORCH_NCCL_DUMP_ON_TIMEOUT") and sizes and all(_number(size) == 0 for size in sizes):
        yield _warning(
            given, "TORCH_NCCL_DUMP_ON_TIMEOUT", "there is nothing to dump: TORCH_NCCL_TRACE_BUFFER_SIZE is 0"
        )


def _signals(given: Mapping[str, str], cluster: ClusterSection) -> Iterator[Finding]:
    """A rank saves and stops on SIGUSR2, and takes the signal back after every step (train/stop.py): who takes it
    away takes requests before the first step has ended."""
    save = "the run asks its ranks with SIGUSR2 to save (they take it back after each step)"
    if re.search(r"(^|[/_-])(lib)?(rccl-)?anp(\.so.*)?$", given.get("NCCL_NET_PLUGIN", "")):
        message = f"AMD's ANP plugin ends a process on SIGUSR2 (net_ib.cc, anp_sig_handler), but {save}"
        yield _warning(given, "NCCL_NET_PLUGIN", message)
    if _is_on(given, "RCCL_ENABLE_SIGNALHANDLER"):
        yield _warning(given, "RCCL_ENABLE_SIGNALHANDLER", f"RCCL takes SIGUSR2 for itself, but {save}")


_CHECKS: tuple[Check, ...] = (_names, _timeouts, _rails, _gid, _devices, _network, _traces, _signals)
