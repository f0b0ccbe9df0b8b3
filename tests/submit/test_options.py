"""Options of submit become settings of the run, and say what to do if they cannot."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest

from tests.submit.scripted_slurm import FORGOTTEN, ScriptedSlurm
from tests.submit.specs import run_spec
from tests.train.runs import make_corpus
from zslurm.cli.run.submission import dependency, sbatch_flags
from zslurm.core.errors import ConfigError, NotFound
from zslurm.job.preparation.interpreter import Interpreter
from zslurm.job.step import slurm_step
from zslurm.run.run_dir import RunDir
from zslurm.slurm.sbatch_options import RESERVED
from zslurm.slurm.version import NEEDED
from zslurm.submit.checks.run import _check_heal
from zslurm.submit.script.render import directives
from zslurm.submit.slurm_launcher import check_slurm
from zslurm.submit.submit import submit


@pytest.mark.parametrize(
    ("words", "flags"),
    [
        (["--mail-type=END", "--exclusive"], {"mail-type": "END", "exclusive": True}),
        (["--comment", "two words", "--begin=now+1hour"], {"comment": "two words", "begin": "now+1hour"}),
        (["--comment=a=b", "--comment=c"], {"comment": "c"}),
        (["--gres-flags=", "--contiguous"], {"gres-flags": "", "contiguous": True}),
        ([], {}),
    ],
)
def test_options_behind_the_dashes_are_sbatchs(words: list[str], flags: dict[str, object]) -> None:
    assert sbatch_flags(words) == flags


@pytest.mark.parametrize("flag", sorted(RESERVED))
def test_an_option_that_zslurm_sets_is_refused(flag: str) -> None:
    with pytest.raises(ConfigError, match=f"^--{flag}: zslurm sets it itself"):
        sbatch_flags([f"--{flag}=x"])


def test_the_refusal_says_what_to_use_instead() -> None:
    with pytest.raises(ConfigError, match="use --sweep KEY=VALUE,VALUE"):
        sbatch_flags(["--array=1-4"])


@pytest.mark.parametrize("words", [["-N4"], ["nodes"], ["--"], ["--Upper"], ["--a b"], [""], ["--x", "y", "z"]])
def test_what_is_no_long_option_is_refused(words: list[str]) -> None:
    with pytest.raises(ConfigError, match="not a long option of sbatch"):
        sbatch_flags(words)


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (["12"], "afterok:12"),
        (["afterany:12"], "afterany:12"),
        (["12", "afternotok:13"], "afterok:12,afternotok:13"),
        (["after:12+30"], "after:12+30"),
        (["afterok:12:13_4"], "afterok:12:13_4"),
        (["singleton"], "singleton"),
        ([], None),
    ],
)
def test_after_is_slurms_dependency(given: list[str], wanted: str | None) -> None:
    assert dependency(given) == wanted


def test_after_takes_the_name_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_corpus(tmp_path / "tokens.h5")
    ScriptedSlurm(tmp_path / "bin", monkeypatch)
    submit(run_spec(tmp_path, cluster={"name": "lab", "launcher": "slurm"}))
    assert dependency(["tiny"]) == f"afterok:{FORGOTTEN}"
    assert dependency(["afterany:tiny"]) == f"afterany:{FORGOTTEN}"


def test_after_names_what_it_does_not_know() -> None:
    with pytest.raises(ConfigError, match="`befor` is no type of dependency; types: after, afterany"):
        dependency(["befor:12"])
    with pytest.raises(NotFound, match="nonesuch"):
        dependency(["nonesuch"])


def test_spares_are_nodes_of_the_job_that_the_ranks_leave_alone(tmp_path: Path) -> None:
    spec = run_spec(tmp_path, slurm={"nodes": 3, "spares": 2}, cluster={"launcher": "slurm"})
    run = RunDir(tmp_path)
    options = dict(directives(spec, run))
    assert (options["nodes"], options["no-kill"]) == ("5", True)
    command = slurm_step(spec, run, run.attempt(1), Interpreter.own({}), ["n1", "n2", "n5"]).command
    assert {"--nodes=3", "--ntasks=3", "--nodelist=n[1-2,5]", "--overlap"} <= set(command)
    assert spec.world_size == 3


def test_a_run_that_can_go_on_with_fewer_nodes_outlives_one(tmp_path: Path) -> None:
    elastic = run_spec(
        tmp_path,
        slurm={"nodes": 3},
        cluster={"launcher": "slurm"},
        aegis={"min_nodes": 2},
        run={"name": "elastic"},
    )
    assert dict(directives(elastic, RunDir(tmp_path)))["no-kill"] is True
    plain = run_spec(tmp_path, slurm={"nodes": 3}, cluster={"launcher": "slurm"})
    assert "no-kill" not in dict(directives(plain, RunDir(tmp_path)))


def test_a_node_that_was_found_broken_is_not_asked_for_again(tmp_path: Path) -> None:
    """Until its exclusion expires; with those that the user excludes; never one that the user names."""
    spec = run_spec(tmp_path, slurm={"nodes": 1, "exclude": "n[1-2]"}, cluster={"launcher": "slurm"})
    run = RunDir(tmp_path / "run")
    run.path.mkdir()
    rows = [
        {"time": time.time(), "event": "nodes_excluded", "nodes": "n[4,7]", "reason": "node_dead"},
        {"time": time.time() - 8 * 86400, "event": "nodes_excluded", "nodes": "n9", "reason": "long ago"},
    ]
    run.events.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert dict(directives(spec, run))["exclude"] == "n[1-2,4,7]"
    demanding = run_spec(tmp_path, slurm={"nodes": 1, "nodelist": "n4"}, cluster={"launcher": "slurm"})
    assert dict(directives(demanding, run))["exclude"] == "n7"


def test_another_scheduler_is_refused_for_what_its_commands_lack(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spur is asked, for a later version may have every option. Its version's text is from its source."""
    make_corpus(tmp_path / "tokens.h5")
    slurm = ScriptedSlurm(tmp_path / "bin", monkeypatch)
    cluster = {"name": "lab", "launcher": "slurm"}
    spec = run_spec(tmp_path, cluster=cluster)
    shown = {program: list(options) for program, options in NEEDED.items()}
    shown["srun"] = ["--overlap", "--distribution"]
    shown["sbatch"].remove("--signal")

    def write_spur() -> None:
        for program, options in shown.items():
            lines = "".join(f"      {option} <VALUE>  what it does\\n" for option in options)
            version = '[ "$1" = --version ] && echo spur 0.12.0 && exit'
            job = f'[ "$1" = --help ] || {{ echo Submitted batch job {FORGOTTEN}; exit; }}'
            slurm.write_program(program, f"{version}\n{job}\nprintf '{lines}'")

    write_spur()
    lacks = (
        "spur 0.12.0 is not Slurm, and its sbatch has no --signal; its srun has no --kill-on-bad-exit, --no-kill, "
        "--unbuffered, --wait: a run needs them"
    )
    with pytest.raises(ConfigError, match=f"^{re.escape(lacks)}"):
        submit(spec)
    assert not (tmp_path / "runs").exists()
    shown |= {program: list(options) for program, options in NEEDED.items()}
    write_spur()
    check_slurm(spec)


