"""Kernels are built on one node of each kind, and unpacked on the others; what fails does not keep ranks away."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.submit.specs import run_spec
from zslurm.core.errors import SlurmRefused
from zslurm.job.preparation import kernel_builds
from zslurm.job.preparation.interpreter import Interpreter
from zslurm.job.preparation.kernel_builds import builds_kernels, put_kernels, with_kernels
from zslurm.job.preparation.node_kernels import build, kind_of_node, make_own, node_architecture, unpack
from zslurm.job.preparation.prepare import prepare, prepared
from zslurm.kernels.prepared import PREPARED_VARIABLE
from zslurm.run.events import KernelsPrepared
from zslurm.run.events.event import Event
from zslurm.run.run_dir import RunDir
from zslurm.slurm.on_nodes.run_on_nodes import NodeAnswer

ON_GPUS = {"cluster": {"launcher": "slurm", "gpus_per_node": 8}}


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    (tmp_path / "run").mkdir()
    run = RunDir(tmp_path / "run")
    run.config.write_text("{}")
    return run


def archive(run: RunDir, kind: str, **entries: str) -> None:
    """Write an archive of a kind of node: contents by entry, with two files in each."""
    with tarfile.open(run.path / f"kernels-{kind}.tar", "w") as tar:
        for entry, content in entries.items():
            folder = run.path / "made" / "triton" / entry
            folder.mkdir(parents=True, exist_ok=True)
            for name in ("kernel.hsaco", "kernel.json"):
                (folder / name).write_text(content)
            tar.add(folder, f"triton/{entry}")


@pytest.mark.parametrize(("version", "name"), [("90402", "gfx942"), ("90010", "gfx90a"), ("120001", "gfx1201")])
def test_the_kernel_names_the_gpus_of_a_node(tmp_path: Path, version: str, name: str) -> None:
    nodes = tmp_path / "sys/class/kfd/kfd/topology/nodes"
    for number, target in ((0, "0"), (1, version)):  # the first is a CPU
        (nodes / str(number)).mkdir(parents=True)
        (nodes / str(number) / "properties").write_text(f"simd_count 0\ngfx_target_version {target}\n")
    assert node_architecture(tmp_path) == name


def test_a_kind_of_node_depends_on_the_gpu_and_on_the_configuration(run: RunDir) -> None:
    kind = kind_of_node(run, "gfx942")
    assert kind.startswith("gfx942-")
    assert kind == kind_of_node(run, "gfx942")
    assert kind.split("-")[1] == kind_of_node(run, "gfx950").split("-")[1]
    run.config.write_text('{"model": {}}')
    assert kind_of_node(run, "gfx942") != kind


def test_kernels_are_unpacked_whole_next_to_those_of_other_runs(run: RunDir, tmp_path: Path) -> None:
    target = tmp_path / "node"
    assert not unpack(run, target, "gfx942-1"), "nothing was built yet"
    archive(run, "gfx942-1", A="a", B="b")
    (target / "triton" / "A").mkdir(parents=True)
    target.chmod(0o700)
    (target / "triton" / "A" / "kernel.json").write_text("a")  # the other file was cleaned away
    (target / "triton" / "OTHER").mkdir()
    assert unpack(run, target, "gfx942-1")
    assert {file.relative_to(target).as_posix(): file.read_text() for file in target.rglob("kernel.*")} == {
        "triton/A/kernel.hsaco": "a", "triton/A/kernel.json": "a",
        "triton/B/kernel.hsaco": "b", "triton/B/kernel.json": "b",
    }  # fmt: skip
    assert sorted(file.name for file in target.iterdir()) == ["triton"], "no partial directory stayed"
    (target / "triton" / "OTHER").stat()
    before = (target / "triton" / "A").stat().st_ino
    assert unpack(run, target, "gfx942-1")
    assert (target / "triton" / "A").stat().st_ino == before, "what is there is left alone"


def test_what_another_process_is_compiling_stays_while_kernels_are_unpacked(run: RunDir, tmp_path: Path) -> None:
    target = tmp_path / "node"
    archive(run, "gfx942-1", A="a")
    partial = target / "triton" / "A" / "tmp.pid_7"
    partial.mkdir(parents=True)
    target.chmod(0o700)
    assert unpack(run, target, "gfx942-1")
    assert partial.is_dir()
    assert (target / "triton" / "A" / "kernel.json").read_text() == "a"


def test_nothing_is_put_into_a_directory_that_others_can_write_to(run: RunDir, tmp_path: Path) -> None:
    archive(run, "gfx942-1", A="a")
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(PermissionError, match="others may write to it"):
        unpack(run, tmp_path / "open", "gfx942-1")
    (tmp_path / "link").symlink_to(tmp_path / "run")
    with pytest.raises(PermissionError):
        make_own(tmp_path / "link")


class Nodes:
    """Nodes that answer `run_on_nodes`: their kinds, which kinds have an archive, and what they were asked."""

    def __init__(self, kinds: Mapping[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
        self.kinds, self.archives, self.asked = kinds, set[str](), list[tuple[str, list[str]]]()
        self.silent = set[str]()
        self.build_problems: list[str] = []
        monkeypatch.setattr(kernel_builds, "run_on_nodes", self.answer)

    def answer(self, module: str, action: str, *_: str, nodes: Sequence[str], **__: Any) -> dict[str, NodeAnswer]:
        assert module == "zslurm.job.preparation.node_kernels"
        self.asked.append((action, list(nodes)))
        if action == "build":
            self.archives |= {self.kinds[node] for node in nodes}
        return {node: self._one(node, action) for node in nodes}

    def _one(self, node: str, action: str) -> NodeAnswer:
        if node in self.silent:
            return NodeAnswer(node, None, "no answer within 300 s")
        kind = self.kinds[node]
        problems = self.build_problems if action == "build" else []
        return NodeAnswer(node, {"kind": kind, "ready": kind in self.archives, "problems": problems})


def put(tmp_path: Path, run: RunDir, nodes: Sequence[str]) -> KernelsPrepared:
    spec = run_spec(tmp_path, **ON_GPUS)
    return put_kernels(spec, run, "7", nodes, Interpreter.own({}))


def test_one_node_of_each_kind_builds(tmp_path: Path, run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = Nodes({"n1": "gfx942-1", "n2": "gfx942-1", "n3": "gfx950-1", "n4": "gfx942-1"}, monkeypatch)
    event = put(tmp_path, run, list(nodes.kinds))
    assert nodes.asked == [
        ("unpack", ["n1", "n2", "n3", "n4"]), ("build", ["n1", "n3"]), ("unpack", ["n2", "n4"]),
    ]  # fmt: skip
    assert (event.built, event.problems) == (["gfx942", "gfx950"], None)
    nodes.asked.clear()
    event = put(tmp_path, run, list(nodes.kinds))
    assert nodes.asked == [("unpack", ["n1", "n2", "n3", "n4"])], "the next start only unpacks"
    assert event.built is None


def test_archives_of_other_versions_go_and_those_of_other_nodes_stay(
    tmp_path: Path, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    for kind in ("gfx942-old", "gfx942-1", "gfx942-2", "gfx950-1"):
        archive(run, kind, A="a")
    Nodes({"n1": "gfx942-1", "n2": "gfx942-2"}, monkeypatch)
    put(tmp_path, run, ["n1", "n2"])
    kept = {file.name for file in run.path.glob("kernels-*.tar")}
    assert kept == {"kernels-gfx942-1.tar", "kernels-gfx942-2.tar", "kernels-gfx950-1.tar"}


def test_a_driver_that_triton_cannot_compile_is_a_problem(
    run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> bool:
        raise RuntimeError("Failed to find C compiler.")

    monkeypatch.setattr("zslurm.train.kernel_builds.load_driver", fail)
    monkeypatch.setattr("os.environ", dict(os.environ))
    assert build(run, tmp_path / "node", "gfx942-1") == ["Triton's driver: Failed to find C compiler."]
    assert not list(run.path.glob("*.tar"))


def test_what_fails_is_recorded_and_keeps_nobody_away(
    tmp_path: Path, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = Nodes({"n1": "gfx942-1", "n2": "gfx942-1"}, monkeypatch)
    nodes.silent, nodes.build_problems = {"n2"}, ["muon: no hipcc in PATH"]
    assert put(tmp_path, run, ["n1", "n2"]).problems == {
        "no answer within 300 s": "n2", "muon: no hipcc in PATH": "n1",
    }  # fmt: skip

    def refuse(*_: object, **__: object) -> None:
        raise SlurmRefused("the nodes could not be asked: no")

    monkeypatch.setattr(kernel_builds, "run_on_nodes", refuse)
    event = put(tmp_path, run, ["n1", "n2"])
    assert event.problems == {"the nodes could not be asked: no": "n[1-2]"}


@pytest.mark.parametrize(
    ("sections", "asks"),
    [
        (ON_GPUS, True),
        (ON_GPUS | {"parallel": {"device": "cpu"}}, False),
        ({"cluster": {"launcher": "slurm", "gpus_per_node": 0}}, False),
        ({"cluster": {"launcher": "local", "gpus_per_node": 8}}, False),
    ],
)
def test_which_runs_have_their_kernels_built(
    tmp_path: Path, run: RunDir, monkeypatch: pytest.MonkeyPatch, sections: dict[str, Any], asks: bool
) -> None:
    nodes = Nodes({"n1": "gfx942-1"}, monkeypatch)
    spec, recorded = run_spec(tmp_path, **sections), list[Event]()
    python = prepare(spec, run, "7", ["n1"], {"PATH": "/bin"}, recorded.append)
    assert bool(nodes.asked) == asks == any(isinstance(event, KernelsPrepared) for event in recorded)
    assert (PREPARED_VARIABLE in python.environ) == asks
    assert prepared(spec, run, "7", {"PATH": "/bin"}) == python


def test_kernels_are_built_in_containers_that_share_tmp_with_the_node(tmp_path: Path) -> None:
    for engine, builds in (("apptainer", True), ("pyxis", False)):
        container = {"image": "/a.sqsh", "engine": engine}
        spec = run_spec(tmp_path, cluster=ON_GPUS["cluster"] | {"container": container})
        assert builds_kernels(spec) == builds


def test_a_site_may_name_another_directory(tmp_path: Path, run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = run_spec(tmp_path, **ON_GPUS)
    own = Interpreter.own({PREPARED_VARIABLE: "/nvme/kernels"})
    assert with_kernels(spec, own).environ[PREPARED_VARIABLE] == "/nvme/kernels"
    Nodes({"n1": "gfx942-1"}, monkeypatch)
    assert put_kernels(spec, run, "7", ["n1"], own).path == "/nvme/kernels"


# --- Real builds, for a GPU that is not here ----------------------------------------------------------------

_BUILD = """
import json, sys
from pathlib import Path
from zslurm.job.preparation.node_kernels import build
from zslurm.run.run_dir import RunDir

