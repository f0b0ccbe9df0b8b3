"""Only the ranks are inside a container; they see the run, its data and the devices, and are checked before."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests import forked
from tests.job.fake_apptainer import FakeApptainer
from tests.submit.local_runs import PACE, LocalUser
from tests.submit.specs import run_spec
from tests.waiting import wait_for
from zslurm.config.spec import RunSpec
from zslurm.core.errors import CheckFailed, ConfigError
from zslurm.job.preparation import prepare as prepare_module
from zslurm.job.preparation.container import check_container, container_interpreter
from zslurm.job.preparation.container_check import NEEDED, AbiCheck, check_rdma_abi, compare
from zslurm.job.preparation.prepare import prepare
from zslurm.job.step import local_step, slurm_step
from zslurm.run.run_dir import RunDir
from zslurm.slurm.on_nodes.run_on_nodes import NodeAnswer

PACE_S = 0.05


def spec_of(directory: Path, *, cluster: dict[str, Any] | None = None, **container: Any) -> RunSpec:
    body = {"image": "/images/train.sif", **container}
    return run_spec(directory, cluster={"name": "lab", "launcher": "slurm", "container": body, **(cluster or {})})


def words_of(spec: RunSpec, run: RunDir, **environ: str) -> list[str]:
    return list(container_interpreter(spec, run, environ, exists=lambda path: False).command)


# --- what stands in front of Python ---------------------------------------------------------------------------


def test_apptainer_gets_binds_options_and_image_in_front_of_the_images_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    spec = spec_of(tmp_path, binds=["/scratch", "/opt/x:/y:ro"], options=["--rocm"], python="/venv/bin/python")
    assert words_of(spec, RunDir(tmp_path)) == [
        *("apptainer", "exec", "--bind", "/scratch", "--bind", "/opt/x:/y:ro", "--pwd", str(tmp_path)),
        *("--rocm", "/images/train.sif", "/venv/bin/python"),
    ]
    assert words_of(spec_of(tmp_path, engine="singularity"), RunDir(tmp_path))[:2] == ["singularity", "exec"]


def test_pyxis_gets_options_of_srun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    spec = spec_of(tmp_path, engine="pyxis", binds=["/scratch", "/x:/y:ro"], options=["--container-remap-root"])
    run = RunDir(tmp_path / "run")
    python = container_interpreter(
        spec, run, {"NCCL_DEBUG": "INFO", "HOME": "/h", "PYTHONPATH": "/host"}, exists=lambda path: False
    )
    command = slurm_step(spec, run, run.attempt(1), python, ["n1"]).command
    assert [word for word in command if word.startswith("--container")] == [
        "--container-image=/images/train.sif",
        "--container-mounts=/scratch:/scratch,/x:/y:ro",
        f"--container-workdir={tmp_path}",
        "--container-env=NCCL_DEBUG,PYTHONPATH",
        "--container-remap-root",
    ]
    assert command[-5:] == ["-u", "-m", "zslurm.job.rank", str(run.path), "1"]
    assert command[-6] == "python3"


def test_the_supervisor_stays_outside_and_only_the_rank_is_inside(tmp_path: Path) -> None:
    spec, run = spec_of(tmp_path), RunDir(tmp_path / "run")
    python = container_interpreter(spec, run, {}, exists=lambda path: False)
    command = slurm_step(spec, run, run.attempt(1), python, ["n1"]).command
    assert command[0] == "srun"
    assert command.index("srun") < command.index("apptainer") < command.index("zslurm.job.rank")
    local = local_step(spec, run, run.attempt(1), python).command
    assert local[0] == sys.executable
    assert local.index("--") < local.index("apptainer")


def test_the_ranks_import_our_packages_and_nothing_of_the_hosts_python(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    host = {"PYTHONPATH": "/host", "VIRTUAL_ENV": "/venv", "CONDA_PREFIX": "/conda", "KEPT": "1"}
    inside = container_interpreter(spec_of(tmp_path), run, host).environ
    assert inside == {"KEPT": "1", "PYTHONPATH": str(run.path / "code" / "packages")}
    assert container_interpreter(spec_of(tmp_path, packages="image"), run, host).environ == {"KEPT": "1"}


# --- what is bound ----------------------------------------------------------------------------------------------


def test_the_run_its_data_and_the_devices_are_bound_where_they_exist(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    spec = run_spec(
        tmp_path / "project",
        cluster={"name": "lab", "launcher": "slurm", "container": {"image": "/images/train.sif"}},
        data={"path": None, "sources": {"a": "/data/a.h5", "b": "/lustre/b.h5"}},
        checkpoint={"local_dir": "/nvme/me"},
    ).model_copy(update={"init": "ckpt:/weights/step-1"})
    run = RunDir(tmp_path / "project" / "runs" / "tiny")
    there = {run.path, tmp_path, *map(Path, ("/data", "/lustre", "/nvme", "/dev/shm", "/dev/kfd", "/dev/dri"))}
    there |= {Path("/sys/class/infiniband"), Path("/weights")}
    words = container_interpreter(spec, run, {}, exists=lambda path: path in there).command
    assert [words[i + 1] for i, word in enumerate(words) if word == "--bind"] == [
        *(str(tmp_path), "/data", "/lustre", "/nvme", "/weights"),
        *("/dev/shm", "/dev/kfd", "/dev/dri", "/sys/class/infiniband"),
    ], "the run lies below the working directory"


def test_default_binds_can_be_left_out(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, default_binds=False, binds=["/only"])
    words = container_interpreter(spec, RunDir(tmp_path), {}).command
    assert [words[i + 1] for i, word in enumerate(words) if word == "--bind"] == ["/only"]


@pytest.mark.parametrize("character", [":", ","])
def test_a_path_that_no_container_can_have_is_refused(tmp_path: Path, character: str) -> None:
    with pytest.raises(ConfigError, match="cannot be bound into a container"):
        check_container(spec_of(tmp_path), RunDir(tmp_path / f"a{character}b"))


def test_pyxis_needs_slurm(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="pyxis is a part of srun"):
        check_container(spec_of(tmp_path, engine="pyxis", cluster={"launcher": "local"}), RunDir(tmp_path))


@pytest.mark.parametrize("bind", ["relative", "/a:b", "/a,/b", ""])
def test_a_bind_that_is_none_is_refused(tmp_path: Path, bind: str) -> None:
    with pytest.raises(ValueError, match="must be /SOURCE"):
        spec_of(tmp_path, binds=[bind])


def test_a_container_and_a_staged_environment_exclude_each_other(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="leave stage_env or container out"):
        spec_of(tmp_path, cluster={"stage_env": "/tmp"})


# --- the RDMA library -------------------------------------------------------------------------------------------


def test_devices_that_the_library_lists_are_fine() -> None:
    assert compare({"ionic_0": "4"}, ["ionic_0"], "").state == "ok"


def test_a_driver_of_another_abi_is_named_with_what_to_do() -> None:
    # The format is that of rdma-core's libibverbs/init.c.
    said = (
        "libibverbs: Warning: Driver ionic does not support the kernel ABI of 4 (supports 1 to 1) for device "
        "/sys/class/infiniband/ionic_0\n"
    )
    found = compare({"ionic_0": "4", "mlx5_0": "1"}, ["mlx5_0"], said)
    assert found.state == "mismatch"
    assert found.detail == (
        "1 of 2 RDMA devices cannot be used (ionic_0): the driver ionic in here speaks ABI 1 to 1, the host's "
        "kernel ABI 4; take an image with the host's version of libionic"
    )


def test_a_device_without_a_driver_is_a_mismatch_too() -> None:
    found = compare({"ionic_0": "4"}, [], "")
    assert (found.state, "has no working driver" in found.detail) == ("mismatch", True)


def test_without_devices_nothing_is_claimed(tmp_path: Path) -> None:
    assert check_rdma_abi(tmp_path / "none") == AbiCheck("unavailable", "no RDMA devices to be seen")


def test_a_container_must_have_zslurm_and_what_its_installation_brings() -> None:
    """`train` and `checkpoint_tools` are import names of a checkout only."""
    required = {re.split(r"[^\w-]", line)[0] for line in importlib.metadata.requires("zslurm-train") or ()}
    assert set(NEEDED) - {"zslurm"} <= required


@pytest.fixture
def verbs(tmp_path: Path) -> Path:
    """A kernel with two devices."""
    for index in range(2):
        entry = tmp_path / "verbs" / f"uverbs{index}"
        entry.mkdir(parents=True)
        (entry / "ibdev").write_text(f"ionic_{index}\n")
        (entry / "abi_version").write_text("4\n")
    return tmp_path / "verbs"


LIBRARY = """
#include <stdio.h>
static const char *names[] = {%s};
void **ibv_get_device_list(int *count) {
    fprintf(stderr, "%s");
    *count = sizeof(names) / sizeof(*names);
    return (void **)names;
}
const char *ibv_get_device_name(void *device) { return device; }
"""


def build_library(directory: Path, names: list[str], said: str) -> None:
    """A libibverbs.so.1 that lists these devices."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    source = LIBRARY % (", ".join(f'"{name}"' for name in names), said)
    command = [compiler, "-shared", "-fPIC", "-x", "c", "-", "-o", str(directory / "libibverbs.so.1")]
    subprocess.run(command, input=source, text=True, check=True)