# `sbatch --version` of SchedMD's and of Debian's build
@pytest.mark.parametrize("version", ["slurm 21.08.8-2", "slurm-wlm 20.11.9"])
def test_spares_need_a_slurm_that_can_share_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    make_corpus(tmp_path / "tokens.h5")
    slurm = ScriptedSlurm(tmp_path / "bin", monkeypatch)
    slurm.says_version(version)
    spec = run_spec(tmp_path, slurm={"spares": 1}, cluster={"name": "lab", "launcher": "slurm"})
    short = version.split()[1][:5]
    with pytest.raises(
        ConfigError, match=f"^slurm.spares and aegis.min_nodes: need Slurm 22.05 or newer.*this is {short}"
    ):
        submit(spec)
    assert not (tmp_path / "runs").exists()
    slurm.says_version("slurm-wlm 22.05.8")
    assert submit(spec).job_id == FORGOTTEN


@pytest.mark.parametrize("bind", ["rank", "verbose,rank"])
def test_a_binding_by_rank_that_slurm_would_ignore_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bind: str
) -> None:
    make_corpus(tmp_path / "tokens.h5")
    slurm = ScriptedSlurm(tmp_path / "bin", monkeypatch)
    slurm.says_version("slurm 24.11.5")
    cluster = {"name": "lab", "launcher": "slurm"}
    spec = run_spec(tmp_path, slurm={"cpu_bind": bind}, cluster=cluster)
    with pytest.raises(ConfigError, match=r"^slurm\.cpu_bind: .*this is 24\.11\.5; .*map_cpu.*gpu"):
        submit(spec)
    assert not (tmp_path / "runs").exists()
    for words in ("rank_ldom", "map_cpu:0,1", "none"):
        check_slurm(run_spec(tmp_path, slurm={"cpu_bind": words}, cluster=cluster))
    slurm.says_version("slurm-wlm 22.05.8")
    assert submit(spec).job_id == FORGOTTEN


