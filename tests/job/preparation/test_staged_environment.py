"""A node unpacks the environment once, whoever comes first, and leaves nothing behind."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from zslurm.core.errors import SlurmRefused, ZslurmError
from zslurm.job.preparation import staged_environment as stage_env
from zslurm.job.preparation.staged_environment import environment_archive, remove, stage, unpack
from zslurm.run.run_dir import RunDir
from zslurm.slurm.client import SlurmClient
from zslurm.slurm.on_nodes.run_on_nodes import NodeAnswer, read_answers


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small virtual environment in place of this Python's own."""
    packages = tmp_path / "venv" / "lib" / "python3.11" / "site-packages"
    (packages / "one").mkdir(parents=True)
    (packages / "one" / "__init__.py").write_text("x = 1\n")
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "venv"))
    return packages


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    (tmp_path / "run").mkdir()
    return RunDir(tmp_path / "run")


def test_the_archive_is_made_once_and_again_when_packages_change(environment: Path, run: RunDir) -> None:
    first = environment_archive(run)
    made = first.stat().st_mtime_ns
    assert environment_archive(run) == first
    assert first.stat().st_mtime_ns == made
    (environment / "two").mkdir()
    second = environment_archive(run)
    assert second != first
    assert [path.name for path in run.path.iterdir()] == [second.name], "the old one went, and no part stayed"


def test_an_environment_that_cannot_be_packed_leaves_no_archive(
    environment: Path, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "prefix", "/nonesuch/venv")
    with pytest.raises(ZslurmError, match="cannot pack /nonesuch/venv"):
        environment_archive(run)
    assert list(run.path.iterdir()) == []


def test_many_unpack_once_and_find_the_same(environment: Path, run: RunDir, tmp_path: Path) -> None:
    archive = environment_archive(run)
    target = tmp_path / "node" / "zslurm-env-0-7"
    target.parent.mkdir()
    archive.rename(f"{target}.tar")
    command = [sys.executable, "-m", "zslurm.job.preparation.staged_environment", "unpack", str(target), "mark"]
    racers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=dict(os.environ)) for _ in range(4)]
    said = [racer.communicate()[0] for racer in racers]
    assert [
        answer.value
        for text in said
        for answer in read_answers((0.0, line) for line in text.splitlines()).values()
    ] == [""] * 4
    assert (
        target / "venv" / "lib" / "python3.11" / "site-packages" / "one" / "__init__.py"
    ).read_text() == "x = 1\n"
    assert target.stat().st_mode & 0o777 == 0o700
    remove(target)
    assert list(target.parent.iterdir()) == []


def test_a_damaged_archive_is_said_and_tried_again_next_time(tmp_path: Path) -> None:
    target = tmp_path / "env"
    Path(f"{target}.tar").write_text("no archive")
    with pytest.raises(subprocess.CalledProcessError) as caught:
        unpack(target, "mark")
    assert "tar" in caught.value.stderr
    assert not (target / ".mark").exists()


@pytest.fixture
def nodes_say(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, str]], None]:
    """Slurm could not send to node5; the nodes that are asked say this."""

    def broadcast(self: SlurmClient, job_id: str, source: str, target: str) -> None:
        raise SlurmRefused("sbcast: REQUEST_FILE_BCAST(node5): Communication connection failure")

    monkeypatch.setattr(SlurmClient, "broadcast", broadcast)

    def say(words: dict[str, str]) -> None:
        def run_on_nodes(*_: str, nodes: Sequence[str], **_options: object) -> dict[str, NodeAnswer]:
            return {node: NodeAnswer(node, words[node]) for node in nodes}

        monkeypatch.setattr(stage_env, "run_on_nodes", run_on_nodes)

    return say


def test_a_node_that_is_not_used_keeps_no_other_from_its_copy(
    environment: Path, run: RunDir, nodes_say: Callable[[dict[str, str]], None]
) -> None:
    nodes_say({"node0": "", "node1": ""})
    assert stage("/local", run, "7", ["node0", "node1"], {}).endswith("-7/venv")


def test_a_copy_that_a_node_did_not_get_is_said_in_slurms_words(
    environment: Path, run: RunDir, nodes_say: Callable[[dict[str, str]], None]
) -> None:
    nodes_say({"node0": "", "node5": "tar: cannot open"})
    with pytest.raises(ZslurmError, match=r"cannot copy the Python environment.*BCAST\(node5\)"):
        stage("/local", run, "7", ["node0", "node5"], {})