@pytest.mark.parametrize(
    ("names", "said", "state"),
    [
        (["ionic_0", "ionic_1"], "", "ok"),
        (
            ["ionic_0"],
            "Driver ionic does not support the kernel ABI of 4 (supports 1 to 1) for device x",
            "mismatch",
        ),
    ],
)
def test_the_library_itself_is_asked(
    tmp_path: Path, verbs: Path, monkeypatch: pytest.MonkeyPatch, names: list[str], said: str, state: str
) -> None:
    build_library(tmp_path, names, said)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    assert check_rdma_abi(verbs).state == state


def test_a_library_that_crashes_or_cannot_be_loaded_leaves_the_answer_open(
    tmp_path: Path, verbs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "libibverbs.so.1").write_text("not a library")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    found = check_rdma_abi(verbs)
    assert found.state == "unavailable"
    assert "libibverbs" in found.detail


def test_only_the_nodes_that_are_used_are_asked_and_each_is_named_with_its_own_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """srun numbers its nodes as Slurm sorts them, in whatever order they are given."""
    run = RunDir(tmp_path / "run")
    run.logs.mkdir(parents=True)

    def run_on_nodes(*_: str, nodes: list[str], **_options: object) -> dict[str, NodeAnswer]:
        (run.logs / "container-7-0.log").write_text("FATAL: no such image\n")
        good = {"missing": [], "abi": {"state": "ok", "detail": "so"}}
        return {node: NodeAnswer(node, good) for node in nodes} | {"node1": NodeAnswer("node1", None, "no answer")}

    monkeypatch.setattr(prepare_module, "run_on_nodes", run_on_nodes)
    with pytest.raises(CheckFailed, match=r"does not start: FATAL: no such image \(on node1\)"):
        prepare(spec_of(tmp_path), run, "7", ["node2", "node1"], {}, lambda event: None)


