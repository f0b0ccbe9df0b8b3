"""The configuration of a test cluster: several slurmd on one host, GPUs without GPUs, short patience."""

from __future__ import annotations

import os
import pwd
import random
import secrets
import shutil
import socket
import stat
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from tests.on_slurm.cluster.layout import Instance
from zslurm.slurm.version import Version, parse_version

GPU_TYPE = "mi300x"
DATABASE = "slurm_acct_db"


@dataclass(frozen=True)
class Timing:
    """Slurm's own limits in seconds: its defaults are minutes, which no test should wait for."""

    slurmd_timeout_s: int = 10
    """A silent node is DOWN after this long, or after a ping and its retries if these take longer."""
    message_timeout_s: int = 5
    """A message is given up after this long, with retries: with 5 s a killed node is DOWN after 16 s, with 10 s
    after 25 s, whatever slurmd_timeout_s says."""
    kill_wait_s: int = 10
    """From SIGTERM to SIGKILL."""
    min_job_age_s: int = 300
    """The controller forgets a finished job after this long (and at least ten seconds)."""


_DISABLES_CGROUPS = (23, 11, 0)
"""Since this version slurmd needs a cgroup plugin, and cgroup.conf can turn it off."""


@cache
def slurm_version() -> Version:
    """The version of Slurm on this machine."""
    said = subprocess.run(["slurmctld", "-V"], capture_output=True, text=True, check=True).stdout
    version = parse_version(said)
    if version is None:
        raise RuntimeError(f"slurmctld -V: no version in {said!r}")
    return version


@dataclass(frozen=True)
class Ports:
    controller: int
    database_daemon: int
    nodes: tuple[int, ...]


def write(
    instance: Instance,
    ports: Ports,
    timing: Timing,
    leaf_switches: Mapping[str, str] | None = None,
    further: str = "",
    files: Mapping[str, str] | None = None,
) -> None:
    """Write all that the daemons read: slurm.conf, gres.conf, slurmdbd.conf, GPU devices, munge key.

    With `leaf_switches` (leaf -> hostlist) also topology.conf, with one spine above them. `further` lines of
    slurm.conf come last, where they may replace nothing that stands before them. `files` (name -> text) are put
    next to slurm.conf.
    """
    for name, text in (files or {}).items():
        (instance.directory / "etc" / name).write_text(text, encoding="utf-8")
    if slurm_version() >= _DISABLES_CGROUPS:
        cgroup = instance.directory / "etc" / "cgroup.conf"
        cgroup.write_text("CgroupPlugin=disabled\n", encoding="utf-8")
    for node in instance.node_names:
        (instance.directory / "spool" / node).mkdir(mode=0o755)
    if leaf_switches:
        topology = instance.directory / "etc" / "topology.conf"
        topology.write_text(_topology_conf(leaf_switches), encoding="utf-8")
    _write_munge_key(instance)
    _make_gpu_devices(instance)
    (instance.directory / "etc" / "gres.conf").write_text(_gres_conf(instance), encoding="utf-8")
    plugin = "TopologyPlugin=topology/tree\n" if leaf_switches else ""
    text = _slurm_conf(instance, ports, timing) + plugin + further
    instance.slurm_conf.write_text(text, encoding="utf-8")
    impatient = text.replace(f"MessageTimeout={timing.message_timeout_s}\n", "MessageTimeout=1\n")
    instance.impatient_conf.write_text(impatient, encoding="utf-8")
    if instance.accounting:
        instance.slurmdbd_conf.write_text(_slurmdbd_conf(instance, ports), encoding="utf-8")
        # slurmdbd refuses a file that others can read: on a real site it holds the database's password.
        instance.slurmdbd_conf.chmod(0o600)


