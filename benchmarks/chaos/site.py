"""A Slurm cluster: how a job is submitted, and who injects faults that a program cannot inject into itself."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .plans import SITE

_JOB = re.compile("chaos(-trial-.*)?")
"""The names of the jobs of trials: no other job of the user is ever cancelled."""


class BadSite(Exception):
    """The description of a site cannot be used."""


@dataclass
class Site:
    """The cluster of the person who runs this.

    Attributes:
        directory: which all nodes share; every trial gets a directory in it.
        python: that has torch and the contenders.
        sbatch: options of every job, such as the partition and the account.
        inject: for a fault that needs the site's help, the command that injects it; `{node}` and `{job}` are
            replaced. A fault without one is listed as not tried.
        mend: for such a fault, the command that undoes it.
        environment: variables of every job.
    """

    directory: Path
    python: str = sys.executable
    sbatch: Sequence[str] = ()
    inject: Mapping[str, str] = field(default_factory=dict)
    mend: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> Site:
        """Read the description of a site.

        Raises:
            BadSite: it cannot be read, or has something else than the attributes above.
        """
        try:
            content: dict[str, Any] = json.loads(path.read_text())
            if not isinstance(content, dict):
                raise BadSite(f"{path}: expected an object with `directory`, as in the README")
            site = cls(**content | {"directory": Path(content["directory"])})
        except KeyError as error:
            raise BadSite(f"{path}: no {error}: name a directory that all nodes share") from error
        except (OSError, ValueError, TypeError) as error:
            raise BadSite(f"{path}: {str(error).removeprefix('Site.__init__() ')}") from error
        lists = {"sbatch": list, "inject": dict, "mend": dict, "environment": dict, "python": str}
        for name, kind in lists.items():
            if name in content and not isinstance(content[name], kind):
                raise BadSite(f"{path}: {name} is not as in the README")
        if short := [option for option in site.sbatch if not option.startswith("--")]:
            raise BadSite(f"{path}: sbatch: {short[0]}: write it as --NAME=VALUE")
        if unknown := {*site.inject, *site.mend} - {*SITE}:
            raise BadSite(f"{path}: no fault is called {', '.join(sorted(unknown))}; there are {', '.join(SITE)}")
        return site

    def why_not(self, fault: str) -> str | None:
        """Return why a fault cannot be injected here; None if it can."""
        if fault not in SITE or fault in self.inject or fault in ("time_limit", "preemption"):
            return None
        return f"`inject.{fault}` of the site is not set"

    def options(self) -> dict[str, str | bool]:
        """Return the options of sbatch by name, without dashes; true stands for one without a value."""
        pairs = [option.removeprefix("--").partition("=") for option in self.sbatch]
        return {name: value if sign else True for name, sign, value in pairs}

    def run(
        self, argv: Sequence[str], *, cwd: Path | None = None, env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a command as the person who submits jobs; the exit code is 127 if there is no such program."""
        environment = {**os.environ, **self.environment, **(env or {})}
        try:
            return subprocess.run(argv, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
        except FileNotFoundError as error:
            return subprocess.CompletedProcess(argv, 127, "", str(error))

    def prepare(self, directory: Path) -> None:
        """Make the directory of a trial."""
        directory.mkdir(parents=True)

    def strike(self, fault: str, node: str, job: str) -> None:
        """Inject a fault.

        Raises:
            RuntimeError: the site's command failed.
        """
        match fault:
            case "time_limit" if fault not in self.inject:
                pass  # jobs of the plan have a short one
            case "preemption" if fault not in self.inject:
                self._do(["scontrol", "requeue", job])
            case _:
                self._do(_command(self.inject[fault], node, job))

    def undo(self, fault: str, node: str) -> None:
        """Undo a fault, if the site has a command for that.

        Raises:
            RuntimeError: the site's command failed.
        """
        if command := self.mend.get(fault):
            self._do(_command(command, node))

    def jobs(self) -> dict[str, str]:
        """Return the state of every job of a trial.

        Raises:
            RuntimeError: Slurm does not answer.
        """
        done = self.run(["squeue", "--me", "--noheader", "--format=%A %T %j"])
        if done.returncode:
            raise RuntimeError(done.stderr.strip())
        rows = [line.split(maxsplit=2) for line in done.stdout.splitlines()]
        return {row[0]: row[1] for row in rows if len(row) == 3 and _JOB.fullmatch(row[2])}

    def clear(self, deadline_s: float = 120.0) -> None:
        """Cancel every job that trials have submitted, and wait until none is left.

        Raises:
            RuntimeError: a job is left at the deadline.
        """
        end = time.monotonic() + deadline_s
        while time.monotonic() < end:
            try:
                jobs = self.jobs()
            except RuntimeError:
                time.sleep(1.0)
                continue
            if not jobs:
                return
            self.run(["scancel", *jobs])
            time.sleep(1.0)
        raise RuntimeError("jobs of the last trial are still in the queue: `scancel` did not end them")

    def _do(self, argv: Sequence[str]) -> None:
        done = self.run(argv)
        if done.returncode:
            raise RuntimeError(f"{shlex.join(argv)}: {done.stderr.strip() or f'exit code {done.returncode}'}")


def _command(text: str, node: str, job: str = "") -> list[str]:
    """Return a command of the site for a node and a job; braces that name neither stay."""
    return [word.replace("{node}", node).replace("{job}", job) for word in shlex.split(text)]
