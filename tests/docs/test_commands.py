"""Every command in README and docs runs as it is written there.

```bash blocks run on this machine, ```bash cluster blocks on the test cluster as its ordinary user; the run file
is the ```yaml block of the README that is called run.yaml. Blocks marked ```sh are make's.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest

from tests import bench, forked
from tests.checkout import ROOT
from tests.forked import client
from tests.on_slurm.cluster.as_user import COMMAND_EVERY_S
from tests.on_slurm.cluster.slurm_cluster import SlurmCluster
from tests.on_slurm.cluster.user import configure
from tests.submit.local_runs import PACE
from tests.waiting import wait_for
from zslurm.run.run_dir import RunDir
from zslurm.run.state.run_state import look
from zslurm.train.data.build.inspect import unigram_entropy
from zslurm.train.data.bundle import Corpus
from zslurm.train.jsonl import read_jsonl

SMALL = "model: {layers: 2, hidden_size: 64, head_dim: 16, expert_hidden_size: 64}\n"
"""For the run file: what it trains is not what the documents are about."""

BASE = [ROOT / "README.md", ROOT / "docs" / "start-laptop.md"]
"""Whose commands run first: the others continue from what they leave."""

DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
LINKING = [*DOCUMENTS, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted(ROOT.glob("*/README.md"))]
_BLOCK = re.compile(r"^```(?P<kind>[^\n]+)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\((?!https?:)([^)#]+)")


@dataclass(frozen=True)
class Block:
    """A fenced block of a document."""

    document: str
    kind: str
    text: str


def blocks(kind: str, document: Path) -> list[Block]:
    found = _BLOCK.finditer(document.read_text())
    return [Block(document.name, m["kind"].strip(), m["text"]) for m in found if m["kind"].strip() == kind]


def with_blocks(kind: str) -> list[Path]:
    return [document for document in DOCUMENTS if blocks(kind, document)]


def run_file() -> str:
    (text,) = [b.text for b in blocks("yaml", ROOT / "README.md") if b.text.startswith("# run.yaml")]
    return text


def prepare(directory: Path, *, tokens: int | None = None) -> Path:
    """The directory that the documents assume: some texts and run.yaml, with as many tokens as are given here."""
    texts = directory / "texts"
    texts.mkdir()
    for name in ("argparse", "typing", "subprocess", "inspect", "logging/__init__", "unittest/mock"):
        source = Path(os.__file__).parent / f"{name}.py"
        shutil.copy(source, texts / f"{name.replace('/', '-')}.txt")
    text = run_file()
    if tokens is not None:
        text, found = re.subn(r"(?<=tokens: )\d+", str(tokens), text)
        assert found == 1
    (directory / "run.yaml").write_text(text)
    return directory


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory, programs: dict[str, str]) -> Path:
    """A directory in which the commands of BASE were run: few steps of a small model; later runs have one rank."""
    directory = prepare(tmp_path_factory.mktemp("docs"), tokens=12 * 1024)
    with (directory / "run.yaml").open("a") as file:
        file.write(SMALL)
    for document in BASE:
        for block in blocks("bash", document):
            run_locally(block, directory, programs)
    run = directory / "run.yaml"
    run.write_text(run.read_text().replace("ranks_per_node: 2", "ranks_per_node: 1"))
    return directory


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory, programs: dict[str, str]) -> Path:
    """The data that the README's first command builds."""
    directory = prepare(tmp_path_factory.mktemp("docs-data"))
    first = blocks("bash", ROOT / "README.md")[0]
    run_locally(replace(first, text=first.text.splitlines()[0]), directory, programs)
    return directory / "data"


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Variables with which `zslurm`, and the ranks that it starts, have imported all they need already."""
    directory, server = tmp_path_factory.mktemp("bin"), forked.server(torch=True)
    asking = shlex.join([sys.executable, "-I", "-S", client.__file__, str(server.path)])
    (directory / "zslurm").write_text(f'#!/bin/sh\nexec {asking} "$@"\n')
    (directory / "zslurm").chmod(0o755)
    path = f"{directory}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    return forked.environment(server, [*forked.RANKS, *forked.OTHERS], {"PATH": path})


def run_locally(block: Block, directory: Path, programs: dict[str, str]) -> None:
    environment = os.environ | {
        **programs,
        "XDG_STATE_HOME": str(directory / "state"),
        "XDG_CONFIG_HOME": str(directory / "config"),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block.text],
        cwd=directory, env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{block.document}:\n{block.text}\n{done.stdout}\n{done.stderr}"


def test_the_readmes_local_run_completes(local: Path) -> None:
    assert (local / "runs" / "first" / "metrics.jsonl").exists()
    assert list((local / "runs" / "first" / "checkpoints").glob("step-*"))


@pytest.mark.soak
def test_the_readmes_run_learns_more_than_frequencies(data: Path, programs: dict[str, str]) -> None:
    command = "zslurm submit run.yaml --cluster local --wait --set run.name=learns"
    command += " --set phases.0.tokens=60000"  # half of README's, which is enough to see it
    run_locally(Block("README.md", "bash", command), data.parent, programs)
    rows = list(read_jsonl(data.parent / "runs" / "learns" / "metrics.jsonl"))
    losses = [row["loss"] for row in rows if row["kind"] == "step"]
    assert statistics.mean(losses[-10:]) < unigram_entropy(Corpus.open(data)) - 0.5


@pytest.mark.parametrize("document", [d for d in with_blocks("bash") if d not in BASE], ids=lambda path: path.name)
def test_local_commands_of(document: Path, local: Path, programs: dict[str, str]) -> None:
    for block in blocks("bash", document):
        run_locally(block, local, programs)


@pytest.mark.parametrize("document", with_blocks("python"), ids=lambda path: path.name)
def test_python_of(document: Path, local: Path) -> None:
    for block in blocks("python", document):
        done = subprocess.run(
            [sys.executable, "-c", block.text], cwd=local, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip()


@pytest.fixture
def cluster_directory(slurm_cluster: SlurmCluster, data: Path) -> Iterator[Path]:
    """The same directory for the ordinary user, with a profile of the cluster; its jobs end with the test."""
    directory = prepare(slurm_cluster.user_dir("docs-test"))
    shutil.copytree(data, directory / "data")
    slurm_cluster.run(["chmod", "-R", "u+rwX", directory], check=False)
    # A pace at which ranks are not done with the README's few steps before the next command comes.
    slurm_cluster.run(["mkdir", directory / "pace"])
    (directory / "pace" / "plan.json").write_text(json.dumps({"pace_s": 0.5, "faults": []}))
    pace = slurm_cluster.installation().sources / PACE.relative_to(ROOT)
    env = {"PYTHONPATH": str(pace), "ZSLURM_TEST_FAULTS": str(directory / "pace")}
    env = slurm_cluster.forking([*forked.RANKS, *forked.OTHERS], env, torch=True, customized=True)
    with (directory / "run.yaml").open("a") as file:
        file.write(f"{SMALL}cluster:\n  env: {json.dumps(env)}\n")
    configure(slurm_cluster)
    yield directory
    slurm_cluster.restore()  # and wait: a job that still ends would write into the next test's directory
    shutil.rmtree(directory, ignore_errors=True)
    shutil.rmtree(slurm_cluster.instance.user / "home" / ".config" / "zslurm" / "templates", ignore_errors=True)


@pytest.mark.slurm
@pytest.mark.parametrize("document", with_blocks("bash cluster"), ids=lambda path: path.name)
def test_cluster_commands_of(document: Path, slurm_cluster: SlurmCluster, cluster_directory: Path) -> None:
    """Line by line; requeue and exec wait for the job to run, as a person would."""
    installed = slurm_cluster.installation()
    script = installed.sources / Path(client.__file__).relative_to(ROOT)
    asking = [str(installed.python), "-I", "-S", str(script), str(slurm_cluster.commands().path)]
    zslurm = f'zslurm() {{ {shlex.join(asking)} "$@"; }}'
    shortly = installed.sources / bench.IN_RANKS.relative_to(ROOT)
    forks = slurm_cluster.forking(
        [*forked.RANKS, *forked.OTHERS], {"PYTHONPATH": str(shortly)}, torch=True, customized=True
    )
    for block in blocks("bash cluster", document):
        for chunk in re.split(r"^(?=zslurm (?:requeue|exec))", block.text, flags=re.MULTILINE):
            if chunk.startswith(("zslurm requeue", "zslurm exec")):
                run = RunDir(cluster_directory / "runs" / chunk.split()[2])
                wait_for(partial(_is_running, slurm_cluster, run), "the run to start", every_s=COMMAND_EVERY_S)
            slurm_cluster.run(
                ["bash", "-euo", "pipefail", "-c", f"{zslurm}\n{chunk}"], env=forks, cwd=cluster_directory
            )


def _is_running(cluster: SlurmCluster, run: RunDir) -> bool:
    with patch.dict(os.environ, {"SLURM_CONF": str(cluster.slurm_conf)}):
        return look(run).state == "running"


@pytest.mark.parametrize("document", LINKING, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_of_lead_somewhere(document: Path) -> None:
    for target in _LINK.findall(document.read_text()):
        assert (document.parent / target).exists(), f"{document} links to {target}"
