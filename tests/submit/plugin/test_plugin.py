"""submitit's AutoExecutor with the cluster `zslurm`: found, parameters taken or refused, nobody else disturbed."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import submitit
from submitit.core import plugins, test_core, utils
from submitit.core.job_environment import JobEnvironment
from submitit.slurm.test_slurm import mocked_slurm

from tests.submit.plugin.conftest import PROFILE
from tests.submit.scripted_slurm import BAD_TIME, NO_CONTROLLER, ScriptedSlurm
from zslurm.cluster.profile import save_profile
from zslurm.core.errors import ConfigError, NotFound, SlurmRefused, SlurmUnavailable, ZslurmError
from zslurm.submit.plugin.executor import ZslurmExecutor
from zslurm.submit.plugin.job import ZslurmJob
from zslurm.submit.plugin.job_environment import ZslurmJobEnvironment


@pytest.fixture
def slurm(tmp_path: Path, profile: str, monkeypatch: pytest.MonkeyPatch) -> ScriptedSlurm:
    return ScriptedSlurm(tmp_path / "bin", monkeypatch)


@pytest.fixture
def executor(slurm: ScriptedSlurm, tmp_path: Path) -> submitit.AutoExecutor:
    return submitit.AutoExecutor(tmp_path / "logs", cluster="zslurm")


def options(executor: submitit.AutoExecutor, slurm: ScriptedSlurm) -> dict[str, str]:
    """Submit, and return the options in the script that sbatch got."""
    executor.submit(test_core.do_nothing)
    lines = [line.removeprefix("#SBATCH --") for line in slurm.submitted.splitlines() if "#SBATCH --" in line]
    return {name: value.strip("'") for name, _, value in (line.partition("=") for line in lines)}


def test_submitit_finds_the_executor_and_the_environment_by_their_entry_points() -> None:
    """If this fails, install the checkout again: `make setup`."""
    assert plugins.get_executors()["zslurm"] is ZslurmExecutor
    assert isinstance(plugins.get_job_environments()["zslurm"], ZslurmJobEnvironment)


def test_a_task_is_in_our_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUBMITIT_EXECUTOR", "zslurm")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    job = JobEnvironment()
    assert isinstance(job, ZslurmJobEnvironment)
    assert (job.cluster, job.job_id) == ("zslurm", "7")


def test_the_executor_is_used_only_where_it_is_asked_for(tmp_path: Path) -> None:
    with mocked_slurm():
        assert submitit.AutoExecutor(tmp_path).cluster == "slurm"
        assert ZslurmExecutor.affinity() == 1
    assert ZslurmExecutor.affinity() in (-1, 1)


@pytest.mark.parametrize("cluster", ["slurm", "local"])
def test_other_clusters_keep_their_parameters_and_their_old_names(cluster: str, tmp_path: Path) -> None:
    with mocked_slurm():
        other = submitit.AutoExecutor(tmp_path, cluster=cluster)
        with pytest.warns(UserWarning, match="Setting 'partition' is deprecated. Use 'slurm_partition' instead"):
            other.update_parameters(partition="gpu", slurm_time=9, zslurm_profile="lab")
    assert other._executor.parameters == ({"partition": "gpu", "time": 9} if cluster == "slurm" else {})


def test_parameters_of_slurm_hold_and_those_of_zslurm_win(
    executor: submitit.AutoExecutor, slurm: ScriptedSlurm
) -> None:
    executor.update_parameters(
        name="mine", timeout_min=90, mem_gb=3.5, nodes=2, tasks_per_node=4, cpus_per_task=3, gpus_per_node=4,
        slurm_partition="slow", zslurm_partition="fast", slurm_qos="high", slurm_mail_type="END",
        slurm_exclusive=True, slurm_array_parallelism=3, slurm_signal_delay_s=45,
        slurm_additional_parameters={"reservation": "spring", "mem_per_gpu": 12},
    )  # fmt: skip
    found = options(executor, slurm)
    expected = {
        "job-name": "mine", "time": "90", "mem": "3584MB", "nodes": "2", "ntasks-per-node": "4",
        "cpus-per-task": "3", "gpus-per-node": "mi300x:4", "partition": "fast", "account": "lab", "qos": "high",
        "mail-type": "END", "exclusive": "", "signal": "USR2@45", "reservation": "spring", "mem-per-gpu": "12",
        "requeue": "", "open-mode": "append", "export": "ALL",
    }  # fmt: skip
    assert found | expected == found
    assert found.keys() - expected.keys() == {"output", "error"}


def test_arguments_of_the_constructor_hold_for_the_first_executor_of_a_program_too(slurm: ScriptedSlurm) -> None:
    """The plugin is loaded while the first AutoExecutor is made."""
    program = (
        "import submitit; made = submitit.AutoExecutor('logs', cluster='zslurm', slurm_max_num_timeout=7)\n"
        "print(made._executor.max_num_timeout)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["7"]


_MORE = "slurm_additional_parameters"
REFUSED: list[tuple[dict[str, Any], type[ZslurmError], str]] = [
    ({"slurm_qosx": "x"}, ConfigError, "slurm_qosx: no such parameter; did you mean `slurm_qos`?"),
    ({"zslurm_profil": "x"}, ConfigError, "zslurm_profil: no such parameter; did you mean `zslurm_profile`?"),
    ({"slurm_time": "soon"}, ConfigError, "update_parameters: slurm.time: must be a Slurm time such as"),
    ({"slurm_qos": "a\nb"}, ConfigError, "update_parameters: slurm.qos: must be one line"),
    ({"slurm_comment": "a\nb"}, ConfigError, "slurm_comment: must be one line"),
    ({"gpus_per_node": 9}, ConfigError, "gpus_per_node: 9 asked for, and a node of lab has 8 GPUs"),
    ({_MORE: {"output": "x"}}, ConfigError, f"{_MORE}: output: cannot be set; submitit reads the logs there"),
    ({_MORE: {"ntasks_per_node": 2}}, ConfigError, f"{_MORE}: ntasks_per_node: cannot be set; use tasks_per"),
    ({_MORE: {"--x": 2}}, ConfigError, f"{_MORE}: --x: not a long option of sbatch"),
    ({"slurm_setup": "echo"}, ConfigError, "slurm_setup: expected a list of texts, got 'echo'"),
    ({"zslurm_overrides": "a=1"}, ConfigError, "zslurm_overrides: expected a list of texts, got 'a=1'"),
    ({_MORE: ["x"]}, ConfigError, f"{_MORE}: expected a dictionary"),
    ({"zslurm_profile": "labb"}, NotFound, "labb: no cluster profile has this name; did you mean `lab`?"),
    ({"zslurm_overrides": ["cluster.nix=1"]}, ConfigError, "--set cluster.nix: cluster.nix: unknown key; did"),
    ({"zslurm_profile": "local"}, ConfigError, "the profile `local` is this machine"),
    (
        {"zslurm_overrides": ["cluster.container={image: x.sif}"]},
        ConfigError,
        "cluster.container of the profile lab: functions run outside",
    ),
]


@pytest.mark.parametrize(("parameters", "kind", "line"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_is_refused_is_one_line_and_changes_nothing(
    parameters: dict[str, Any],
    kind: type[ZslurmError],
    line: str,
    executor: submitit.AutoExecutor,
    slurm: ScriptedSlurm,
) -> None:
    executor.update_parameters(timeout_min=7, slurm_partition="gpu")
    with pytest.raises(kind) as raised:
        executor.update_parameters(slurm_account="other", **parameters)
    assert str(raised.value).startswith(line)
    assert "\n" not in str(raised.value)
    found = options(executor, slurm)
    assert (found["time"], found["partition"], found["account"]) == ("7", "gpu", "lab")


@pytest.mark.parametrize(
    ("message", "kind", "line"),
    [
        (BAD_TIME, SlurmRefused, "sbatch refused the job: Invalid --time specification"),
        (
            NO_CONTROLLER,
            SlurmUnavailable,
            "sbatch: the Slurm controller does not answer: Batch job",
        ),
    ],
)
@pytest.mark.parametrize("jobs", [1, 3])
def test_a_job_that_slurm_does_not_take_is_an_error_of_both_families_and_leaves_no_file(
    executor: submitit.AutoExecutor,
    slurm: ScriptedSlurm,
    message: str,
    kind: type[ZslurmError],
    line: str,
    jobs: int,
) -> None:
    slurm.refuses(message)
    with pytest.raises(kind) as raised:
        executor.map_array(abs, range(jobs))
    assert isinstance(raised.value, utils.FailedJobError)  # what programs catch that were written for submitit
    assert str(raised.value).startswith(line)
    assert list(executor.folder.iterdir()) == []


def test_without_slurm_and_without_a_profile_the_line_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "empty"))
    ScriptedSlurm(tmp_path / "bin", monkeypatch)
    executor = submitit.AutoExecutor(tmp_path, cluster="zslurm")
    with pytest.raises(ConfigError, match="run `zslurm init` on a login node"):
        executor.submit(abs, 1)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SlurmUnavailable, match="sbatch: not found on this machine; submit from a login node"):
        submitit.AutoExecutor(tmp_path, cluster="zslurm")


def test_a_folder_that_would_break_the_script_or_cannot_be_written_is_refused(
    slurm: ScriptedSlurm, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="folder: a path here cannot hold control characters"):
        ZslurmExecutor(tmp_path / "a\nb")
    (tmp_path / "file").write_text("")
    with pytest.raises(ZslurmError, match="cannot be written: Not a directory"):
        ZslurmExecutor(tmp_path / "file" / "logs").submit(abs, 1)


def test_large_pickles_are_refused_before_they_are_all_written(slurm: ScriptedSlurm, tmp_path: Path) -> None:
    executor = ZslurmExecutor(tmp_path / "logs", max_pickle_size_gb=1e-6)
    with pytest.raises(ConfigError, match=r"the pickles of function and arguments take 2.*, more than 1e-06 GiB"):
        executor.map_array(len, ["x" * 700] * 3)
    assert list((tmp_path / "logs").iterdir()) == []


def test_secrets_of_one_submission_outlive_the_next_one_s(
    executor: submitit.AutoExecutor, slurm: ScriptedSlurm
) -> None:
    """A job that waits in the queue reads its file when it starts."""
    executor.update_parameters(zslurm_overrides=["cluster.env.HF_TOKEN=hf_abcdefgh"])
    executor.submit(abs, 1)
    (file,) = executor.folder.glob(".secrets_*.env")
    executor.update_parameters(zslurm_overrides=[])
    executor.submit(abs, 1)
    assert list(executor.folder.glob(".secrets_*.env")) == [file]
    executor.update_parameters(zslurm_overrides=["cluster.env.HF_TOKEN=hf_ijklmnop"])
    slurm.refuses(BAD_TIME)
    with pytest.raises(SlurmRefused):
        executor.submit(abs, 1)
    assert list(executor.folder.glob(".secrets_*.env")) == [file]
    assert file.read_text() == "export HF_TOKEN=hf_abcdefgh\n"


def test_a_change_of_the_profile_is_seen_by_the_next_update(
    executor: submitit.AutoExecutor, slurm: ScriptedSlurm
) -> None:
    executor.update_parameters(slurm_qos="high")
    save_profile("lab", PROFILE.replace("account: lab", "account: two"), make_default=True)
    executor.update_parameters(slurm_qos="high")
    assert options(executor, slurm)["account"] == "two"


def test_sbatch_sees_nothing_of_a_surrounding_job(
    executor: submitit.AutoExecutor, slurm: ScriptedSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_NTASKS", "64")
    monkeypatch.setenv("SLURM_CONF", "/etc/slurm.conf")
    executor.submit(abs, 1)
    assert "SLURM_CONF=/etc/slurm.conf" in slurm.seen
    assert not [line for line in slurm.seen if line.startswith("SLURM_NTASKS")]


def test_a_change_of_the_profile_s_parameters_is_seen_by_the_next_submission(
    executor: submitit.AutoExecutor, slurm: ScriptedSlurm
) -> None:
    assert options(executor, slurm)["account"] == "lab"
    save_profile("lab2", PROFILE.replace("account: lab", "account: two"), make_default=False)
    executor.update_parameters(zslurm_profile="lab2")
    assert options(executor, slurm)["account"] == "two"


def test_nothing_warns(executor: submitit.AutoExecutor) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        executor.update_parameters(slurm_partition="gpu", timeout_min=3)
        job = executor.submit(abs, -1)
    assert isinstance(job, ZslurmJob)


def test_a_task_imports_neither_torch_nor_what_only_a_submission_needs() -> None:
    """Every task of every program that uses submitit loads the plugin, where zslurm is installed."""
    program = (
        "import json, sys; from submitit.core import plugins\n"
        "plugins.get_executors(), plugins.get_job_environments()\n"
        "print(json.dumps(sorted(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    modules = set(json.loads(done.stdout))
    assert "zslurm.submit.plugin.executor" in modules
    assert not modules & {"torch", "pydantic", "jinja2", "yaml", "h5py", "numpy", "zslurm.config", "zslurm.aegis"}
