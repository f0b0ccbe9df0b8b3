"""`zslurm init` at sites with HPE Slingshot ends with their profiles' values; ranks get their GPUs' cores."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.cluster.slingshot_sites import APUS, GCDS, SITES, Site, answers, ex235a, mi300a
from tests.submit.scripted_slurm import ScriptedSlurm
from tests.submit.specs import run_spec
from zslurm.cli.main import app
from zslurm.cluster.rccl.environment import environment
from zslurm.cluster.site import resolve_profile
from zslurm.config.spec import ClusterSection
from zslurm.hardware.facts import read_facts
from zslurm.hardware.pairing import nearest
from zslurm.job import numa_bind
from zslurm.job.numa_bind import SHARING_VARIABLE, bind, bind_variable
from zslurm.slurm.hostlist import expand_ranges

NUMA_OF_GCDS = (3, 3, 1, 1, 0, 0, 2, 2)
OF_SITE = {
    "name": "of the profile",
    "rocm_version": "of the node's day, and not in public documents of a site",
    "rccl_version": "follows from rocm_version",
    "scontrol_on_nodes": "whether the node's PATH has scontrol: the test's has",
}
"""Keys that differ for every site, and why."""
DIFFERS: dict[str, dict[str, str]] = {
    "lumi-g": {},
    "frontier": {"nodes_per_switch": "read from Slurm's tree; the shipped profile leaves it to the site"},
    "setonix": {},
    "mi300a-slingshot": {"gpu_numa": "the order of APUs is a node's; public documents have no common one"},
}
NOT_SHOWN = {
    "slurm.account": "a person's own",
    "cluster.setup": "the site's modules",
    "cluster.fabric": "which nodes are on which leaf, for rails",
}
"""What neither Slurm nor a node shows; init names these keys."""


@pytest.fixture(params=SITES, ids=lambda site: site.profile)
def at(request: pytest.FixtureRequest) -> Site:
    return request.param


@pytest.fixture
def slurm(site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ScriptedSlurm:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return ScriptedSlurm(tmp_path / "bin", monkeypatch)


def init(at: Site, slurm: ScriptedSlurm, tmp_path: Path, *options: str) -> str:
    """Run init at the site, as for the profile `lab`, and return what it says besides the profile."""
    answers(at, slurm, tmp_path / "node")
    command = ["init", "--yes", "--name", "lab", "--partition", at.partition, *options]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    return done.stderr


def test_init_ends_with_the_values_of_the_sites_profile(at: Site, slurm: ScriptedSlurm, tmp_path: Path) -> None:
    printed = init(at, slurm, tmp_path, "--account", "project_1")
    written, shipped = resolve_profile("lab").spec.cluster, resolve_profile(at.profile).spec.cluster
    different = [key for key in ClusterSection.model_fields if getattr(written, key) != getattr(shipped, key)]
    allowed = OF_SITE | DIFFERS[at.profile]
    assert [key for key in different if key not in allowed] == []
    assert set(DIFFERS[at.profile]) <= set(different), "a difference that is none any more"
    by_init, by_profile = ({item.name: item.value for item in environment(spec)} for spec in (written, shipped))
    assert {key: value for key, value in by_profile.items() if "RCCL_MSCCL" not in key}.items() <= by_init.items()
    assert "the node does not show" not in printed, "the keys that a run needs are all found"
    (line,) = [line for line in printed.splitlines() if "neither Slurm nor a node shows" in line]
    assert {key for key in NOT_SHOWN if key in line} == NOT_SHOWN.keys() - {"slurm.account"}


def test_without_an_account_init_names_what_sbatch_could_not_be_asked(
    at: Site, slurm: ScriptedSlurm, tmp_path: Path
) -> None:
    printed = init(at, slurm, tmp_path)
    lines = [line for line in printed.splitlines() if "cluster.cpus_per_node are not checked" in line]
    assert len(lines) == at.needs_account
    assert all("specify an account" in line and "`zslurm init --account NAME`" in line for line in lines)


def test_gpus_are_next_to_the_nics_of_their_numa_domain(tmp_path: Path) -> None:
    facts = read_facts(ex235a(tmp_path / "mi250x").root)
    pairs = {index: nic.device for index, nic in nearest(facts.gpus, facts.cxi).items()}
    assert pairs == {index: f"cxi{index // 2}" for index in range(8)}
    facts = read_facts(mi300a(tmp_path / "mi300a").root)
    assert {index: nic.device for index, nic in nearest(facts.gpus, facts.cxi).items()} == {
        index: f"cxi{index}" for index in range(4)
    }


def bound(
    profile: str, root: Path, reserved: set[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> list[tuple[set[int], str, str]]:
    """The cores of each rank of a node, the ranks that share them, and the line of the log."""
    cluster = json.loads(resolve_profile(profile).spec.cluster.model_dump_json(exclude_unset=True))
    spec = run_spec(tmp_path, cluster=cluster, slurm={"ranks_per_node": cluster["gpus_per_node"]})
    step = every_core(root) - reserved
    taken: list[set[int]] = []
    monkeypatch.setattr(numa_bind.os, "sched_getaffinity", lambda pid: step)
    monkeypatch.setattr(numa_bind.os, "sched_setaffinity", lambda pid, cores: taken.append(set(cores)))
    ranks = []
    for rank in range(spec.ranks_per_node):
        environ: dict[str, Any] = bind_variable(spec) | {
            "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(spec.ranks_per_node)
        }  # fmt: skip
        line = bind(environ, root)
        ranks.append((taken.pop(), environ[SHARING_VARIABLE], str(line)))
    return ranks


def every_core(root: Path) -> set[int]:
    return {int(path.name[3:]) for path in (root / "sys/devices/system/cpu").glob("cpu*")}


@pytest.mark.parametrize("profile", ["lumi-g", "frontier", "setonix"])
def test_each_rank_has_the_cores_of_its_gcd_without_those_of_the_system(
    profile: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = ex235a(tmp_path / "node").root
    keeps = profile != "setonix"  # the first core of each L3 cache, with its second thread
    reserved = {core for core in every_core(root) if core % 8 == 0} if keeps else set()
    ranks = bound(profile, root, reserved, tmp_path, monkeypatch)
    for (cores, sharing, line), (_, _, numa, cache, _) in zip(ranks, GCDS, strict=True):
        assert cores == set(expand_ranges(cache)) - reserved and not cores & reserved
        assert sharing == "1"
        assert line == f"bound to the L3 cache of its GPU in NUMA node {numa}: {16 - 2 * keeps} cores"


def test_a_rank_without_the_cores_of_its_cache_has_those_of_its_numa_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = ex235a(tmp_path / "node").root
    reserved = set(expand_ranges("48-55,112-119"))  # the cache of GPU 0
    cores, sharing, line = bound("lumi-g", root, reserved, tmp_path, monkeypatch)[0]
    assert cores == set(expand_ranges("56-63,120-127")) and sharing == "2"
    assert line == "bound to NUMA node 3 of its GPU: 16 cores"


def test_each_rank_has_the_cores_of_its_apu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = mi300a(tmp_path / "node").root
    ranks = bound("mi300a-slingshot", root, set(), tmp_path, monkeypatch)
    for (cores, sharing, _), (*_, first) in zip(ranks, APUS, strict=True):
        assert cores == {*range(first, first + 24), *range(first + 96, first + 120)}
        assert sharing == "1"


def test_the_profiles_numa_nodes_are_those_of_the_nodes(site: Path, tmp_path: Path) -> None:
    facts = read_facts(ex235a(tmp_path).root)
    assert tuple(gpu.numa for gpu in facts.gpus) == NUMA_OF_GCDS
    for profile in ("lumi-g", "frontier", "setonix"):
        assert resolve_profile(profile).spec.cluster.gpu_numa == NUMA_OF_GCDS
