"""The script of a function: the cluster's template, with the function in the place of the supervisor."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.submit.plugin.conftest import PROFILE
from zslurm.cluster.profile import save_profile
from zslurm.core.errors import ConfigError
from zslurm.submit.plugin.script import function_script, resolve_function


def script(folder: Path, *, array: int | None = None, command: str = "python -m run", **parameters: Any) -> str:
    folder.mkdir(exist_ok=True)
    return function_script(resolve_function(parameters), command, folder, folder / ".secrets_x.env", array)


def option(text: str, name: str) -> str | None:
    """The value of an option; empty for a bare flag, None if it is not there."""
    for line in text.splitlines():
        found = line.removeprefix(f"#SBATCH --{name}")
        if line.startswith(f"#SBATCH --{name}") and (not found or found.startswith("=")):
            return found.removeprefix("=")
    return None


@pytest.fixture
def folder(tmp_path: Path, profile: str) -> Path:
    return tmp_path / "logs"


def test_logs_are_where_submitit_reads_them(folder: Path) -> None:
    single, several = script(folder), script(folder, array=4, array_parallelism=2)
    assert option(single, "output") == f"{folder}/%j_0_log.out"
    assert option(single, "error") == f"{folder}/%j_0_log.err"
    assert f"srun --unbuffered --output {folder}/%j_%t_log.out --error {folder}/%j_%t_log.err python" in single
    assert option(several, "array") == "0-3%2"
    assert option(several, "output") == f"{folder}/%A_%a_0_log.out"
    assert f"--output {folder}/%A_%a_%t_log.out" in several
    merged = script(folder, stderr_to_stdout=True)
    assert option(merged, "error") is None
    assert "--error" not in merged


def test_the_job_has_the_rules_of_rccl_and_may_import_modules_of_its_directory(folder: Path) -> None:
    text = script(folder)
    assert "export SUBMITIT_EXECUTOR=zslurm\n" in text
    assert "export NCCL_IB_GID_INDEX=1\n" in text  # a rule for Pollara NICs
    assert "PYTHONSAFEPATH" not in text
    assert "ZSLURM_JOB_ID" not in text


@pytest.mark.parametrize(
    ("given", "profile_s", "time", "signal", "minutes"),
    [
        ({}, "{}", "5", "USR2@90", 5),
        ({"time": 30}, "{time: '10:00:00'}", "30", "USR2@90", 30),
        ({}, "{time: '10:00:00', save_margin_s: 600}", "10:00:00", "USR2@600", 600),
        ({"signal_delay_s": 30}, "{save_margin_s: 600}", "5", "USR2@30", 5),
        ({"time": 1}, "{}", "1", "USR2@60", 1),
        ({"time": "UNLIMITED"}, "{}", "UNLIMITED", "USR2@90", 24855 * 24 * 60),
    ],
)
def test_time_limit_and_signal_are_the_parameter_s_the_profile_s_or_submitit_s(
    given: dict[str, Any], profile_s: str, time: str, signal: str, minutes: int, folder: Path
) -> None:
    save_profile("timed", PROFILE.replace("{account: lab}", profile_s), make_default=False)
    text = script(folder, profile="timed", **given)
    assert (option(text, "time"), option(text, "signal")) == (time, signal)
    assert resolve_function({"profile": "timed", **given}).minutes == minutes


@pytest.mark.parametrize(
    ("parameters", "alone"),
    [
        ({"nodes": 2, "gpus_per_node": 8}, ""),
        ({"nodes": 1, "gpus_per_node": 8}, None),
        ({"nodes": 2}, None),
        ({"nodes": 2, "gpus_per_node": 8, "exclusive": "user"}, "user"),
    ],
)
def test_only_several_nodes_with_gpus_are_taken_whole_for_their_rails(
    parameters: dict[str, Any], alone: str | None, folder: Path
) -> None:
    nics = "cluster:\n  nics: [a, b, c, d, e, f, g, h]"
    save_profile("rails", PROFILE.replace("cluster:", nics), make_default=False)
    assert option(script(folder, profile="rails", **parameters), "exclusive") == alone


def test_a_profile_s_size_of_runs_is_not_that_of_functions(folder: Path) -> None:
    size = "{account: lab, nodes: 4, ranks_per_node: 8, spares: 1, mem: 500G, cpus_per_task: 12, qos: high}"
    save_profile("sized", PROFILE.replace("{account: lab}", size), make_default=False)
    text = script(folder, profile="sized")
    assert [option(text, name) for name in ("nodes", "ntasks-per-node", "mem", "cpus-per-task", "qos")] == [
        "1", "1", None, None, "high",
    ]  # fmt: skip
    assert resolve_function({"profile": "sized"}).tasks == 1
    assert resolve_function({"profile": "sized", "nodes": 2, "ntasks_per_node": 3}).tasks == 6


def test_gpus_are_asked_for_as_the_cluster_names_them(folder: Path) -> None:
    assert option(script(folder, gpus_per_node=2), "gpus-per-node") == "mi300x:2"
    assert option(script(folder, num_gpus=1), "gpus-per-node") == "mi300x:1"
    assert option(script(folder, gpus_per_node="h100:3"), "gpus-per-node") == "h100:3"
    assert option(script(folder), "gpus-per-node") is None


def test_requeue_may_be_taken_away(folder: Path) -> None:
    assert option(script(folder), "requeue") == ""
    text = script(folder, additional_parameters={"no-requeue": True})
    assert (option(text, "requeue"), option(text, "no-requeue")) == (None, "")


def test_the_function_s_lines_come_after_the_site_s_and_its_exit_code_is_the_job_s(folder: Path) -> None:
    site = PROFILE.replace("cluster:", "cluster:\n  setup: [echo site]")
    save_profile("site", site, make_default=False)
    text = script(
        folder, profile="site", command="sh -c 'echo ran; exit 7'", use_srun=False,
        setup=["echo own"], teardown=["echo after"],
    )  # fmt: skip
    done = subprocess.run(["bash", "-c", text], capture_output=True, text=True, check=False)
    assert (done.stdout.split(), done.returncode) == (["site", "own", "ran", "after"], 7)


def test_more_cores_reach_the_tasks_and_options_of_srun_are_quoted(folder: Path) -> None:
    text = script(folder, cpus_per_task=6, srun_args=["--cpu-bind", "none", "-J", "a b"])
    line = next(line for line in text.splitlines() if line.startswith("srun"))
    assert shlex.split(line)[6:] == ["--cpus-per-task=6", "--cpu-bind", "none", "-J", "a b", "python", "-m", "run"]


def test_secrets_of_the_profile_are_in_a_file_that_only_the_user_can_read(folder: Path) -> None:
    text = script(folder, overrides=["cluster.env.HF_TOKEN=hf_abcdefgh"])
    file = folder / ".secrets_x.env"
    assert "hf_abcdefgh" not in text
    assert f". {file} || exit 1" in text
    assert (file.read_text(), file.stat().st_mode & 0o777) == ("export HF_TOKEN=hf_abcdefgh\n", 0o600)


def test_a_site_s_template_keeps_its_lines_and_one_without_blocks_is_refused(folder: Path, tmp_path: Path) -> None:
    own = tmp_path / "own.sbatch.j2"
    own.write_text('{% extends "train.sbatch.j2" %}\n{% block modules %}\n. /site/enter\n{% endblock %}\n')
    text = script(folder, overrides=[f"cluster.template={own}"])
    assert "\n. /site/enter\n" in text
    assert "python -m run" in text
    assert "job-$ZSLURM_JOB_ID.exit" not in text  # no supervisor
    own.write_text("#!/bin/bash\npython train.py\n")
    with pytest.raises(
        ConfigError, match=r"own.sbatch.j2: cannot run functions: keep the blocks `identity` and `l"
    ):
        script(folder, overrides=[f"cluster.template={own}"])
    own.write_text("{% block x %}")
    with pytest.raises(ConfigError, match=r"own.sbatch.j2: cannot be rendered: "):
        script(folder, overrides=[f"cluster.template={own}"])
