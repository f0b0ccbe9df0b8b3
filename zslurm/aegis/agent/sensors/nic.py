"""The NICs of the rails: links that go down, retries that are exceeded, retransmissions.

All of it is in sysfs. The names of hardware counters are the firmware's own and are found by listing the directory
(drivers/infiniband/hw/ionic/ionic_hw_stats.c); only what is known by name is compared, and only how it grew:

exceeded: the NIC gave a peer up, or waited for it in vain. Pollara `req_tx_retry_excd_err`, `tx_rdma_ack_timeout`
    (amd/node-scraper, PollaraRdmaStatistics), ConnectX `req_transport_retries_exceeded`, Broadcom
    `max_retry_exceeded` (drivers/infiniband/hw: mlx5/counters.c, bnxt_re/hw_counters.c).
retransmitted: packets sent again: congestion, or a bad cable; compared with the packets sent.

The state and the number of times that a link went down are compared with the attempt's beginning by the
first look of each agent, and against the look before by every other. Counters of the hardware are rates: what the
agent before has reported is not reported again, so the next one continues from the last look.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from zslurm.aegis.agent.sensor import Change, NodeContext, Reading, Sensor
from zslurm.aegis.fault_kinds import NIC_ERRORS, NIC_FAULT, NIC_LINK_DOWN
from zslurm.aegis.types import Fault
from zslurm.checkpoint_tools.quantities import counted
from zslurm.cluster.rails.map import rail_map
from zslurm.core.files import read_text
from zslurm.hardware.facts import read_facts
from zslurm.hardware.nics import read_nics
from zslurm.hardware.sysfs import names, read_int

EXCEEDED = frozenset(
    ("req_tx_retry_excd_err", "tx_rdma_ack_timeout", "req_transport_retries_exceeded", "max_retry_exceeded")
)
RETRANSMITTED = frozenset(
    ("tx_rdma_retx_pkts", "tx_rdma_ccl_cts_retx_pkts", "local_ack_timeout_err", "packet_seq_err", "to_retransmits",
     "seq_err_naks_rcvd")
)  # fmt: skip
SENT = ("tx_rdma_ucast_pkts", "tx_pkts", "port_xmit_packets")
"""Packets sent: Pollara, Broadcom, and the port counter that every InfiniBand driver has. The first one counts."""

_LINK_DOWNED = "link_downed"
_WATCHED = EXCEEDED | RETRANSMITTED | {*SENT, _LINK_DOWNED}

_SHARE = 1e-3
_FEWEST = 100
"""Retransmissions between two looks that are worth a report: a share of the packets sent, and a least number."""

_LINK_LAYER_DOWN = frozenset(("down", "lowerlayerdown", "notpresent"))


@dataclass(frozen=True)
class NicState:
    """A NIC at one moment.

    Attributes:
        trouble: why its link is not up; empty if it is.
        downs: times that the link went down since the driver was loaded, by counter.
        counters: of the hardware and the port, by name, as far as they are compared.
    """

    trouble: str = ""
    downs: Mapping[str, int] = field(default_factory=dict)
    counters: Mapping[str, int] = field(default_factory=dict)


def read_nic(root: Path, device: str) -> NicState:
    """Return the state of an RDMA device's port.

    Args:
        root: see `sysfs.sysroot`.
        device: its name in /sys/class/infiniband.
    """
    entry = root / "sys/class/infiniband" / device
    if not entry.is_dir():
        return NicState("it has disappeared")
    ports = sorted(int(name) for name in names(entry / "ports") if name.isdecimal())
    if not ports:
        return NicState("it has no port")
    port = entry / "ports" / str(ports[0])
    netdevs = [entry / "device/net" / name for name in names(entry / "device/net")]
    counters = _counters(port / "counters") | _counters(port / "hw_counters") | _counters(entry / "hw_counters")
    downs = {_LINK_DOWNED: counters[_LINK_DOWNED]} if _LINK_DOWNED in counters else {}
    for netdev in netdevs:
        if (count := read_int(netdev / "carrier_down_count")) is not None:
            downs[netdev.name] = count
    return NicState(_trouble(port, netdevs), downs, counters)


def _counters(directory: Path) -> dict[str, int]:
    """Return the counters that are compared; a NIC has more than seventy, and reading one may ask its firmware."""
    counters = [name for name in names(directory) if name in _WATCHED]
    return {name: count for name in counters if (count := read_int(directory / name)) is not None}


def _trouble(port: Path, netdevs: Iterable[Path]) -> str:
    """Return why the link is not up. What cannot be read is no trouble."""
    state, physical = _word(port / "state"), _word(port / "phys_state")
    wrong = [word for word, good in ((state, "ACTIVE"), (physical, "LinkUp")) if word and word != good]
    if wrong:
        return f"port {port.name} is {', '.join(wrong)}"
    if read_text(port / "link_layer") == "Ethernet":
        operstates = [read_text(netdev / "operstate") for netdev in netdevs]
        if operstates and all(state in _LINK_LAYER_DOWN for state in operstates):
            return f"its interface is {operstates[0]}"
    return ""


def _word(path: Path) -> str:
    """Return the name in `4: ACTIVE`."""
    return (read_text(path) or "").rpartition(":")[2].strip()


def changes(before: NicState, now: NicState) -> list[Change]:
    """Return what happened to a link between two looks; one that went down and came back is reported as both."""
    if now.trouble:
        return [] if before.trouble else [Change(NIC_LINK_DOWN, now.trouble)]
    up = Change(NIC_LINK_DOWN, "the link is up again", cleared=True)
    if before.trouble:
        return [up]
    if flaps := sum(_grown(before.downs, now.downs).values()):
        return [Change(NIC_LINK_DOWN, f"the link went down {counted(flaps, 'time')} and is up again"), up]
    return []


def exceeded_retries(before: NicState, now: NicState) -> str:
    """Return which counters show that the NIC gave peers up between two looks; empty if none does."""
    grown = _grown(before.counters, now.counters)
    return _listed({name: count for name, count in grown.items() if name in EXCEEDED})


def retransmits_much(before: NicState, now: NicState) -> str:
    """Return what shows that more than a share of the packets was sent again between two looks, or nothing."""
    grown = _grown(before.counters, now.counters)
    again = {name: count for name, count in grown.items() if name in RETRANSMITTED}
    total = sum(again.values())
    sent = next((grown.get(name, 0) for name in SENT if name in now.counters), None)
    if total < _FEWEST or (sent is not None and total <= _SHARE * sent):
        return ""
    of = "" if sent is None else f", of {counted(sent, 'packet')} sent"
    return f"{_listed(again)}{of}"


def _grown(before: Mapping[str, int], now: Mapping[str, int]) -> dict[str, int]:
    """Return by how much counters grew; one that went back was reset, and shows nothing."""
    return {name: count - before[name] for name, count in now.items() if count > before.get(name, count)}


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} +{count}" for name, count in sorted(counts.items()))


_MEMORY = TypeAdapter(dict[str, NicState])


class Nics(Sensor):
    """Watches the NICs of the rails."""

    def __init__(self, context: NodeContext, devices: Iterable[str]) -> None:
        super().__init__(context)
        self._devices = tuple(devices)
        self._last: dict[str, NicState] = {}
        self._began: dict[str, NicState] = {}
        self._busy: set[str] = set()
        self._exceeded: set[str] = set()
        self._is_first = True

    def begin_attempt(self) -> None:
        """Take the links as they were seen last."""
        self._began = dict(self._last)

    def memory(self) -> Any:
        """Return each NIC as it was when the attempt began, with the counters of the last look."""
        return _MEMORY.dump_python(self._began, mode="json")

    def recall(self, memory: Any) -> None:
        """See Sensor."""
        self._began = _MEMORY.validate_python(memory)
        self._last = dict(self._began)

    def read(self) -> Reading:
        """Return faults for what changed since the last look; a NIC that was down at the first is an advisory."""
        faults: list[Fault] = []
        for device in self._devices:
            now, before = read_nic(self.context.root, device), self._last.get(device)
            self._last[device] = now
            began = self._began.setdefault(device, now)
            if began.trouble and not now.trouble:  # it has come up in this attempt
                began = now
            self._began[device] = replace(began, counters=now.counters)
            if before is None or (self._is_first and before.trouble and now.trouble):
                if now.trouble:
                    message = f"{now.trouble} since before the agent started"
                    faults.append(self._fault(device, Change(NIC_LINK_DOWN, message, "advisory")))
                continue
            noticed = [*self._retries(device, before, now), *changes(before, now)]
            noticed += self._retransmissions(device, before, now)
            faults += [self._fault(device, change) for change in noticed]
        self._is_first = False
        down = [device for device in self._devices if self._last[device].trouble]
        return Reading(faults=tuple(faults), values={"up": len(self._devices) - len(down), "down": down})

    def _retries(self, device: str, before: NicState, now: NicState) -> list[Change]:
        """Report every look at which retries were exceeded, and once when they are not any more."""
        if exceeded := exceeded_retries(before, now):
            self._exceeded.add(device)
            return [Change(NIC_FAULT, exceeded)]
        if device not in self._exceeded or now.trouble:
            return []
        self._exceeded.discard(device)
        return [Change(NIC_FAULT, "no retries are exceeded any more", cleared=True)]

    def _retransmissions(self, device: str, before: NicState, now: NicState) -> list[Change]:
        """Report when it begins and when it is over."""
        much = retransmits_much(before, now)
        if bool(much) == (device in self._busy):
            return []
        self._busy ^= {device}
        return [Change(NIC_ERRORS, much or "few packets are sent again now", cleared=not much)]

    def _fault(self, device: str, change: Change) -> Fault:
        return change.fault(self.context, "nic", f"{device}:", nic=device)


def make(context: NodeContext) -> Nics | None:
    """Return the sensor of the NICs that the profile names, else of those that are the rails' by PCIe."""
    devices = context.cluster.nics
    if not devices:
        if not read_nics(context.root):
            return None
        rails = rail_map(read_facts(context.root), context.cluster).rails
        devices = tuple(rail.nic for rail in rails if rail.nic is not None)
    return Nics(context, dict.fromkeys(devices)) if devices else None
