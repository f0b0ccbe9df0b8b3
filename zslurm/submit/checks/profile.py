"""Check a cluster profile against its rules and against the real Slurm: one line for each fault."""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from zslurm.checkpoint_tools.quantities import counted
from zslurm.cluster.rccl.environment import variables_of
from zslurm.cluster.rccl.lint import lint
from zslurm.cluster.site import resolve_profile
from zslurm.config.spec import ClusterSection, RunSpec
from zslurm.core.errors import ConfigError, SlurmRefused
from zslurm.run.run_dir import RunDir
from zslurm.slurm.client import SlurmClient
from zslurm.slurm.inventory import Node, SlurmPartition
from zslurm.slurm.run_command import SlurmCommands
from zslurm.submit.checks.fabric import fabric_summary, leaf_size_notes, missing_slices, strangers
from zslurm.submit.script.render import directives

# Names that the kernel takes (net/core/dev.c: dev_valid_name) and that are no address.
_INTERFACE = re.compile(r"(?=.{1,15}$)(?!\d+\.\d+\.\d+\.\d+$)[^\s/:]+")


@dataclass
class ProfileReport:
    """What a check found: faults would stop a job or ruin it; warnings are worth knowing."""

    name: str
    faults: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    passed: list[str] = field(default_factory=list)


def check_profile(name: str, *, interfaces: Path = Path("/sys/class/net")) -> ProfileReport:
    """Check a profile; `interfaces` lists this machine's network interfaces.

    Raises:
        NotFound: there is no such profile.
        SlurmUnavailable: Slurm is here, but its controller does not answer.
    """
    report = ProfileReport(name)
    try:
        spec = resolve_profile(name).spec
    except ConfigError as error:
        report.faults += str(error).splitlines()
        return report
    report.passed.append("it is valid")
    _check_rails(spec.cluster, report)
    _check_interfaces(spec.cluster, interfaces, report)
    _check_variables(spec.cluster, report)
    if spec.cluster.launcher == "slurm":
        client = SlurmClient()
        if client.available():
            _check_slurm(spec, client, report)
        else:
            report.warnings.append("Slurm was not asked: its commands are not on this machine")
    return report


def _check_rails(cluster: ClusterSection, report: ProfileReport) -> None:
    """Check NICs against the network; that there is one for every GPU is part of being valid."""
    if cluster.rdma_network and not cluster.nics:
        report.warnings.append(
            f"cluster.nics: not given, so RCCL takes every NIC it finds on {cluster.network}; "
            "`zslurm init --probe` reads them"
        )
    elif cluster.nics and cluster.network is None:
        report.warnings.append("cluster.network: not given, so no rule for these NICs applies")
    elif cluster.nics:
        report.passed.append(f"{counted(cluster.gpus_per_node, 'GPU')} and {counted(len(cluster.nics), 'NIC')}")
    if (fabric := fabric_summary(cluster)) is not None:
        report.passed.append(fabric)
    report.warnings += missing_slices(cluster)


def _check_interfaces(cluster: ClusterSection, folder: Path, report: ProfileReport) -> None:
    for key in ("interface", "storage_interface"):
        name = getattr(cluster, key)
        if name is None:
            continue
        if not _INTERFACE.fullmatch(name):
            report.faults.append(f"cluster.{key}: {name}: not the name of a network interface, such as eth0")
        elif name == "lo":
            report.faults.append(f"cluster.{key}: lo leads to no other node")
        elif name in cluster.nics:
            report.faults.append(f"cluster.{key}: {name} is a rail (cluster.nics)")
        elif folder.is_dir() and not (folder / name).exists():
            report.warnings.append(
                f"cluster.{key}: this machine has no {name}; is it there on the compute nodes? (`zslurm doctor`)"
            )
        else:
            report.passed.append(f"cluster.{key}: {name}")


def _check_variables(cluster: ClusterSection, report: ProfileReport) -> None:
    settings = variables_of(cluster)
    # What a rule makes of another key was checked with that key.
    for finding in (finding for finding in lint(settings, cluster) if finding.name in cluster.env):
        (report.faults if finding.level == "fault" else report.warnings).append(f"cluster.env: {finding.line}")


# --- Slurm ------------------------------------------------------------------------------------------------------


