"""The ordinary user of a test cluster at work: runs in a directory, through the command line alone."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import psutil

from tests import forked, programs
from tests.checkout import ROOT
from tests.on_slurm.cluster.as_user import COMMAND_EVERY_S
from tests.on_slurm.cluster.slurm_cluster import SlurmCluster
from tests.run_state import state_of
from tests.train.runs import MODEL, STEP_TOKENS, make_corpus
from tests.waiting import DEADLINE_S, wait_for
from zslurm.run.run_dir import RunDir
from zslurm.slurm.hostlist import expand
from zslurm.train.jsonl import JsonLinesTail, read_jsonl

STEPS = 12
"""Steps of a run that is to complete."""

_LONGEST_PAUSE_S = 1.5
"""Between two looks at the state of a run in whose files nothing happens."""

ENDLESS = 100_000
"""Steps of a run that a test stops: no machine is so fast, and no test so slow, that it ends by itself."""


class User:
    """The ordinary user at work in a directory."""

    def __init__(self, cluster: SlurmCluster, directory: Path, *, forks: bool = True) -> None:
        """Prepare the directory.

        Args:
            cluster: whose ordinary user it is.
            directory: where runs are.
            forks: fork what a run starts from a process that has its imports behind it (tests/forked), but for
                ranks with modules of a test on their PYTHONPATH.
        """
        self.cluster, self.directory, self.forks = cluster, directory, forks
        make_corpus(directory / "tokens.h5")

    def write_run(
        self,
        name: str,
        *words: str,
        steps: int = STEPS,
        nodes: int = 2,
        ranks_per_node: int = 1,
        trainer: Literal["program", "real"] = "program",
        trainer_section: dict[str, Any] | None = None,
        forked_ranks: bool | None = None,
        **sections: Any,
    ) -> Path:
        """A run file; JSON is YAML.

        Args:
            name: of the run.
            words: options and faults of the program.
            steps: it ends after so many.
            nodes: of the run.
            ranks_per_node: of the run.
            trainer: zslurm's own if this is "real", else the program of tests/programs.
            trainer_section: changes to the section `trainer` of a program.
            forked_ranks: whether ranks are forked, by default unless modules of a test are on their PYTHONPATH.
                Forked ranks and their programs do not belong to the Slurm step: Slurm sends programs no signal.
            sections: others of the run file, in place of what it has here.
        """
        real = trainer == "real"
        cluster = dict(sections.get("cluster", {}))
        env = cluster.get("env", {})
        modules = list(forked.OTHERS)
        if forked_ranks is None:
            forked_ranks = "PYTHONPATH" not in env
        if forked_ranks:
            modules += (*forked.RANKS, *forked.BESIDE_RANKS) if real else forked.PROGRAM_RANKS
        if self.forks:
            env = self.cluster.forking(modules, env, torch=forked_ranks and real, customized=forked_ranks)
        sections["cluster"] = cluster | {"env": env}
        config: dict[str, Any] = {
            "run": {"name": name, "seed": 3},
            "slurm": {"nodes": nodes, "ranks_per_node": ranks_per_node, "time": "10:00"}
            | sections.pop("slurm", {}),
        }
        aegis = sections.pop("aegis", {"grace_s": 3})
        if real:
            config |= {
                "model": MODEL,
                "data": {"path": "tokens.h5"},
                "phases": [
                    {
                        "tokens": steps * STEP_TOKENS,
                        "context": 16,
                        "global_batch": 6,
                        "micro_batch": 1,
                        "lr": 3e-3,
                        "warmup_steps": 2,
                    }
                ],
                "parallel": {"dtype": "fp32", "threads": 1},
                "checkpoint": {"every_steps": 4},
                "aegis": {"recovery": "restart"} | aegis,
            }
        else:
            section = programs.trainer(steps, "--save-every", 4, *words, **self.places())
            if forked_ranks:
                section["stop_signal"] = "INT"  # of Slurm's SIGTERM the rank believes that its program got it too
            config |= {"trainer": section | (trainer_section or {}), "aegis": aegis}
        path = self.directory / f"{name}.yaml"
        path.write_text(json.dumps(config | sections, indent=1))
        return path

    def places(self) -> dict[str, Path]:
        """Where the nodes have Python and the program of tests/programs."""
        installation = self.cluster.installation()
        return {"python": installation.python, "program": installation.sources / programs.TOY.relative_to(ROOT)}

    def zslurm(self, *arguments: str | Path, check: bool = True, torch: bool = False) -> str:
        return self.cluster.zslurm(*arguments, cwd=self.directory, check=check, torch=torch).stdout.strip()

    def fails(self, *arguments: str | Path, torch: bool = False) -> tuple[int, str]:
        """Exit code and messages of a command that must not succeed."""
        done = self.cluster.zslurm(*arguments, cwd=self.directory, check=False, torch=torch)
        assert done.returncode != 0
        assert "Traceback" not in done.stderr
        return done.returncode, done.stderr

    def state(self, run: str) -> dict[str, Any]:
        """What `zslurm status RUN --json` shows, of a name or a path of a run; the command knows job ids too."""
        found = RunDir(self.directory / "runs" / run)
        if not found.path.is_dir():
            (state,) = json.loads(self.zslurm("status", run, "--json"))
            return dict(state)
        with patch.dict(os.environ, {"SLURM_CONF": str(self.cluster.slurm_conf)}):
            return state_of(found)

    def wait_for_state(self, run: str, *wanted: str, deadline_s: float = DEADLINE_S) -> dict[str, Any]:
        """The state, once it is one of these.

        Each look costs a command of Slurm: if nothing happens in the run's files there are ever fewer of them.
        """
        found = RunDir(self.directory / "runs" / run)
        seen: list[int] = []
        look_at, pause_s = 0.0, COMMAND_EVERY_S

        def there() -> dict[str, Any] | None:
            nonlocal seen, look_at, pause_s
            sizes, now = [_size(path) for path in (found.events, found.submissions)], time.monotonic()
            if sizes == seen and now < look_at:
                return None
            pause_s = min(1.5 * pause_s, _LONGEST_PAUSE_S) if sizes == seen else COMMAND_EVERY_S
            state = self.state(run)
            seen, look_at = sizes, time.monotonic() + pause_s
            return state if state["state"] in wanted else None

        return wait_for(there, f"{run} to be {' or '.join(wanted)}", deadline_s=deadline_s)

    def nodes_of(self, run: str) -> list[str]:
        """The nodes that Slurm gave the run: which of those that are free is Slurm's affair."""
        return expand(self.state(run)["nodes"])

    def steps(self, run: str) -> list[dict[str, Any]]:
        return programs.steps_of(RunDir(self.directory / "runs" / run))

    def stopped_at(self, run: str, attempt: int = 1) -> int:
        """The last step of an attempt; the next one may be on its way already."""
        return int(max(row["step"] for row in self.steps(run) if row["attempt"] == attempt))

    def wait_for_step(self, run: str, step: int) -> None:
        found = RunDir(self.directory / "runs" / run)
        tails = [JsonLinesTail(path) for path in (found.metrics, programs.notes(found))]

        def reached() -> bool:
            rows = [row for tail in tails for row in tail.new_records()]
            return any(row["kind"] == "step" and row["step"] >= step for row in rows)

        wait_for(reached, f"{run} to reach step {step}")

    def events(self, run: str) -> list[dict[str, Any]]:
        return list(read_jsonl(self.directory / "runs" / run / "events.jsonl"))

    def events_of_people(self, run: str) -> list[dict[str, Any]]:
        return list(read_jsonl(self.directory / "runs" / run / "submissions.jsonl"))


