"""What a login node can find out about its cluster: enough to write a profile."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING

from zslurm.cluster.profile import profile_path
from zslurm.cluster.profile_writer import Members, local_profile, slurm_profile
from zslurm.core.errors import NotFound, SlurmRefused, SlurmUnavailable
from zslurm.hardware.gpus import read_gpus
from zslurm.slurm.client import SlurmClient
from zslurm.slurm.hostlist import compress
from zslurm.slurm.inventory import Node, SlurmPartition
from zslurm.slurm.settings import read_settings
from zslurm.slurm.topology import SlurmTopology

if TYPE_CHECKING:
    from zslurm.cluster.probe import Probe


@dataclass(frozen=True)
class Detected:
    """A profile, ready to be written.

    Attributes:
        name: the cluster's.
        text: the YAML of the profile.
        partition_choices: partitions that could have been meant, the best guess first; one if Slurm has a default.
        not_probed: why no node could be read, if the probe was optional.
        not_found: keys that a node was asked for and could not answer.
        others: nodes of other kinds in the partition, and what one of them answered; a line for each kind.
        refused: why sbatch could not be asked which jobs it takes, and what may help.
    """

    name: str
    text: str
    partition_choices: list[str]
    not_probed: str | None = None
    not_found: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    refused: str | None = None


def detect(
    *,
    name: str | None = None,
    partition: str | None = None,
    account: str | None = None,
    probe_timeout_s: float | None = None,
    probe_is_optional: bool = False,
    waiting: Callable[[str], None] = lambda job_id: None,
) -> Detected:
    """Describe this machine's Slurm, or the machine itself if there is none.

    Args:
        name: name of the profile; default: Slurm's ClusterName, or `local`.
        partition: partition to describe; default: Slurm's default one, else the first with GPUs.
        account: account to charge, if the site wants one named.
        probe_timeout_s: read the NICs and drivers of a node of each kind too, and wait this long for the answers.
        probe_is_optional: describe the cluster without the node's facts if no node answers, and say so.
        waiting: called with the job's id while the probe waits in the queue.

    Raises:
        ConfigError: `name` cannot be a profile's.
        NotFound: there is no such partition.
        SlurmUnavailable: Slurm's commands are here, but its controller does not answer.
        SlurmRefused: no node could be asked.
    """
    if name is not None:
        profile_path(name)  # refuses what cannot be a profile's name
    client = SlurmClient()
    if not client.available():
        if probe_timeout_s is not None:
            raise SlurmUnavailable("there is no Slurm on this machine to run a probe with")
        text = local_profile(name or "local", _local_gpus(), len(os.sched_getaffinity(0)))
        return Detected(name or "local", text, [])
    config = client.scontrol_config()
    partitions, nodes = client.partitions(), client.nodes_if_shown()
    choices = _choices(partitions, nodes or [])
    if partition is None and choices:
        partition = choices[0]
    chosen = next((info for info in partitions if info.name == partition), None)
    if chosen is None:
        listed = ", ".join(info.name for info in partitions)
        raise NotFound(f"{partition}: Slurm has no such partition; partitions: {listed}")
    settings = read_settings(config)
    cluster = name or settings.cluster or "slurm"
    members = Members.of_hidden(chosen) if nodes is None else Members.of(chosen, nodes)
    kinds = Members.kinds(chosen, nodes or [])[1:]
    topology = _topology(client, chosen)
    option, refused = _gpu_option(client, chosen, members, account)
    if refused is None:
        members = replace(members, usable_cpus=_usable_cpus(client, chosen, members, account, option))
    info, not_probed = None, None
    others = [str(kind) for kind in kinds]
    if probe_timeout_s is not None:
        usable, interrupted = {node.name for node in nodes or [] if node.is_usable}, Event()

        def waits(job_id: str) -> None:
            if interrupted.is_set():
                raise KeyboardInterrupt  # in the thread that waits for srun, which then cancels its job
            waiting(job_id)

        def asked(kind: Members) -> Probe:
            if kind.names and not usable & set(kind.names):
                raise SlurmRefused(f"none of {compress(kind.names)} is up")
            not_alike = [name for other in (members, *kinds) if other is not kind for name in other.names]
            return _probe(chosen, kind, not_alike, account, probe_timeout_s, waits, option)

        with ThreadPoolExecutor(1 + len(kinds)) as executor:  # the kinds at once: each may wait in the queue
            try:
                answers = [executor.submit(asked, kind) for kind in (members, *kinds)]
                futures.wait(answers)
            except BaseException:
                interrupted.set()
                raise
        try:
            info = answers[0].result()
        except (SlurmRefused, SlurmUnavailable) as error:
            if not probe_is_optional:
                raise
            not_probed = " ".join(str(error).split())
        others = [f"{kind}; {_answer(answer)}" for kind, answer in zip(kinds, answers[1:], strict=True)]
    text = slurm_profile(cluster, chosen, members, settings, topology, account, info, not_probed, option, others)
    not_found = info.not_found if info else ()
    return Detected(cluster, text, choices, not_probed, not_found, tuple(others), refused)


def _answer(answer: Future[Probe]) -> str:
    """Return in a line what a node of another kind answered, or why it could not be asked."""
    try:
        info = answer.result()
    except (SlurmRefused, SlurmUnavailable) as error:
        return f"not asked: {' '.join(str(error).split())}"
    return f"{info.notes[0]} Network: {info.network or 'not known'}."


def _topology(client: SlurmClient, partition: SlurmPartition) -> SlurmTopology:
    """Return the topology of a partition, as far as Slurm shows one."""
    try:
        return client.topology(partition.topology)
    except SlurmRefused:
        return SlurmTopology()


def _probe(
    partition: SlurmPartition,
    members: Members,
    not_alike: list[str],
    account: str | None,
    timeout_s: float,
    waiting: Callable[[str], None],
    option: str,
) -> Probe:
    from zslurm.cluster.probe import probe

    options = [f"--partition={partition.name}", "--time=5"]
    options += [f"--exclude={compress(not_alike)}"] if not_alike else []
    options += [f"--account={account}"] if account else []
    if members.gpus:
        options.append(_gpu_request(members, option))
    return probe(options, timeout_s, waiting)


def _gpu_option(
    client: SlurmClient, partition: SlurmPartition, members: Members, account: str | None
) -> tuple[str, str | None]:
    """Return the first form of a request for a node's GPUs that sbatch accepts; nothing is submitted.

    If it accepts none, or cannot be asked, the usual form, and why.
    """
    forms = ("gpus-per-node", "gres", "gpus-per-task")
    if not members.gpus:
        return forms[0], None
    if not client.can_test():
        return forms[0], "`sbatch --test-only` is not there, or can crash slurmctld of this version"
    options = [f"--partition={partition.name}", "--time=5", "--nodes=1", "--ntasks-per-node=1"]
    options += [f"--account={account}"] if account else []
    refusals = []
    for form in forms:
        try:
            client.run("sbatch", "--test-only", *options, _gpu_request(members, form), "--wrap=true")
        except SlurmRefused as error:
            refusals.append(" ".join(str(error).split()))
            continue
        return form, None
    hint = "" if account else "; `zslurm init --account NAME`, if jobs need an account"
    return forms[0], refusals[0] + hint


def _usable_cpus(
    client: SlurmClient, partition: SlurmPartition, members: Members, account: str | None, option: str
) -> int | None:
    """Return how many CPUs of a node sbatch gives to its ranks, a rank on each GPU; None if it gives all.

    Sites reserve cores for the system (CoreSpecCount, sbatch -S), or count one thread of a core: Slurm's number of
    CPUs is not what a job may ask for. Nothing is submitted; None too if sbatch refuses any job.
    """
    if not members.gpus:
        return None
    options = [f"--partition={partition.name}", "--time=5", "--nodes=1", f"--ntasks-per-node={members.gpus}"]
    options += [f"--account={account}"] if account else []
    options.append(_gpu_request(members, option, tasks=members.gpus))

    def accepts(cpus_per_task: int) -> bool:
        try:
            client.run("sbatch", "--test-only", *options, f"--cpus-per-task={cpus_per_task}", "--wrap=true")
        except SlurmRefused:
            return False
        return True

    accepted, refused = 1, members.cpus // members.gpus
    if refused <= accepted or accepts(refused) or not accepts(accepted):
        return None
    while refused - accepted > 1:
        middle = (accepted + refused) // 2
        accepted, refused = (middle, refused) if accepts(middle) else (accepted, middle)
    return accepted * members.gpus


def _gpu_request(members: Members, option: str, tasks: int = 1) -> str:
    """Return sbatch's option for all GPUs of a node on which `tasks` tasks run."""
    kind = f"{members.gpu_type}:" if members.gpu_type else ""
    count = members.gpus // tasks if option == "gpus-per-task" else members.gpus
    return f"--{option}={'gpu:' if option == 'gres' else ''}{kind}{count}"


def _choices(partitions: list[SlurmPartition], nodes: list[Node]) -> list[str]:
    defaults = [info.name for info in partitions if info.is_default]
    if defaults:
        return defaults
    with_gpus = {name for node in nodes if node.gpus for name in node.partitions}
    ordered = sorted(partitions, key=lambda info: (info.name not in with_gpus, -info.n_nodes))
    return [info.name for info in ordered]


def _local_gpus() -> int:
    """GPUs of this machine that have a driver."""
    return sum(gpu.driver in ("amdgpu", "nvidia") for gpu in read_gpus(Path("/")))