def _check_slurm(spec: RunSpec, client: SlurmClient, report: ProfileReport) -> None:
    partitions, nodes = client.partitions(), client.nodes_if_shown()
    partition = _check_partition(spec.slurm.partition, partitions, report)
    if partition is None:
        return
    if nodes is None:
        report.warnings.append(
            "the site hides its nodes from users (PrivateData=nodes); their GPUs were not compared"
        )
        _check_accepted(spec, report)
        return
    members = [node for node in nodes if partition.name in node.partitions]
    report.warnings += leaf_size_notes(spec.cluster, client, partition)
    faults, warnings = strangers(spec.cluster, [node.name for node in nodes], [node.name for node in members])
    report.faults += faults
    report.warnings += warnings
    fitting = _check_nodes(spec, partition, members, report)
    unusable = [node for node in fitting if not node.is_usable]
    if fitting and len(unusable) == len(fitting):
        reasons = Counter(node.reason or node.state for node in unusable)
        why = ", ".join(reason for reason, _ in reasons.most_common(3))
        # sbatch would refuse for that reason, with less of a message.
        report.warnings.append(
            f"none of the {counted(len(fitting), 'node')} can be used now ({why}); sbatch was not asked"
        )
    elif not report.faults:
        _check_accepted(spec, report)


def _check_partition(
    name: str | None, partitions: Sequence[SlurmPartition], report: ProfileReport
) -> SlurmPartition | None:
    partition_names = [partition.name for partition in partitions]
    chosen = next((p for p in partitions if p.name == name or (name is None and p.is_default)), None)
    if chosen is None:
        near = difflib.get_close_matches(name or "", partition_names, n=1)
        hint = f"did you mean `{near[0]}`?" if near else f"partitions: {', '.join(partition_names)}"
        what = "not given, and Slurm has no default" if name is None else f"Slurm has no partition {name}"
        report.faults.append(f"slurm.partition: {what}; {hint}")
    elif not chosen.is_up:
        report.faults.append(f"slurm.partition: {chosen.name} is not up")
    else:
        report.passed.append(f"partition {chosen.name} is up")
    return chosen


def _check_nodes(
    spec: RunSpec, partition: SlurmPartition, members: Sequence[Node], report: ProfileReport
) -> list[Node]:
    """Return the nodes that are what the profile has."""
    cluster = spec.cluster
    if not members:
        report.faults.append(f"slurm.partition: {partition.name} has no nodes that you may see")
        return []
    fitting = [node for node in members if _fits(node, cluster)]
    gpus_wanted = _gpus(cluster.gpus_per_node, cluster.gpu_type)
    if not fitting:
        kinds = Counter(_gpus(node.gpus, node.gpu_type) for node in members)
        listed = ", ".join(f"{counted(count, 'node')} with {kind}" for kind, count in kinds.most_common())
        key = "gpu_type" if any(node.gpus >= cluster.gpus_per_node > 0 for node in members) else "gpus_per_node"
        report.faults.append(f"cluster.{key}: no node of {partition.name} has {gpus_wanted}; there are {listed}")
        return []
    if len(fitting) < len(members):
        report.warnings.append(
            f"{len(fitting)} of {counted(len(members), 'node')} of {partition.name} "
            f"{'has' if len(fitting) == 1 else 'have'} {gpus_wanted}"
        )
    else:
        report.passed.append(f"{counted(len(fitting), 'node')} with {gpus_wanted}")
    cpus = max(node.cpus for node in fitting)
    if cluster.cpus_per_node and cluster.cpus_per_node > cpus:
        report.faults.append(f"cluster.cpus_per_node: {cluster.cpus_per_node}, but the nodes have {cpus}")
    return fitting


def _fits(node: Node, cluster: ClusterSection) -> bool:
    same = cluster.gpu_type is None or (node.gpu_type or "").lower() == cluster.gpu_type.lower()
    return node.gpus >= cluster.gpus_per_node and (same or not cluster.gpus_per_node)


def _gpus(count: int, kind: str | None) -> str:
    if not count:
        return "no GPUs"
    return counted(count, "GPU") + (f" of type {kind}" if kind else "")


def _check_accepted(spec: RunSpec, report: ProfileReport) -> None:
    """Ask Slurm about account, QoS, constraint and every flag of the profile; nothing is submitted."""
    if not SlurmClient().can_test():
        report.warnings.append("this version of Slurm can crash on `sbatch --test-only`: no job was tried")
        return
    options = [
        f"--{flag}" if value is True else f"--{flag}={value}"
        for flag, value in directives(spec, RunDir(Path("/nonexistent/run")))
    ]
    try:
        SlurmCommands().run("sbatch", "--test-only", *options, "--wrap=true")
    except SlurmRefused as error:
        report.faults.append(f"sbatch refuses a job of this profile: {error}")
    else:
        report.passed.append("sbatch accepts a job of this profile")