# --- real processes on this machine -----------------------------------------------------------------------------


@pytest.fixture
def user(tmp_path: Path) -> Iterator[LocalUser]:
    person = LocalUser(tmp_path)  # what is inside has another PYTHONPATH: of that nothing is forked
    yield person
    person.close()


def in_container(user: LocalUser, apptainer: FakeApptainer, **container: Any) -> dict[str, Any]:
    user.environment["PATH"] = f"{apptainer.directory}:{os.environ['PATH']}"
    return {"name": "local", "container": {"image": str(apptainer.image), "python": sys.executable, **container}}


def forking_python(user: LocalUser) -> str:
    """A Python for images, whose ranks and what is next to them need not wait for torch."""
    variables = forked.environment(forked.server(torch=True), [*forked.RANKS, *forked.BESIDE_RANKS])
    path = variables.pop("PYTHONPATH")
    lines = [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]
    script = user.directory / "python-in-image"
    script.write_text(
        "\n".join(["#!/bin/sh", *lines, f'PYTHONPATH={path}:{PACE}:$PYTHONPATH exec {sys.executable} "$@"', ""])
    )
    script.chmod(0o755)
    return str(script)


def test_the_stand_in_passes_signals_on_and_outlasts_its_command(tmp_path: Path) -> None:
    """Else Slurm, which sees it end, would kill the ranks while they save."""
    apptainer = FakeApptainer(tmp_path)
    saving, done = tmp_path / "saving", tmp_path / "done"
    program = tmp_path / "rank"
    program.write_text(
        "#!/bin/bash\n"
        f"trap 'touch {saving}' TERM\n"
        f"echo ready; until [ -e {done} ]; do sleep 0.05; done; [ -e {saving} ] && exit 75\n"
    )
    program.chmod(0o755)
    command = [apptainer.directory / "apptainer", "exec", "--pwd", tmp_path, apptainer.image, program]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.terminate()
        try:
            wait_for(lambda: saving.exists() or process.poll() is not None, "the signal to arrive")
            assert process.poll() is None
        finally:
            done.touch()
        assert process.wait() == 75


