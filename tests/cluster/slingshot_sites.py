"""Nodes and Slurm of four sites with HPE Slingshot, put together from public documents; nothing was recorded.

Of the nodes:

- EX235a (MI250X): PCI addresses, host bridges, NUMA nodes, L3 caches and NICs are those that `lstopo` printed on
  tioga20 of LLNL, whose nodes are of the same model (HPCIC-tutorials, hwloc; the NICs are called hsi there). The
  bridges below a host bridge are invented. NUMA nodes of the GPUs agree with `rocm-smi --showtoponuma` of LUMI
  (LUMI user guide, distribution and binding) and with OLCF's list of GPUs and hardware threads; the addresses of
  the GPUs with the output of hello_jobstep there. Name and id of the product: rocm-smi on such a node.
- MI300A: PCI addresses, NUMA nodes, cores, ids and NICs are those of RCCL's recorded topology topo_4p_942.xml
  (ROCm/rccl, tools/topo_expl), in which the GPUs are counted in this order. L3 caches and bridges are invented.
- ROCm, kernel and limits are those of `FakeNode`.

Of Slurm: the facts in the comments at each site. Versions, limits, names of nodes if no comment has them, and all
of `scontrol show config` but the cluster's name are of the test cluster.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.cluster.recorded_config import FULL_CONFIG
from tests.fake_sysfs import MI250X, MI300A, FakeNode
from tests.submit.scripted_slurm import ScriptedSlurm

NAME_OF_MI250X = "AMD INSTINCT MI200 (MCM) OAM LC MBA HPE C2"

# host bridge, PCI address of the GPU, NUMA node, L3 cache next to it, and the NIC below the same host bridge
GCDS = (
    ("c0", "c1", 3, "48-55,112-119", None),
    ("c4", "c6", 3, "56-63,120-127", "c5"),
    ("c8", "c9", 1, "16-23,80-87", None),
    ("cc", "ce", 1, "24-31,88-95", "cd"),
    ("d0", "d1", 0, "0-7,64-71", None),
    ("d4", "d6", 0, "8-15,72-79", "d5"),
    ("d8", "d9", 2, "32-39,96-103", None),
    ("dc", "de", 2, "40-47,104-111", "dd"),
)
# host bridge, PCI address of the GPU and of its NIC, NUMA node, first of 24 cores (second threads are 96 further)
APUS = (("80", "82", "81", 2, 48), ("c0", "c2", "c1", 3, 72), ("00", "02", "01", 0, 0), ("40", "42", "41", 1, 24))


def ex235a(root: Path) -> FakeNode:
    """Eight GCDs of four MI250X, and four NICs."""
    node = FakeNode(root)
    for host, gpu, numa, _, _ in GCDS:
        top = f"pci0000:{host}"
        node.amd_gpu((top, f"0000:{host}:01.1", f"0000:{gpu}:00.0"), numa, NAME_OF_MI250X, MI250X)
    nics = [(host, nic, numa) for host, _, numa, _, nic in GCDS if nic is not None]
    for index, (host, nic, numa) in enumerate(nics):
        node.cassini(index, (f"pci0000:{host}", f"0000:{host}:03.1", f"0000:{nic}:00.0"), numa)
    for numa in range(4):
        node.cores(numa, sorted((cache for _, _, domain, cache, _ in GCDS if domain == numa), key=_first))
    return node


def mi300a(root: Path) -> FakeNode:
    """Four MI300A, each of a NUMA node, and four NICs."""
    node = FakeNode(root)
    for index, (host, gpu, nic, numa, core) in enumerate(APUS):
        top = f"pci0000:{host}"
        node.amd_gpu((top, f"0000:{host}:01.2", f"0000:{gpu}:00.0"), numa, "AMD Instinct MI300A", MI300A)
        node.cassini(index, (top, f"0000:{host}:01.1", f"0000:{nic}:00.0"), numa)
        dies = range(core, core + 24, 8)
        node.cores(numa, [f"{first}-{first + 7},{first + 96}-{first + 103}" for first in dies])
    return node


def _first(cores: str) -> int:
    return int(cores.partition("-")[0])


@dataclass(frozen=True)
class Site:
    """A site, as far as `zslurm init` sees it.

    Attributes:
        profile: name of the shipped profile.
        node: writes the files of a node.
        partition: described by init.
        nodes: of that partition, two of them.
        gres: of its nodes, as sinfo shows it.
        cpus: of a node, as sinfo shows them.
        usable: most CPUs that sbatch takes for the tasks of a node.
        gpu_forms: the options for GPUs that sbatch takes.
        needs_account: sbatch takes no job without an account.
        switches: answer of `scontrol show topology`; empty if Slurm has none.
    """

    profile: str
    node: Callable[[Path], FakeNode]
    partition: str
    nodes: tuple[str, str]
    gres: str
    cpus: int
    usable: int
    gpu_forms: str = "--gpus-per-node=*|--gres=gpu:*"
    needs_account: bool = False
    switches: str = ""


SITES = (
    # Partition, node, GRES and CPUs: a `sinfo` of LUMI (LUMI training materials, Slurm on LUMI). Of 64 cores one
    # of each L3 cache is kept, and jobs of 64 never run (LUMI user guide, LUMI-G jobs); a task has one thread of a
    # core (the masks of the same page). An account must be named (training materials, accounting).
    Site(
        "lumi-g", ex235a, "standard-g", ("nid005496", "nid005497"), "gpu:mi250:8(S:0)", 128, 56, needs_account=True
    ),
    # 56 of 64 cores with `-S 8`, one thread of each by default, projects, --gpus-per-node: OLCF, Frontier user
    # guide. Leaf switches of 128 nodes: `scontrol show topology` as a user published it. The GRES is a guess.
    Site(
        "frontier", ex235a, "batch", ("frontier00001", "frontier00129"), "gpu:8", 128, 56, needs_account=True,
        switches=(
            "SwitchName=s2000 Level=0 LinkSpeed=1 Nodes=frontier[00001-00128]\n"
            "SwitchName=s2001 Level=0 LinkSpeed=1 Nodes=frontier[00129-00256]\n"
            "SwitchName=root Level=1 LinkSpeed=1 Nodes=frontier[00001-00256] Switches=s[2000-2001]\n"
        ),
    ),
    # Eight cores with each GCD, jobs ask with --gres=gpu:N alone, and a project: Pawsey user support, Setonix GPU
    # partition. GRES without a type, and 128 CPUs with threads, are guesses.
    Site(
        "setonix", ex235a, "gpu", ("nid002050", "nid002052"), "gpu:8", 128, 64, gpu_forms="--gres=gpu:*",
        needs_account=True,
    ),
    # No site: 24 cores with two threads in each APU (AMD, MI300A data sheet), one thread used.
    Site("mi300a-slingshot", mi300a, "mi300", ("a1", "a2"), "gpu:4", 192, 96),
)  # fmt: skip


def answers(site: Site, slurm: ScriptedSlurm, root: Path) -> None:
    """Make Slurm's commands answer as at the site, and srun run what it is given on the site's node."""
    site.node(root)
    config = re.sub(r"(?m)^(ClusterName +=) .*", rf"\1 {site.profile}", FULL_CONFIG)
    partition = (
        f"PartitionName={site.partition} Default=NO DefaultTime=NONE MaxNodes=UNLIMITED MaxTime=2-00:00:00 "
        f"Nodes={','.join(site.nodes)} PreemptMode=OFF State=UP TotalCPUs={2 * site.cpus} TotalNodes=2\n"
    )
    answer_of = {"*config": config, "*partition*": partition, "*topology*": site.switches}
    cases = " ".join(f"{pattern}) printf %s {shlex.quote(text)};;" for pattern, text in answer_of.items())
    slurm.write_program("scontrol", f'case "$*" in {cases} esac')
    rows = [
        "\x1f".join((node, "idle", site.gres, str(site.cpus), "491520", site.partition, "none")) + "\x1e\n"
        for node in site.nodes
    ]
    slurm.write_program("sinfo", f"printf %s {shlex.quote(''.join(rows))}")
    slurm.write_program("squeue", "echo slurm 24.11.5")
    no_account = "[ $account ] || { echo 'sbatch: error: specify an account' >&2; exit 1; }"
    slurm.write_program(
        "sbatch",
        "for word; do case $word in\n"
        "--account=*) account=1;; --cpus-per-task=*) cpus=${word#*=};; --ntasks-per-node=*) tasks=${word#*=};;\n"
        f"{site.gpu_forms}) gpus=1;; --gpus*|--gres*) gpus=;; esac; done\n"
        f"{no_account if site.needs_account else ''}\n"
        "[ $gpus ] || { echo 'sbatch: error: ask for GPUs in another way' >&2; exit 1; }\n"
        f"[ $((${{cpus:-1}} * tasks)) -le {site.usable} ] && exit\n"
        "echo 'allocation failure: Requested node configuration is not available' >&2; exit 1",
    )
    slurm.write_program(
        "srun",
        f"export ZSLURM_SYSROOT={root} SLURMD_NODENAME={site.nodes[0]}\n"
        f"exec {sys.executable} -P -m zslurm.hardware.facts",
    )