def claim_ports(instance: Instance) -> Ports:
    """Ports below the ephemeral range that nobody listens on now and no other cluster is about to listen on.

    Ephemeral ones could be taken by any outgoing connection between this look and the daemon's bind. Call it
    under `machine_lock`: the ports are noted in the instance's directory, where other clusters look.
    """
    taken = {port for other in Instance.all() for port in other.claimed_ports()}
    candidates = random.sample(sorted({*range(20_000, 32_000)} - taken), k=1_000)
    free = [port for port in candidates if _is_free(port)][: instance.nodes + 2]
    if len(free) < instance.nodes + 2:
        raise RuntimeError("no free ports between 20000 and 32000")
    instance.claim_ports(free)
    return Ports(free[0], free[1], tuple(free[2:]))


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def _slurm_conf(instance: Instance, ports: Ports, timing: Timing) -> str:
    directory = instance.directory
    # AccountingStoragePass is the munge socket for whoever talks to slurmdbd: AuthInfo is not used there.
    accounting = (
        f"""\
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort={ports.database_daemon}
AccountingStoragePass={instance.munge_socket}
AccountingStorageTRES=gres/gpu
AccountingStoreFlags=job_comment
"""
        if instance.accounting
        else ""
    )
    nodes = "".join(
        f"NodeName={name} NodeHostname=localhost NodeAddr=127.0.0.1 Port={port} Gres=gpu:{GPU_TYPE}:"
        f"{instance.gpus_per_node} Sockets=2 CoresPerSocket=16 ThreadsPerCore=1 RealMemory=20000\n"
        for name, port in zip(instance.node_names, ports.nodes, strict=True)
    )
    return f"""\
ClusterName={instance.cluster_name}
SlurmctldHost={socket.gethostname().partition(".")[0]}(127.0.0.1)
SlurmctldPort={ports.controller}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={instance.munge_socket}
CredType=cred/munge
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool/%n
SlurmctldPidFile={directory}/run/slurmctld.pid
SlurmdPidFile={directory}/run/slurmd.%n.pid
SlurmctldLogFile={directory}/log/slurmctld.log
SlurmdLogFile={directory}/log/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/{"linux" if instance.accounting else "none"}
JobAcctGatherFrequency=1
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
DefMemPerCPU=500
GresTypes=gpu
MailProg=/bin/true
ReturnToService=1
SlurmdParameters=config_overrides
MessageTimeout={timing.message_timeout_s}
SlurmdTimeout={timing.slurmd_timeout_s}
KillWait={timing.kill_wait_s}
MinJobAge={timing.min_job_age_s}
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0
{accounting}{nodes}PartitionName=batch Nodes=ALL Default=YES DefaultTime=00:10:00 MaxTime=1-00:00:00 State=UP
"""


def _topology_conf(leaf_switches: Mapping[str, str]) -> str:
    leaves = [f"SwitchName={leaf} Nodes={nodes}\n" for leaf, nodes in leaf_switches.items()]
    return "".join([*leaves, f"SwitchName=spine Switches={','.join(leaf_switches)}\n"])


def _gres_conf(instance: Instance) -> str:
    devices = f"{instance.directory}/dev/null_[0-{instance.gpus_per_node - 1}]"
    return f"NodeName={','.join(instance.node_names)} Name=gpu Type={GPU_TYPE} File={devices}\n"


def _slurmdbd_conf(instance: Instance, ports: Ports) -> str:
    return f"""\
DbdHost=localhost
DbdAddr=127.0.0.1
DbdPort={ports.database_daemon}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={instance.munge_socket}
LogFile={instance.log}/slurmdbd.log
PidFile={instance.directory}/run/slurmdbd.pid
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser=root
StorageLoc={DATABASE}
"""


def _write_munge_key(instance: Instance) -> None:
    munge = pwd.getpwnam("munge")
    directory = instance.munge_socket.parent
    shutil.chown(directory, munge.pw_uid, munge.pw_gid)
    key = directory / "key"
    key.touch(mode=0o400)
    key.write_bytes(secrets.token_bytes(128))
    shutil.chown(key, munge.pw_uid, munge.pw_gid)


def _make_gpu_devices(instance: Instance) -> None:
    # Slurm wants a device file per GPU: a count alone, or plain files, leave the node INVAL.
    for index in range(instance.gpus_per_node):
        device = instance.directory / "dev" / f"null_{index}"
        os.mknod(device, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
        device.chmod(0o666)