run, directory = RunDir(Path(sys.argv[1])), Path(sys.argv[2])
print(json.dumps(build(run, directory, "gfx942-1")))
"""
_RANK = """
import json, os, sys
from pathlib import Path
from zslurm.kernels.prepared import use_prepared

use_prepared(os.environ)
import zslurm.kernels.triton_tools
import triton
from zslurm.kernels.arch import GFX942
from zslurm.train.config import load_train_config
from zslurm.train.kernel_builds import build_kernels

read = {}
triton.knobs.compilation.listener = lambda *, src, cache_hit, **_: read.setdefault(src.name, cache_hit)
build_kernels(load_train_config(Path(sys.argv[1]) / "config.json"), GFX942)
print(json.dumps(read))
"""


def in_process(program: str, run: RunDir, directory: Path) -> Any:
    environ = os.environ | {PREPARED_VARIABLE: str(directory)}
    arguments = [sys.executable, "-c", program, str(run.path), str(directory)]
    done = subprocess.run(arguments, env=environ, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def test_no_kernel_of_a_step_is_compiled_on_a_node_that_unpacked(run: RunDir, tmp_path: Path) -> None:
    pytest.importorskip("triton")
    phase = {"tokens": 8192, "context": 128, "global_batch": 4, "micro_batch": 2, "lr": 1e-3}
    sizes = {"vocab_size": 512, "hidden_size": 128, "expert_hidden_size": 128, "router_hidden_size": 16}
    heads = {"query_heads": 4, "kv_heads": 2, "head_dim": 32, "layers": 3, "experts": 4}
    content = {"run": {"name": "r"}, "model": sizes | heads, "data": {"path": "/data"}, "phases": [phase]}
    run.config.write_text(json.dumps(content))
    problems = in_process(_BUILD, run, tmp_path / "builder")
    assert [problem for problem in problems if not problem.startswith("muon: ")] == []  # hipRTC is not here
    assert unpack(run, tmp_path / "other", "gfx942-1")
    read = in_process(_RANK, run, tmp_path / "other")
    forward = {"_forward_rows", "_forward", "_choose", "_count", "_place", "_gather", "_variable_rows", "_combine"}
    backward = {"_backward_rows", "_mixed", "_backward", "_variable_terms", "_activate_backward"}
    assert forward | backward | {"_losses", "_choose_backward", "_weights_backward"} <= read.keys()
    assert set(read.values()) == {True}
