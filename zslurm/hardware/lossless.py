"""The class of a RoCE fabric in which nothing is dropped, as the NICs' tools show it: `nicctl`, `dcb`, `mlnx_qos`.

A class is a DSCP in a packet's header. NICs map it to one of eight priorities, and priority flow control makes
some of these lossless. RCCL takes four times the DSCP (NCCL_IB_TC). The tools' forms are those of published
outputs; nicctl's was not seen on a node.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence

from zslurm.core.errors import ZslurmError
from zslurm.hardware.command import CommandHung, CommandResult
from zslurm.hardware.nics import Nic
from zslurm.slurm.hostlist import expand_ranges

Run = Callable[..., CommandResult | None]

USUAL_DSCP = 26
"""AF31: the lossless class that vendors' guides configure, and AMD's default for Pollara (NCCL_IB_TC=104)."""

_LIST = r"([0-9][0-9,\s-]*?)"
_NICCTL_LOSSLESS = re.compile(rf"no-?drop prio\w*\s*:\s*{_LIST}\s*$", re.IGNORECASE | re.MULTILINE)
_NICCTL_DSCP = re.compile(rf"\bDSCP\s*:\s*{_LIST}\s*==>\s*priority\s*:\s*([0-7])\b", re.IGNORECASE)
_DCB_LOSSLESS = re.compile(r"\b([0-7]):on\b")
_DCB_DSCP = re.compile(r"\b([0-9]+):([0-7])\b")
_MLNX_DSCP = re.compile(r"prio:([0-7])\s+dscp:([0-9,]+)")
_MLNX_LOSSLESS = re.compile(r"^\s*enabled\s+([01 ]+)$", re.MULTILINE)


def read_classes(run: Run, nics: Sequence[Nic], timeout_s: float) -> dict[str, int | None]:
    """Return the lossless traffic class of each Ethernet NIC that a tool shows, by interface; None if none is.

    Args:
        run: runs a program with its arguments; None if there is no such program.
        nics: of the node.
        timeout_s: for each call of a tool.
    """
    interfaces = [nic.netdevs[0] for nic in nics if nic.link_layer == "Ethernet" and nic.netdevs]
    shown = _answer(run, timeout_s, "nicctl", "show", "qos") if any(nic.driver == "ionic" for nic in nics) else ""
    if lossless := [number for text in _NICCTL_LOSSLESS.findall(shown) for number in _numbers(text)]:
        of_dscp = {dscp: int(to) for text, to in _NICCTL_DSCP.findall(shown) for dscp in _numbers(text)}
        return {"every NIC": _class(lossless, of_dscp)}
    classes = {}
    for name in interfaces:
        if pfc := _answer(run, timeout_s, "dcb", "-N", "pfc", "show", "dev", name, "prio-pfc"):
            app = _answer(run, timeout_s, "dcb", "-N", "app", "show", "dev", name, "dscp-prio")
            mapped = {int(dscp): int(priority) for dscp, priority in _DCB_DSCP.findall(app)}
            if mapped:
                classes[name] = _class(map(int, _DCB_LOSSLESS.findall(pfc)), mapped)
                continue
        qos = _answer(run, timeout_s, "mlnx_qos", "-i", name)
        if enabled := _MLNX_LOSSLESS.search(qos):
            no_drop = [priority for priority, word in enumerate(enabled[1].split()) if word == "1"]
            mapped = {
                int(dscp): int(to) for to, text in _MLNX_DSCP.findall(qos) for dscp in text.split(",") if dscp
            }
            classes[name] = _class(no_drop, mapped)
    return classes


def _answer(run: Run, timeout_s: float, *command: str) -> str:
    try:
        done = run(*command, timeout_s=timeout_s)
    except (CommandHung, OSError):
        return ""
    return done.out if done is not None and done.code == 0 else ""


def _numbers(text: str) -> list[int]:
    try:
        return expand_ranges(re.sub(r"\s", "", text).strip(","))
    except ZslurmError:
        return []


def _class(lossless: Iterable[int], priority_of_dscp: Mapping[int, int]) -> int | None:
    """Return four times the DSCP of a lossless priority: the usual one if it is one, else the lowest."""
    priorities = set(lossless)
    fitting = sorted(dscp for dscp, priority in priority_of_dscp.items() if priority in priorities)
    chosen = USUAL_DSCP if USUAL_DSCP in fitting else next(iter(fitting), None)
    return None if chosen is None else 4 * chosen