def test_a_run_trains_inside_and_its_supervisor_outside(user: LocalUser, tmp_path: Path) -> None:
    apptainer = FakeApptainer(tmp_path)
    run_file = user.write_run("inside", steps=4, ranks=2, trainer="real", cluster=in_container(user, apptainer))
    user.zslurm("submit", run_file, "--wait")
    run = user.run_dir("inside")
    (check, *ranks) = apptainer.calls
    assert check["command"][-2:] == ["-m", "zslurm.job.preparation.container_check"]
    assert sorted(call["rank"] for call in ranks) == ["0", "1"]
    for call in ranks:
        assert call["pythonpath"] == str(run.path / "code" / "packages")
        assert str(tmp_path) in call["binds"], "the working directory, with run and data in it"
    assert (run.path / "code" / "packages" / "zslurm" / "job" / "rank.py").is_file()
    (checked,) = user.events("inside", "container_checked")
    assert next(iter(checked["rdma_abi"])).startswith("unavailable: ")


def test_a_container_that_does_not_start_ends_the_run_in_its_own_words(user: LocalUser, tmp_path: Path) -> None:
    apptainer = FakeApptainer(tmp_path)
    cluster = in_container(user, apptainer, image=str(tmp_path / "nonesuch.sif"))
    done = user.zslurm("submit", user.write_run("broken", steps=4, cluster=cluster), "--wait", exit_code=1)
    assert "nonesuch.sif: does not start: FATAL:   could not open image" in done.stderr
    assert user.state("broken")["exit_code"] == 5
    assert user.events("broken", "attempt_started") == []


def test_an_image_without_torch_is_found_before_the_ranks_start(user: LocalUser, tmp_path: Path) -> None:
    apptainer = FakeApptainer(tmp_path)
    bare = tmp_path / "bare-python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    bare.chmod(0o755)
    cluster = in_container(user, apptainer, python=str(bare))
    run_file = user.write_run("bare", steps=4, trainer="real", cluster=cluster)
    done = user.zslurm("submit", run_file, "--wait", exit_code=1)
    assert f"its {bare} has no torch, numpy, h5py" in done.stderr


def test_a_request_to_stop_reaches_ranks_inside(user: LocalUser, tmp_path: Path) -> None:
    apptainer = FakeApptainer(tmp_path)
    cluster = in_container(user, apptainer, python=forking_python(user))
    user.zslurm("submit", user.write_run("stops", trainer="real", pace_s=PACE_S, cluster=cluster))
    user.wait_for_step("stops", 2)
    user.zslurm("cancel", "stops", "--wait")
    state = user.wait_for_end("stops")
    assert state["checkpoint_step"] == state["step"] >= 2


def test_a_killed_rank_inside_is_replaced_by_a_process_that_waits_inside(user: LocalUser, tmp_path: Path) -> None:
    """Store server and warm processes run in the container as well: only its Python has torch."""
    apptainer = FakeApptainer(tmp_path)
    memory = {"recovery": "memory", "recovery_s": 60}
    cluster = in_container(user, apptainer, python=forking_python(user))
    run_file = user.write_run("inside", ranks=2, trainer="real", pace_s=PACE_S, cluster=cluster, aegis=memory)
    user.zslurm("submit", run_file)

    def python_of(rank: int) -> psutil.Process:
        """The rank's process inside, below that of the engine."""
        (found,) = (
            process
            for process in user.processes()
            if process.environ().get("RANK") == str(rank)
            and process.cmdline()[1:4] == ["-u", "-m", "zslurm.job.rank"]
        )
        return found

    wait_for(
        lambda: user.events("inside", "recovery_ready"),
        f"a warm process; so far {user.events('inside', 'recovery_unavailable')}",
        deadline_s=300,
    )
    survivor = python_of(0)
    python_of(1).kill()
    wait_for(
        lambda: user.events("inside", "recovered_in_memory"),
        f"a recovery; so far {user.events('inside', 'recovery_failed')}",
        deadline_s=300,
    )
    (recovered,) = user.events("inside", "recovered_in_memory")
    assert recovered["ranks"] == [1]
    user.wait_for_step("inside", recovered["step"] + 3)
    assert python_of(0) == survivor
    modules = {call["command"][3] for call in apptainer.calls if call["command"][1] == "-u"}
    assert modules == {"zslurm.job.rank", "zslurm.job.in_memory.store_server", "zslurm.job.in_memory.warm_rank"}
    user.zslurm("cancel", "inside", "--wait")
    assert user.wait_for_end("inside")["attempt"] == 1
