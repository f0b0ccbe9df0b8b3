"""A user who trains on this machine through the command line alone, in a directory and with a home of his own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import psutil

from tests import forked, programs
from tests.checkout import TESTS
from tests.run_state import state_of
from tests.train.runs import MODEL, STEP_TOKENS, clean_environment, make_corpus
from tests.waiting import wait_for
from zslurm.run.run_dir import RunDir
from zslurm.train.jsonl import read_jsonl

_MARK = "ZSLURM_TEST_DIRECTORY"

LOOK_EVERY_S = 0.2
"""Between two looks at every process of the machine, or at all files of a run: the runs want the processor too."""

PACE = TESTS / "faults" / "in_ranks"
"""For PYTHONPATH of a run: a slower pace of its steps, as a plan in ZSLURM_TEST_FAULTS has it."""

TAKES_SIGNALS = TESTS / "job" / "takes_signals"
"""For PYTHONPATH of a run: what a network plugin does to the signals of a rank."""


class LocalUser:
    """Commands and runs in one directory; everything that they start carries a mark in its environment."""

    def __init__(self, directory: Path, *, forks: bool = True) -> None:
        """Prepare the directory.

        Args:
            directory: where runs are.
            forks: fork commands, and what runs start, from a process that has their imports behind it
                (tests/forked), but for ranks with modules of a test on their PYTHONPATH.
        """
        self.directory, self._forks = directory, forks
        self.data = make_corpus(directory / "tokens.h5")
        self.environment = clean_environment() | {
            "HOME": str(directory),
            "XDG_CONFIG_HOME": str(directory / "config"),
            "XDG_STATE_HOME": str(directory / "state"),
            _MARK: str(directory),
        }
        if forks:
            modules = [*forked.OTHERS, *forked.PROGRAM_RANKS]
            self.environment = forked.environment(forked.server(), modules, self.environment)

    def write_run(
        self,
        name: str,
        *words: str,
        steps: int = 100_000,
        ranks: int = 1,
        trainer: Literal["program", "real"] = "program",
        save_every: int = 100_000,
        forks: bool | None = None,
        pace_s: float = 0.0,
        trainer_section: dict[str, Any] | None = None,
        **sections: dict[str, Any],
    ) -> Path:
        """A run file; JSON is YAML.

        Args:
            name: of the run.
            words: options and faults of the program.
            steps: it ends after so many.
            ranks: it has so many.
            trainer: zslurm's own if this is "real", else the program of tests/programs.
            save_every: steps from one checkpoint to the next; there is always one at the end.
            forks: whether ranks are forked if the user forks: not those that a test stops, or whose process it
                asks for; by default those without modules of the test on their PYTHONPATH.
            pace_s: what each step of zslurm's trainer takes longer: so a run that a test waits for does not
                compute all the time. The program has a pace anyway.
            trainer_section: changes to the section `trainer` of a program.
            sections: others of the run file, in place of what it has here.
        """
        cluster = {"name": "local"} | sections.pop("cluster", {})
        env, real = cluster.get("env", {}), trainer == "real"
        forks = self._forks and ("PYTHONPATH" not in env if forks is None else forks)
        if pace_s:
            place = self.directory / f"{name}-pace"
            place.mkdir()
            (place / "plan.json").write_text(json.dumps({"pace_s": pace_s, "faults": []}))
            env = env | {"PYTHONPATH": str(PACE), "ZSLURM_TEST_FAULTS": str(place)}
        if forks:
            modules = [*forked.OTHERS, *((*forked.RANKS, *forked.BESIDE_RANKS) if real else forked.PROGRAM_RANKS)]
            env = forked.environment(forked.server(torch=real), modules, env, customized=True)
        elif self._forks:
            env = forked.environment(forked.server(), forked.OTHERS, env)
        cluster["env"] = env
        aegis: dict[str, Any] = {"grace_s": 1, "poll_s": 0.05} | ({"recovery": "restart"} if real else {})
        body: dict[str, Any] = {
            "run": {"name": name, "seed": 3},
            "slurm": {"ranks_per_node": ranks},
            "cluster": cluster,
            "aegis": aegis | sections.pop("aegis", {}),
        }
        if real:
            phase = {"tokens": steps * STEP_TOKENS, "context": 16, "global_batch": 6, "micro_batch": 3, "lr": 3e-3}
            body |= {
                "model": MODEL,
                "data": {"path": str(self.data)},
                "phases": [phase],
                "parallel": {"dtype": "fp32", "threads": 1},
                "checkpoint": {"every_steps": save_every},
            }
        else:
            body["trainer"] = programs.trainer(steps, "--save-every", save_every, *words)
            body["trainer"] |= trainer_section or {}
        path = self.directory / f"{name}.yaml"
        path.write_text(json.dumps(body | sections, indent=1))
        return path

    def start(self, *arguments: str | Path) -> subprocess.Popen[str]:
        """A command under way."""
        return subprocess.Popen(
            self.command(*arguments),
            cwd=self.directory,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def command(self, *arguments: str | Path) -> list[str]:
        return [sys.executable, "-m", "zslurm", *map(str, arguments)]

    def zslurm(self, *arguments: str | Path, exit_code: int = 0) -> subprocess.CompletedProcess[str]:
        """A command that must end with `exit_code`, and without a traceback."""
        words = [str(argument) for argument in arguments]
        if self._forks:
            done = forked.server().run(words, env=self.environment, cwd=self.directory, timeout=300)
        else:
            process = self.start(*words)
            out, messages = process.communicate(timeout=300)
            done = subprocess.CompletedProcess(words, process.returncode, out, messages)
        assert done.returncode == exit_code, done.stderr
        assert "Traceback" not in done.stderr
        return done

    def run_dir(self, name: str) -> RunDir:
        return RunDir(self.directory / "runs" / name)

    def state(self, name: str) -> dict[str, Any]:
        """What `zslurm status NAME --json` shows; the command itself finds runs by other references."""
        if self.run_dir(name).path.is_dir():
            return state_of(self.run_dir(name))
        (state,) = json.loads(self.zslurm("status", name, "--json").stdout)
        return dict(state)

    def wait_for_end(self, name: str) -> dict[str, Any]:
        """The state in which the run came to rest; nothing of it may be left then."""
        wait_for(lambda: not self.state(name)["active"], f"{name} to end", every_s=LOOK_EVERY_S)
        wait_for(lambda: not self.processes(), f"every process of {name} to end", every_s=LOOK_EVERY_S)
        return self.state(name)

    def events(self, name: str, kind: str) -> list[dict[str, Any]]:
        return [event for event in read_jsonl(self.run_dir(name).events) if event["event"] == kind]

    def steps(self, name: str) -> list[dict[str, Any]]:
        return programs.steps_of(self.run_dir(name))

    def wait_for_step(self, name: str, step: int, attempt: int = 1) -> None:
        def reached() -> bool:
            return any(row["step"] >= step and row["attempt"] == attempt for row in self.steps(name))

        wait_for(reached, f"{name} to reach step {step} in attempt {attempt}")

    def processes(self) -> list[psutil.Process]:
        """Every live process that a command of this user started."""
        found = []
        for process in psutil.process_iter():
            try:
                mine = process.environ().get(_MARK) == str(self.directory)
                if mine and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (psutil.Error, OSError):
                continue
        return found

    def process(self, *words: str, rank: int | None = None) -> psutil.Process:
        """The one process whose command line has all these words."""
        return self._one(lambda line: all(word in line for word in words), rank)

    def _one(self, fits: Callable[[str], bool], rank: int | None) -> psutil.Process:
        """The one process whose command line fits."""
        found = []
        for process in self.processes():
            with suppress(psutil.Error):  # it ends meanwhile
                is_of_rank = rank is None or process.environ().get("RANK") == str(rank)
                if is_of_rank and fits(" ".join(process.cmdline())):
                    found.append(process)
        assert len(found) == 1, found
        return found[0]

    def rank(self, rank: int) -> psutil.Process:
        """The process that trains: of a program not the one that starts and watches it."""
        words = (programs.TOY.name, "-m zslurm.job.rank")
        return self._one(lambda line: any(word in line for word in words), rank)

    def watcher(self, rank: int) -> psutil.Process:
        """The process that starts the program of a rank and watches it."""
        return self.process("-m zslurm.job.program.rank", rank=rank)

    def supervisor(self) -> psutil.Process:
        """The process that the run's file names."""
        return self.process("submitit.core._submit")

    def close(self) -> None:
        """End whatever a failed test left behind."""
        while left := self.processes():
            for process in left:
                try:
                    process.send_signal(signal.SIGKILL)
                except psutil.NoSuchProcess:
                    continue
            psutil.wait_procs(left, timeout=1)


def in_a_terminal(
    command: list[str], environment: dict[str, str], cwd: Path
) -> tuple[subprocess.Popen[bytes], int]:
    """Start a command as the leader of a session on a terminal; returns it and the terminal's other end."""
    master, slave = os.openpty()
    process = subprocess.Popen(
        # Whoever started the tests under nohup made all their children deaf to a hang-up.
        ["env", "--default-signal=HUP", "setsid", "--ctty", *command],
        cwd=cwd, env=environment, stdin=slave, stdout=slave, stderr=slave,
    )  # fmt: skip
    os.close(slave)
    return process, master
