"""Commands of the ordinary user of a test cluster, in an environment where nothing of pytest's own leaks in."""

from __future__ import annotations

import pwd
import shlex
import shutil
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import ClassVar

from tests import forked
from tests.checkout import ROOT
from tests.command_server import CommandServer
from tests.on_slurm.cluster import installation, processes
from tests.on_slurm.cluster.layout import Instance

DEFAULT_TIMEOUT_S = 180.0

COMMAND_EVERY_S = 0.3
"""Between two looks that each cost a command of Slurm or of zslurm: the runs want the processor too."""


class CommandFailed(AssertionError):
    """A command of a test ended with a code other than zero; the message carries all it said."""


class RunsAsUser(ABC):
    """What a cluster can run as its ordinary user: any command, zslurm, batch scripts."""

    _installation: installation.Installation | None = None

    _all_servers: ClassVar[dict[str, CommandServer]] = {}
    """Of all clusters of this process, whose user is the same; each ends with the cluster that made it."""

    @cached_property
    def _servers(self) -> dict[str, CommandServer]:
        return {}

    @property
    @abstractmethod
    def instance(self) -> Instance:
        """The cluster."""

    @property
    @abstractmethod
    def user(self) -> pwd.struct_passwd:
        """The ordinary user that `run` uses."""

    @property
    def environment(self) -> dict[str, str]:
        """The whole environment of the ordinary user's commands."""
        return self._person_environment() | {processes.MARK: self.instance.id}

    @property
    def impatient(self) -> dict[str, str]:
        """Variables of commands that are to find the controller away, without Slurm's own patience in each."""
        return {"SLURM_CONF": str(self.instance.impatient_conf)}

    def _person_environment(self) -> dict[str, str]:
        return {
            "HOME": str(self.instance.user / "home"),
            "LANG": "C.UTF-8",
            # numpy starts a thread for each core when it is imported; nothing that tests compute is worth them.
            "OPENBLAS_NUM_THREADS": "1",
            # Threads that spin for each other take from the others what they wait for.
            "OMP_WAIT_POLICY": "PASSIVE",
            "LOGNAME": self.user.pw_name,
            "PATH": "/usr/local/bin:/usr/bin:/bin",
            # The sources belong to root, and `installation` has compiled them.
            "PYTHONDONTWRITEBYTECODE": "1",
            "SHELL": "/bin/bash",
            "SLURM_CONF": str(self.instance.slurm_conf),
            "TMPDIR": str(self.instance.user / "tmp"),
            "USER": self.user.pw_name,
        }

    def run(
        self,
        argv: Sequence[str | Path],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        check: bool = True,
        input: str | None = None,
        timeout: float = DEFAULT_TIMEOUT_S,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command as the ordinary user.

        Args:
            argv: the command.
            env: variables on top of `environment`.
            cwd: the user's home if not given.
            check: raise if it ends with another code than zero.
            input: text for its standard input; empty if not given.
            timeout: seconds until it is killed.

        Raises:
            CommandFailed: the code is not zero, and `check` is set.
            subprocess.TimeoutExpired: it took too long.
        """
        command = [str(argument) for argument in argv]
        result = subprocess.run(
            [*self._as_user, *command],
            env=self.environment | dict(env or {}),
            cwd=cwd or self.instance.user / "home",
            input=input or "",
            capture_output=True,
            text=True,
            timeout=timeout,
            umask=0o022,
        )
        result.args = command
        return _checked(result) if check else result

    @property
    def _as_user(self) -> list[str]:
        """What becomes the user before it runs a command.

        With `user=` Python would copy the tables of this process's memory, for ten times the processor time.
        """
        return [
            "/usr/bin/setpriv",
            f"--reuid={self.user.pw_uid}",
            f"--regid={self.user.pw_gid}",
            "--clear-groups",
            "--",
        ]

    def installation(self) -> installation.Installation:
        """A Python with zslurm that the ordinary user can run; made on first use if need be."""
        if self._installation is None:
            directory = self.instance.directory / "installation"
            self._installation = installation.find_or_make(directory, self._probe)
        return self._installation

    def _probe(self, argv: Sequence[str]) -> subprocess.CompletedProcess[str]:
        try:
            return self.run(argv, check=False)
        except OSError as error:  # the interpreter itself is out of the user's reach
            return subprocess.CompletedProcess(list(argv), 126, "", str(error))

    def program(self, file: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a Python program of the ordinary user's in its directory, and forks of what it starts in jobs.

        It comes from a process that has imported zslurm and submitit.
        """
        env = self.forking(forked.OTHERS, {"PYTHONPATH": str(file.parent)}, customized=True)
        return _checked(
            self.commands().run(
                arguments,
                env=self.environment | env,
                cwd=file.parent,
                module=file.stem,
                timeout=DEFAULT_TIMEOUT_S,
            )
        )

    def zslurm(
        self,
        *arguments: str | Path,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        check: bool = True,
        input: str | None = None,
        timeout: float = DEFAULT_TIMEOUT_S,
        torch: bool = False,
    ) -> subprocess.CompletedProcess[str]:
        """Run `zslurm ARGUMENTS` as the ordinary user, forked from a process that has imported it.

        The options are those of `run`; with `torch` that process has imported torch too.
        """
        words = [str(argument) for argument in arguments]
        home = self.instance.user / "home"
        server = self.ranks() if torch else self.commands()
        result = server.run(
            words, env=self.environment | dict(env or {}), cwd=cwd or home, input=input or "", timeout=timeout
        )
        return _checked(result) if check else result

    def commands(self) -> CommandServer:
        """The server of the ordinary user's commands, started on first use; `stop_commands` ends it."""
        return self._server("commands", forked.WITHOUT_TORCH)

    def ranks(self) -> CommandServer:
        """The same with torch, from which ranks are forked."""
        return self._server("ranks", forked.WITH_TORCH)

    def forking(
        self,
        modules: Sequence[str],
        env: Mapping[str, str] | None = None,
        *,
        torch: bool = False,
        customized: bool = False,
    ) -> dict[str, str]:
        """`forked.environment` of what the ordinary user starts, from a server that has imported torch or not."""
        server = self.ranks() if torch else self.commands()
        hook = self.installation().sources / forked.HOOK.relative_to(ROOT)
        return forked.environment(server, modules, env, hook, customized=customized)

    def _server(self, name: str, modules: Sequence[str]) -> CommandServer:
        if name not in self._all_servers:
            python, sources = self.installation().python, self.installation().sources
            self._all_servers[name] = self._servers[name] = CommandServer(
                python,
                sources / "tests" / "command_server.py",
                self.instance.user / f"{name}.sock",
                self.environment,
                modules=modules,
                user=self.user.pw_uid,
                group=self.user.pw_gid,
            )
        return self._all_servers[name]

    def stop_commands(self) -> None:
        """End the servers of commands and ranks that this cluster has made."""
        while self._servers:
            name, server = self._servers.popitem()
            del self._all_servers[name]
            server.close()

    def user_dir(self, name: str) -> Path:
        """A fresh directory that belongs to the ordinary user; it goes with the cluster.

        Raises:
            FileExistsError: the name is taken.
        """
        directory = self.instance.user / name
        directory.mkdir(mode=0o755)
        shutil.chown(directory, self.user.pw_uid, self.user.pw_gid)
        return directory

    def sbatch(self, script: str, *options: str, cwd: Path | None = None) -> str:
        """Submit a batch script (its body; the first line is added); returns the job id."""
        argv = ["sbatch", "--parsable", *options]
        return self.run(argv, input=f"#!/bin/bash\n{script}\n", cwd=cwd).stdout.strip().partition(";")[0]

    def write_shell(self, *, with_zslurm: bool = False) -> None:
        """A script with which a person becomes the ordinary user, in the environment that tests have.

        Args:
            with_zslurm: whether `zslurm` is on its PATH; the installation that tests use is looked for then.
        """
        environment = self._person_environment()
        if with_zslurm:
            programs = self.instance.directory / "bin"
            programs.mkdir(mode=0o755, exist_ok=True)
            command = programs / "zslurm"
            command.write_text(f'#!/bin/sh\nexec {self.installation().python} -m zslurm "$@"\n', encoding="utf-8")
            command.chmod(0o755)
            environment["PATH"] = f"{programs}:{environment['PATH']}"
        variables = shlex.join(f"{name}={value}" for name, value in environment.items())
        script = self.instance.directory / "as-user"
        script.write_text(
            "#!/bin/sh\n# Run a command, or a shell, as the ordinary user of this test cluster, in its home.\n"
            f'cd "{self.instance.user}/home" && [ $# -gt 0 ] || set -- bash --norc\n'
            f'exec runuser -u {self.user.pw_name} -- env -i TERM="$TERM" {variables} "$@"\n',
            encoding="utf-8",
        )
        script.chmod(0o755)


def _checked(done: subprocess.CompletedProcess[str]) -> subprocess.CompletedProcess[str]:
    if done.returncode != 0:
        raise CommandFailed(f"{shlex.join(done.args)} ended with {done.returncode}\n{done.stdout}\n{done.stderr}")
    return done
