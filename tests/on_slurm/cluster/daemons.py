"""The daemons of a test cluster: how each is started, and how we know that it answers.

They run in the foreground and in sessions of their own, so that a crash shows at once with its log, and Ctrl-C in
a terminal reaches pytest only.
"""

from __future__ import annotations

import shutil
import socket
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

from tests.on_slurm.cluster import processes
from tests.on_slurm.cluster.config_files import Ports
from tests.on_slurm.cluster.layout import Instance
from tests.waiting import DEADLINE_S, wait_for

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class DaemonFailed(RuntimeError):
    """A daemon ended while it was expected to become ready; the message carries the end of its log."""


class Daemons:
    """Starts and stops the daemons of one instance."""

    def __init__(self, instance: Instance, ports: Ports) -> None:
        self._instance = instance
        self._ports = ports
        self._children: dict[str, subprocess.Popen[bytes]] = {}

    def start_munged(self) -> None:
        directory = self._instance.munge_socket.parent
        munged = self._start(
            "munged",
            [
                "munged",
                "--foreground",
                f"--socket={self._instance.munge_socket}",
                f"--key-file={directory}/key",
                f"--pid-file={directory}/pid",
                f"--log-file={directory}/munged.log",
                f"--seed-file={directory}/seed",
            ],
            user="munge",
        )
        self._wait("munged", munged, lambda: _listens_unix(self._instance.munge_socket))

    def start_database(self) -> None:
        """MariaDB with its own data directory and no network, then slurmdbd."""
        data = self._instance.database_socket.parent
        shutil.chown(data, "mysql", "mysql")
        options = ["--no-defaults", f"--datadir={data}", "--user=mysql"]
        install = [*options, "--skip-test-db", "--auth-root-authentication-method=socket"]
        with self._log("mariadb-install-db").open("ab") as log:
            subprocess.run(["mariadb-install-db", *install], check=True, stdout=log, stderr=log)
        mariadb = self._start(
            "mariadbd",
            [
                "mariadbd",
                *options,
                "--skip-networking",
                f"--socket={self._instance.database_socket}",
                f"--pid-file={data}/mariadbd.pid",
                "--innodb-flush-log-at-trx-commit=0",
                "--innodb-buffer-pool-size=32M",
            ],
        )
        self._wait("mariadbd", mariadb, lambda: _listens_unix(self._instance.database_socket))
        # slurmdbd has no setting for the socket; the client library reads this variable.
        where = {"MYSQL_UNIX_PORT": str(self._instance.database_socket)}
        slurmdbd = self._start("slurmdbd", ["slurmdbd", "-D"], environment=where)
        self._wait("slurmdbd", slurmdbd, lambda: _listens(self._ports.database_daemon))

    def start_controller(self) -> None:
        controller = self._start("slurmctld", ["slurmctld", "-D", "-f", str(self._instance.slurm_conf)])
        self._wait("slurmctld", controller, lambda: _listens(self._ports.controller))

    def start_backup_controller(self, host: str, address: str) -> None:
        """Start a second slurmctld, which slurm.conf names as `SlurmctldHost=host(address)`.

        slurmctld finds itself in slurm.conf by the name of its host, so this one has its own host name. It has its
        own pid file as well: slurmctld kills the process that its pid file names.
        """
        config = self._instance.directory / "etc" / "backup.conf"
        text = self._instance.slurm_conf.read_text(encoding="utf-8")
        config.write_text(text.replace("/slurmctld.pid\n", "/slurmctld.backup.pid\n"), encoding="utf-8")
        script = f"echo {host} > /proc/sys/kernel/hostname && exec slurmctld -D -f {config}"
        backup = self._start("slurmctld.backup", ["unshare", "--uts", "sh", "-c", script])
        self._wait("slurmctld.backup", backup, lambda: _listens(self._ports.controller, address))

    def start_node(self, name: str) -> None:
        port = self._ports.nodes[self._instance.node_names.index(name)]
        argv = ["slurmd", "-D", "-N", name, "-f", str(self._instance.slurm_conf)]
        slurmd = self._start(f"slurmd.{name}", argv)
        self._wait(f"slurmd.{name}", slurmd, lambda: _listens(port))

    def stop(self, name: str) -> None:
        """End one daemon in its own orderly way, and wait until it is gone."""
        self._children[name].terminate()
        self._children[name].wait(DEADLINE_S)
        wait_for(lambda: not processes.daemons(self._instance, name), f"helpers of {name} to end")
        self.reap()

    def is_alive(self, name: str) -> bool:
        """Whether a daemon that this process has started still runs; its end is collected."""
        return name in self._children and self._children[name].poll() is None

    def reap(self) -> None:
        """Collect children that ended, so that none stays a zombie."""
        self._children = {name: child for name, child in self._children.items() if child.poll() is None}

    def _start(
        self,
        name: str,
        argv: list[str],
        *,
        user: str | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> subprocess.Popen[bytes]:
        own = {
            "PATH": PATH,
            "SLURM_CONF": str(self._instance.slurm_conf),
            processes.MARK: self._instance.id,
            processes.DAEMON_MARK: name,
        }
        with self._log(name).open("ab") as log:
            child = subprocess.Popen(
                argv,
                env=own | dict(environment or {}),
                cwd=self._instance.directory,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                user=user,
                group=user,
                extra_groups=None if user is None else [],
                start_new_session=True,
            )
        self._children[name] = child
        return child

    def _wait(self, name: str, child: subprocess.Popen[bytes], ready: Callable[[], bool]) -> None:
        def ready_or_dead() -> bool:
            if child.poll() is not None:
                end = self._log(name).read_text(encoding="utf-8", errors="replace")[-2000:]
                raise DaemonFailed(f"{name} ended with {child.returncode}; the end of its log:\n{end}")
            return ready()

        wait_for(ready_or_dead, f"{name} to answer")

    def _log(self, name: str) -> Path:
        return self._instance.log / f"{name}.out"


def _listens(port: int, address: str = "127.0.0.1") -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((address, port)) == 0


def _listens_unix(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(str(path)) == 0
