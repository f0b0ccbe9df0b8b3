"""Does the RDMA library know the kernel driver's interface?

A library that is older than the driver rejects every device, RCCL falls back to a socket, and the job dies of
"Connection refused" (AMD-AGI/Primus#887). libibverbs says so in one warning (rdma-core, libibverbs/init.c), and
lists no device.
"""

from __future__ import annotations

import re

from zslurm.doctor.check import Check, Outcome, Status, failed, passed, unavailable
from zslurm.hardware.command import CommandHung
from zslurm.hardware.node_sources import Sources

_REFUSED = re.compile(r"Driver (\S+) does not support the kernel ABI of (\d+) \(supports (\d+) to (\d+)\)")
_LISTED = re.compile(r"^\s+(\S+)\s+[0-9a-f]{16}\s*$", re.MULTILINE)


def check(sources: Sources) -> Outcome | None:
    """What libibverbs makes of the kernel's devices."""
    nics = sources.facts.nics
    if not nics:
        return None
    abis = sorted({f"{nic.driver or nic.device} {nic.abi}" for nic in nics if nic.abi is not None})
    facts = {"RDMA ABI": ", ".join(abis) or None}
    try:
        said = sources.run("ibv_devices", timeout_s=sources.limits.canary_s)
    except CommandHung as error:
        return failed(
            f"{error}: an RDMA driver is wedged", "exclude the node; it needs a reboot", must_match=facts
        )
    if said is None:
        kernel = f" (the kernel has {', '.join(abis)})" if abis else ""
        reason = f"ibv_devices is not on PATH, so the library cannot be asked{kernel}"
        return unavailable(reason, "install rdma-core's ibverbs-utils", must_match=facts)
    if refused := _REFUSED.search(said.err + said.out):
        driver, kernel, low, high = refused.groups()
        return failed(
            f"the library's {driver} speaks ABI {low} to {high}, the kernel's {kernel}: no {driver} NIC is usable",
            "install the RDMA library that came with the driver, in the container too",
            must_match=facts,
        )
    listed = _LISTED.findall(said.out)
    missing = [nic.device for nic in nics if nic.device not in listed]
    if missing:
        return failed(
            f"the library lists {len(nics) - len(missing)} of {len(nics)} RDMA devices: not {', '.join(missing)}",
            "install the provider library of these NICs",
            must_match=facts,
        )
    return passed(f"the library knows all {len(nics)} RDMA devices", must_match=facts)


CHECK = Check(
    "rdma-abi", "network", "the RDMA library fits the kernel's driver", "both", check, inconsistent=Status.WARN
)
