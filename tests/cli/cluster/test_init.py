"""`zslurm init`: what it asks a node, and what it says if no node answers."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.cli.commands import Shell
from tests.fake_sysfs import mi300x_pollara
from tests.slurm.recordings import recorded
from tests.submit.scripted_slurm import ScriptedSlurm
from zslurm.cluster import profile
from zslurm.core.errors import Exit
from zslurm.hardware.facts import read_facts

REFUSAL = "srun: error: Unable to allocate resources: Invalid account or account/partition combination specified"


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ScriptedSlurm:
    """Slurm with a partition of MI300X nodes; srun is not there yet."""
    monkeypatch.setattr(profile, "SITE_PROFILES", tmp_path / "site")
    scripted = ScriptedSlurm(tmp_path / "bin", monkeypatch)
    config, partition = shlex.quote(recorded.CONFIG), shlex.quote(recorded.PARTITION)
    scripted.write_program(
        "scontrol", f'case "$*" in *config) printf %s {config};; *) printf %s {partition};; esac'
    )
    scripted.write_program("sinfo", f"printf %s {shlex.quote(recorded.SINFO)}")
    return scripted


def answers(slurm: ScriptedSlurm, root: Path) -> None:
    """Make srun print the facts of a node with eight MI300X and Pollara NICs."""
    mi300x_pollara(root)
    facts = json.dumps(asdict(read_facts(root)))
    parts = [facts[at : at + 700] for at in range(0, len(facts), 700)]
    lines = [f"zslurm-answer node0 {index} {len(parts)} {part}" for index, part in enumerate(parts)]
    (root / "answer").write_text("\n".join(lines) + "\n")
    slurm.write_program("srun", f"cat {root / 'answer'}")


def test_init_finds_the_network_without_being_asked_to(shell: Shell, slurm: ScriptedSlurm, tmp_path: Path) -> None:
    answers(slurm, tmp_path / "node")
    done = shell.zslurm("init", "--yes", "--name", "lab")
    assert done.code == 0, done.stderr
    assert "  extends: mi300x-pollara\n" in done.stdout
    assert done.stderr.startswith("reading one node of each kind in a short job, for 120 s at most (--no-probe")
    assert "not known" not in done.stderr
    shown = shell.zslurm("cluster", "env", "--cluster", "lab").stdout
    assert "export NCCL_IB_HCA='=ionic_0,ionic_1" in shown
    assert "export NCCL_PXN_DISABLE=0\n" in shown


def test_a_node_that_does_not_answer_leaves_a_profile_that_says_so(shell: Shell, slurm: ScriptedSlurm) -> None:
    slurm.write_program("srun", f"echo {shlex.quote(REFUSAL)} >&2; exit 1")
    done = shell.zslurm("init", "--yes", "--name", "lab")
    assert done.code == 0
    assert f"# The network is not known: the nodes could not be asked: {REFUSAL}.\n" in done.stdout
    assert done.stderr.splitlines()[-1] == (
        f"note: the network is not known: the nodes could not be asked: {REFUSAL}; try `zslurm init --probe` later"
    )
    listed = shell.zslurm("cluster", "env", "--cluster", "lab", "--explain").stdout
    assert "left out: NCCL_IB_HCA is not set: the profile does not give cluster.network" in listed


def test_a_probe_that_is_asked_for_must_succeed(shell: Shell, slurm: ScriptedSlurm) -> None:
    slurm.write_program("srun", f"echo {shlex.quote(REFUSAL)} >&2; exit 1")
    done = shell.zslurm("init", "--yes", "--probe", "--name", "lab")
    assert (done.code, done.stdout) == (Exit.FAILED, "")
    assert done.stderr.endswith(f"zslurm: the nodes could not be asked: {REFUSAL}\n")
    assert not profile.profile_path("lab").exists()


def test_no_job_runs_with_no_probe(shell: Shell, slurm: ScriptedSlurm) -> None:
    slurm.write_program("srun", f"echo ran > {slurm.directory / 'ran'}")
    done = shell.zslurm("init", "--yes", "--no-probe", "--name", "lab")
    assert done.code == 0
    assert not (slurm.directory / "ran").exists()
    assert "  # network: " in done.stdout


def test_submission_counts_the_variables_that_the_profile_leaves_open(shell: Shell, slurm: ScriptedSlurm) -> None:
    assert shell.zslurm("init", "--yes", "--no-probe", "--name", "lab").code == 0
    shell.write_run(slurm={"ranks_per_node": 2})
    done = shell.zslurm("submit", "run.yaml", "--cluster", "lab")
    assert done.code == 0, done.stderr
    (note,) = [line for line in done.stderr.splitlines() if "RCCL" in line]
    assert note == (
        "note: 34 variables of RCCL or NCCL are not set: profile lab does not give cluster.network, "
        "cluster.rccl_version or cluster.rocm_version; complete it by `zslurm init --probe`, or by hand what a "
        "node does not show (`zslurm cluster env --explain` lists the variables)"
    )
    listed = shell.zslurm("submit", "run.yaml", "--cluster", "lab", "--new", "--dry-run").stdout
    left_out = [line for line in listed.splitlines() if line.startswith("# note: left out of the environment")]
    names = [name for line in left_out for name in re.findall(r"\b[A-Z]+(?:_[A-Z0-9]+)+\b", line)]
    assert len(names) == len(set(names)) == 36, "those of the interface are listed too"


@pytest.mark.parametrize(
    ("refused", "version", "form"),
    [
        ("--gpus-per-node*", "22.05.8", "gres"),
        ("--gpus-per-node*|--gres*", "22.05.8", "gpus-per-task"),
        ("nothing", "22.05.8", None),
        ("*", "22.05.8", None),
        ("--gpus-per-node*", "24.11.1", None),
        ("--gpus-per-node*", "25.11.6", None),
        ("--gpus-per-node*", "26.05.5", "gres"),
    ],
)
def test_init_finds_the_form_of_requests_for_gpus_that_the_site_accepts(
    shell: Shell, slurm: ScriptedSlurm, refused: str, version: str, form: str | None
) -> None:
    """It asks `sbatch --test-only`, which can crash slurmctld of some versions: those are not asked."""
    asked = slurm.directory / "asked"
    slurm.write_program("squeue", f"echo slurm {version}")
    slurm.write_program(
        "sbatch",
        f'echo "$@" >> {asked}; for word; do case $word in {refused}) echo "sbatch: error: use another form" >&2; '
        "exit 1;; esac; done",
    )
    done = shell.zslurm("init", "--yes", "--no-probe", "--name", "lab")
    assert done.code == 0, done.stderr
    lines = [line.strip() for line in done.stdout.splitlines()]
    assert [line for line in lines if line.startswith("gpu_option:")] == ([f"gpu_option: {form}"] if form else [])
    assert asked.exists() is not version.startswith(("24.11", "25.11"))
