"""Does Slurm answer?"""

from __future__ import annotations

from zslurm.core.errors import SlurmRefused, SlurmUnavailable
from zslurm.doctor.check import Check, Outcome, failed, passed
from zslurm.hardware.node_sources import Sources
from zslurm.slurm.client import SlurmClient
from zslurm.slurm.commands import Retries


def check(sources: Sources) -> Outcome | None:
    """Commands and controller."""
    if sources.cluster.launcher != "slurm":
        return None
    client = SlurmClient(sources.environ, retries=Retries(attempts=2))
    try:
        config = client.scontrol_config()
    except (SlurmUnavailable, SlurmRefused) as error:
        return failed(str(error), "run this on a login node; ask the site whether slurmctld is down")
    return passed(f"Slurm {config.get('SLURM_VERSION', '?')}, cluster {config.get('ClusterName', '?')}")


CHECK = Check("slurm", "slurm", "Slurm's commands are here and its controller answers", "login", check)
