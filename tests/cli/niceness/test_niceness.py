"""Every heavy command gives way to others on a login node, in all its threads and processes, and in a job not."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests import forked
from tests.cli.commands import Shell
from tests.cli.niceness import niceness_driver
from tests.cli.trained import TEXT, trained_run
from tests.train.runs import clean_environment
from tests.waiting import DEADLINE_S
from zslurm.core.errors import Exit

# In an order in which each finds what it needs.
HEAVY = {
    "data build": "data build texts --out corpus --vocab-size 512 --workers 2",
    "data verify": "data verify corpus --workers 2",
    "verify": "checkpoint verify runs/first --workers 2",
    "diff": "checkpoint diff runs/first/checkpoints/step-00000040 runs/first/checkpoints/step-00000040",
    "show --tensor": "checkpoint show runs/first --tensor embedding.weight",
    "reshape": "checkpoint reshape runs/first reshaped --dp 3 --workers 2",
    "export hf": "checkpoint export runs/first hf --to hf",
    "import hf": "checkpoint import hf imported",
    "export dcp": "checkpoint export runs/first dcp --to dcp",
    "import dcp": "checkpoint import dcp from-dcp",
    "generate": "generate runs/first --prompt The --max-tokens 3",
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a finished run, and text to build from."""
    directory = tmp_path_factory.mktemp("niceness")
    trained_run(directory)
    (directory / "texts" / "more.txt").write_text(TEXT * 2000)
    return directory


def niceness_of(command: str, place: Path, out: Path, **variables: str) -> set[int]:
    """The niceness of every thread and process of a command while it ran."""
    done = forked.server(torch=True).run(
        [str(out), *command.split()], module=niceness_driver.__name__,
        env=clean_environment() | variables, cwd=place, timeout=DEADLINE_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return set(json.loads(out.read_text()).values())


def test_every_heavy_command_has_the_niceness_that_is_asked_for(place: Path, tmp_path: Path) -> None:
    here = os.getpriority(os.PRIO_PROCESS, 0)
    found = {
        name: niceness_of(command, place, tmp_path / "seen", ZSLURM_NICE="3") for name, command in HEAVY.items()
    }
    assert found == {name: {max(here, 3)} for name in HEAVY}


@pytest.mark.parametrize(("variables", "niceness"), [({"ZSLURM_NICE": ""}, 10), ({"SLURM_JOB_ID": "7"}, 0)])
def test_by_default_it_is_ten_and_in_a_job_none(
    place: Path, tmp_path: Path, variables: dict[str, str], niceness: int
) -> None:
    here = os.getpriority(os.PRIO_PROCESS, 0)
    environment = {"ZSLURM_NICE": "10"} | variables
    for name in ("verify", "diff"):
        assert niceness_of(HEAVY[name], place, tmp_path / "seen", **environment) == {max(here, niceness)}
    build = HEAVY["data build"].replace("corpus", f"corpus-{niceness}")
    assert niceness_of(build, place, tmp_path / "seen", **environment) == {max(here, niceness)}


@pytest.mark.parametrize("wanted", ["-3", "20", "x", "²"])
def test_what_is_no_niceness_is_refused(shell: Shell, monkeypatch: pytest.MonkeyPatch, wanted: str) -> None:
    monkeypatch.setenv("ZSLURM_NICE", wanted)
    code, line = shell.fails("data", "verify", "tokens.h5")
    assert code == Exit.USAGE
    assert line == f"zslurm: ZSLURM_NICE={wanted}: expected a niceness from 0 to 19"