def _size(path: Path) -> int:
    """The size of a file; -1 if there is none."""
    try:
        return path.stat().st_size
    except OSError:
        return -1


@contextmanager
def directory_of(cluster: SlurmCluster, name: str) -> Iterator[Path]:
    """A fresh directory of the ordinary user. In the end, whatever happened, it is gone and the cluster as before.

    What a test that was killed half-way left behind is no reason for the next one to fail.
    """
    shutil.rmtree(cluster.instance.user / name, ignore_errors=True)
    directory = cluster.user_dir(name)
    try:
        yield directory
    finally:
        try:
            cluster.restore()
        finally:
            shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def at_work(cluster: SlurmCluster, name: str, *, forks: bool = True) -> Iterator[User]:
    """The user in such a directory, with a profile that `zslurm init` wrote; `forks` as `User` has it."""
    with directory_of(cluster, name) as directory:
        configure(cluster)
        yield User(cluster, directory, forks=forks)


def configure(cluster: SlurmCluster) -> None:
    """Leave the user with the configuration that `zslurm init` writes, which is asked once for each cluster."""
    config = cluster.instance.user / "home" / ".config" / "zslurm"
    written = cluster.instance.directory / "written-by-init"
    shutil.rmtree(config, ignore_errors=True)
    if written.is_dir():
        cluster.run(["cp", "-r", written, config])
    else:
        cluster.zslurm("init", "--yes")
        shutil.copytree(config, written)


def add_to_profile(cluster: SlurmCluster, text: str) -> None:
    """Put these lines of YAML into the section `cluster` of the user's profile, which `configure` has written."""
    (profile,) = (cluster.instance.user / "home" / ".config" / "zslurm" / "clusters").glob("*.yaml")
    profile.write_text(profile.read_text().replace("slurm:\n", f"{text}slurm:\n"))


def rank_process(user: User, run: str, rank: int) -> psutil.Process:
    """Return the program of a rank, by its command line and its own variables."""
    for process in psutil.process_iter(["cmdline"]):
        if any(word.endswith(programs.TOY.name) for word in process.info["cmdline"] or []):
            try:
                here = process.environ()
            except psutil.Error:
                continue
            if (here["RANK"], here["ZSLURM_RUN_DIR"]) == (str(rank), str(user.directory / "runs" / run)):
                return process
    raise AssertionError(f"no process of rank {rank}")
