"""`zslurm init` on a cluster with nodes of two kinds: one node of each is asked, and what stays open is said."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from threading import Barrier, main_thread

import pytest
from typer.testing import CliRunner

from tests.cluster.recorded_config import FULL_CONFIG
from tests.fake_sysfs import mi300x_pollara
from zslurm.cli.main import app
from zslurm.cluster import detect as module
from zslurm.cluster import probe as probing
from zslurm.cluster.detect import detect
from zslurm.cluster.probe import Probe, probe_of
from zslurm.core.errors import SlurmRefused
from zslurm.hardware.facts import NodeFacts, read_facts
from zslurm.slurm.inventory import Node, SlurmPartition, parse_config
from zslurm.slurm.topology import SlurmTopology

LARGE = ("n0", "n1", "n2")
SMALL = ("old0", "old1")


def node(name: str, gpus: int, gpu_type: str, cpus: int) -> Node:
    return Node(name, "idle", frozenset(), gpus, gpu_type, cpus, 1000, ("batch",), "")


class Client:
    """A Slurm with five nodes of two kinds in one partition."""

    def available(self) -> bool:
        return True

    def can_test(self) -> bool:
        return False

    def scontrol_config(self) -> dict[str, str]:
        return parse_config(FULL_CONFIG)

    def partitions(self) -> list[SlurmPartition]:
        return [SlurmPartition("batch", "n[0-2],old[0-1]", 5, True, True, None, None, None)]

    def nodes_if_shown(self) -> list[Node]:
        return [
            *(node(name, 8, "mi300x", 96) for name in LARGE),
            *(node(name, 4, "mi250x", 64) for name in SMALL),
        ]

    def topology(self, name: str) -> SlurmTopology:
        return SlurmTopology()


Answers = Callable[[Sequence[str]], Probe]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[list[str]]:
    """The options of each job; nodes of the first kind are MI300X with Pollara, of the second one MI250X."""
    mi300x_pollara(tmp_path / "node")
    facts = read_facts(tmp_path / "node")
    jobs: list[list[str]] = []

    def probe(options: Sequence[str], timeout_s: float, waiting: object) -> Probe:
        jobs.append(list(options))
        if "--exclude=n[0-2]" in options:
            gpus = tuple(replace(gpu, model="AMD Instinct MI250X") for gpu in facts.gpus[:4])
            return probe_of(NodeFacts(node="old0", gpus=gpus))
        return probe_of(facts)

    monkeypatch.setattr(module, "SlurmClient", Client)
    monkeypatch.setattr(probing, "probe", probe)
    return jobs


def test_one_node_of_each_kind_is_asked(asked: list[list[str]], site: Path) -> None:
    found = detect(name="lab", probe_timeout_s=5.0)
    assert sorted(asked, key=str) == [
        ["--partition=batch", "--time=5", "--exclude=n[0-2]", "--gpus-per-node=mi250x:4"],
        ["--partition=batch", "--time=5", "--exclude=old[0-1]", "--gpus-per-node=mi300x:8"],
    ]
    (other,) = found.others
    assert other == (
        "old[0-1]: 4 GPUs (mi250x), 64 CPUs; Probed old0: 4 x AMD Instinct MI250X. Network: not known."
    )
    assert f"# Nodes of another kind, which this profile does not describe: {other}" in found.text.splitlines()
    assert "  gpus_per_node: 8" in found.text.splitlines()


def test_a_kind_that_does_not_answer_is_named_and_stops_nothing(
    asked: list[list[str]], site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = probing.probe

    def probe(options: Sequence[str], timeout_s: float, waiting: Callable[[str], None]) -> Probe:
        if "--exclude=n[0-2]" in options:
            raise SlurmRefused("no node\nwas free")
        return answers(options, timeout_s, waiting)

    monkeypatch.setattr(probing, "probe", probe)
    found = detect(name="lab", probe_timeout_s=5.0)
    assert found.others == ("old[0-1]: 4 GPUs (mi250x), 64 CPUs; not asked: no node was free",)
    assert "  extends: mi300x-pollara" in found.text.splitlines()


def test_init_says_what_no_node_could_show(
    asked: list[list[str]], site: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    bare = probe_of(NodeFacts(node="n0", gpus=read_facts(tmp_path / "node").gpus))
    monkeypatch.setattr(probing, "probe", lambda *_: bare)
    shown = CliRunner().invoke(app, ["init", "--yes", "--name", "lab"]).stderr
    assert "note: nodes of another kind, for a profile of their own: old[0-1]: 4 GPUs (mi250x)" in shown
    assert "note: the node does not show cluster.network, cluster.nics, " in shown
    assert "cluster.rocm_version; enter them with `zslurm cluster edit`" in shown
    asked.clear()
    shown = CliRunner().invoke(app, ["init", "--yes", "--name", "lab", "--no-probe"]).stderr
    assert asked == [] and "old[0-1]: 4 GPUs (mi250x), 64 CPUs\n" in shown


def test_a_kind_whose_nodes_are_all_down_is_not_asked(
    asked: list[list[str]], site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = Client().nodes_if_shown()
    down = [replace(member, state="down") if member.name in SMALL else member for member in nodes]
    monkeypatch.setattr(Client, "nodes_if_shown", lambda self: down)
    found = detect(name="lab", probe_timeout_s=5.0)
    assert len(asked) == 1 and "  extends: mi300x-pollara" in found.text.splitlines()
    assert found.others == ("old[0-1]: 4 GPUs (mi250x), 64 CPUs; not asked: none of old[0-1] is up",)


def test_ctrl_c_ends_the_jobs_that_wait_for_nodes(
    asked: list[list[str]], site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    barrier = Barrier(2)
    ended: list[str] = []

    def probe(options: Sequence[str], timeout_s: float, waiting: Callable[[str], None]) -> Probe:
        barrier.wait()
        if options[2] == "--exclude=n[0-2]":
            time.sleep(0.3)  # until the main thread waits
            signal.pthread_kill(main_thread().ident or 0, signal.SIGINT)  # as Ctrl-C
        try:
            while True:
                waiting("7")
                time.sleep(0.01)
        except KeyboardInterrupt:  # upon which the real one ends its srun
            ended.append(options[2])
            raise

    monkeypatch.setattr(probing, "probe", probe)
    with pytest.raises(KeyboardInterrupt):
        detect(name="lab", probe_timeout_s=5.0)
    assert sorted(ended) == ["--exclude=n[0-2]", "--exclude=old[0-1]"]