@pytest.mark.parametrize(
    ("limit", "fits"), [("5", False), ("300", True), ("5:00", False), ("5:01", True), ("1-0", True)]
)
def test_a_run_that_would_stop_as_soon_as_it_starts_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, fits: bool
) -> None:
    make_corpus(tmp_path / "tokens.h5")
    ScriptedSlurm(tmp_path / "bin", monkeypatch)
    spec = run_spec(tmp_path, slurm={"time": limit}, cluster={"name": "lab", "launcher": "slurm"})
    if fits:
        assert submit(spec).job_id == FORGOTTEN
        return
    with pytest.raises(
        ConfigError, match=r"^slurm.time: 0:05:00 is not longer than slurm.save_margin_s \(300 s\)"
    ):
        submit(spec)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"aegis": {"recovery": "restart"}}, "needs recovery in memory"),
        ({"cluster": {"stage_env": "/opt/env"}}, "does not copy cluster.stage_env"),
        ({"cluster": {"launcher": "local"}}, "needs Slurm"),
        ({}, ""),
    ],
    ids=["no recovery", "staged environment", "this machine", "fine"],
)
def test_helper_jobs_that_could_not_bring_nodes_are_refused(
    tmp_path: Path, changes: dict[str, dict[str, str]], why: str
) -> None:
    sections = {"slurm": {"nodes": 2}, "aegis": {"heal": "helper", "recovery": "memory"}}
    sections |= {"cluster": {"launcher": "slurm"}}
    spec = run_spec(tmp_path, **{name: section | changes.get(name, {}) for name, section in sections.items()})
    if not why:
        _check_heal(spec)
        return
    with pytest.raises(ConfigError, match=rf"^aegis.heal: helper {why}"):
        _check_heal(spec)


@pytest.mark.parametrize("export", ["ALL", "NONE", "HOME,PATH,MY_VAR"])
def test_what_of_the_login_environment_reaches_the_job_is_said(tmp_path: Path, export: str) -> None:
    spec = run_spec(tmp_path, slurm={"export": export}, cluster={"launcher": "slurm"})
    assert ("export", export) in directives(spec, RunDir(tmp_path))


@pytest.mark.parametrize("export", ["", "A B", "A=1", "ALL,A=$(x)", "all;x"])
def test_an_export_that_is_no_list_of_names_is_refused(tmp_path: Path, export: str) -> None:
    with pytest.raises(ValueError, match="must be ALL, NONE or names"):
        run_spec(tmp_path, slurm={"export": export})
