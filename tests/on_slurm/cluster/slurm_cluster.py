"""A real Slurm cluster on this one machine: eight nodes of eight GPUs that are not there.

    with SlurmCluster() as cluster:
        cluster.run(["srun", "-N2", "hostname"])      # as an ordinary user
        cluster.kill_node("node3")

Everything is private to the instance: munge socket and key, ports, configuration, state, logs; several clusters
can run side by side. Shared with the machine are only its kernel, /dev/shm, lines of /etc/hosts and the ordinary
user; the last two are put back when the last cluster ends.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import pwd
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tests.on_slurm.cluster import config_files, hosts_file, ordinary_user, processes
from tests.on_slurm.cluster.as_user import COMMAND_EVERY_S, RunsAsUser
from tests.on_slurm.cluster.config_files import Timing
from tests.on_slurm.cluster.daemons import PATH, Daemons
from tests.on_slurm.cluster.layout import Instance, this_process
from tests.waiting import wait_for

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "useradd")
ACCOUNTING_PROGRAMS = ("slurmdbd", "mariadbd", "mariadb-install-db")

_DOWN_STATES = {"down", "down*", "unknown", "unknown*"}


def why_impossible(*, accounting: bool = False) -> str | None:
    """Why no cluster can run here, in one line; None if one can."""
    if os.geteuid() != 0:
        return "a Slurm cluster of several nodes on one machine needs root"
    programs = PROGRAMS + (ACCOUNTING_PROGRAMS if accounting else ())
    missing = [name for name in programs if shutil.which(name, path=PATH) is None]
    if missing:
        return f"not installed: {', '.join(missing)} (apt-get install slurm-wlm slurmdbd mariadb-server munge)"
    return None


class SlurmCluster(RunsAsUser):
    """One cluster: `start` and `stop`, or a with statement. Nodes and controller can be killed and come back."""

    def __init__(
        self,
        *,
        nodes: int = 8,
        gpus_per_node: int = 8,
        accounting: bool = False,
        timing: Timing | None = None,
        outlive_process: bool = False,
        leaf_switches: Mapping[str, str] | None = None,
        settings: str = "",
        files: Mapping[str, str] | None = None,
    ) -> None:
        """
        Args:
            nodes: how many slurmd to run; they are called node0, node1, ...
            gpus_per_node: GRES `gpu:mi300x` of each node.
            accounting: run MariaDB and slurmdbd, so that sacct answers.
            timing: Slurm's own limits; see `Timing`.
            outlive_process: keep running when this process ends (`python -m tests.on_slurm up`).
            leaf_switches: leaf -> hostlist: Slurm knows these as its topology/tree; default: no topology.
            settings: further lines of slurm.conf: other plugins, more partitions.
            files: further files next to slurm.conf, by name: topology.yaml, job_submit.lua.
        """
        self._settings = (nodes, gpus_per_node, accounting)
        self._further = settings
        self._files = dict(files or {})
        self._timing = timing or Timing()
        self._outlives = outlive_process
        self._leaf_switches = leaf_switches
        self._started: tuple[Instance, Daemons, pwd.struct_passwd] | None = None
        self.start_took_s = 0.0

    def __enter__(self) -> SlurmCluster:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    # --- life ---------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start every daemon and wait until every node is idle. What dead processes left is cleaned first.

        Raises:
            RuntimeError: this machine cannot run a cluster, or a daemon failed (with the end of its log).
        """
        nodes, gpus_per_node, accounting = self._settings
        if reason := why_impossible(accounting=accounting):
            raise RuntimeError(reason)
        began = time.monotonic()
        owner = None if self._outlives else this_process()
        dismantle(lambda instance: instance.abandoned)
        with hosts_file.machine_lock():
            user = ordinary_user.ensure()
            instance = Instance.create(
                nodes=nodes, gpus_per_node=gpus_per_node, accounting=accounting, owner_pid=owner
            )
            hosts_file.add(instance.id, instance.node_names)
            ports = config_files.claim_ports(instance)
        self._started = (instance, Daemons(instance, ports), user)
        if owner is not None:
            atexit.register(self._stop_at_exit, owner)
        try:
            self._start_daemons(ports)
        except BaseException:
            self.stop()
            raise
        self.start_took_s = time.monotonic() - began

    def _start_daemons(self, ports: config_files.Ports) -> None:
        config_files.write(self.instance, ports, self._timing, self._leaf_switches, self._further, self._files)
        for name in ("home", "tmp"):
            self.user_dir(name)
        self.write_shell()
        self._daemons.start_munged()
        if self.instance.accounting:
            self._daemons.start_database()
        self._daemons.start_controller()
        for name in self.node_names:
            self._daemons.start_node(name)
        wait_for(
            lambda: set(self.node_states().values()) == {"idle"}, "every node to be idle", every_s=COMMAND_EVERY_S
        )

    def stop(self) -> None:
        """Kill all that belongs to the cluster and put the machine back as it was. Safe to call twice."""
        if self._started is None:
            return
        self.stop_commands()
        instance, own_daemons, _ = self._started
        self._started = self._installation = None
        atexit.unregister(self._stop_at_exit)
        dismantle(lambda other: other.directory == instance.directory)
        own_daemons.reap()

    def _stop_at_exit(self, owner: int) -> None:
        if this_process() == owner:  # a forked child inherits the handler, not the cluster
            self.stop()

    # --- what it is ---------------------------------------------------------------------------------------

    @property
    def instance(self) -> Instance:
        return self._running()[0]

    @property
    def _daemons(self) -> Daemons:
        return self._running()[1]

    @property
    def user(self) -> pwd.struct_passwd:
        """The ordinary user that `run` uses."""
        return self._running()[2]

    @property
    def slurm_conf(self) -> Path:
        return self.instance.slurm_conf

    @property
    def node_names(self) -> list[str]:
        return self.instance.node_names

    def _running(self) -> tuple[Instance, Daemons, pwd.struct_passwd]:
        if self._started is None:
            raise RuntimeError("the cluster is not running: call start() or use a with statement")
        return self._started

    def run_as_root(self, argv: Sequence[str]) -> str:
        """Run a command of Slurm's administrator; returns its output."""
        environment = {"PATH": PATH, "SLURM_CONF": str(self.slurm_conf)}
        return subprocess.run(argv, env=environment, capture_output=True, text=True, check=True).stdout

    # --- nodes and the controller -------------------------------------------------------------------------

    def node_states(self) -> dict[str, str]:
        """What sinfo says of every node: {'node0': 'idle', 'node1': 'down*'}; empty while nobody answers."""
        try:  # as root: PrivateData may hide the nodes from the user
            said = self.run_as_root(["sinfo", "--noheader", "--Node", "--format=%N %T"])
        except subprocess.CalledProcessError:
            return {}
        return dict(line.split() for line in said.splitlines())

    def kill_node(self, name: str, *, noticed_at_once: bool = False) -> None:
        """Kill a node as a power cut would: slurmd first, so that it reports nothing, then slurmstepd, then tasks.

        The controller notices by its pings, after 10 to 20 seconds; `wait_for_node(name, up=False)` waits for it.

        Args:
            name: the node.
            noticed_at_once: tell the controller now, for tests of what follows rather than of the noticing.
        """
        instance = self.instance
        # srun has a helper that ends the step, on all nodes, when srun dies: power is lost by both at once.
        processes.freeze(
            [
                *processes.daemons(instance, f"slurmd.{name}"),
                *processes.tasks(instance, name),
                *processes.step_daemons(instance, name),
            ]
        )
        processes.kill_all(lambda: processes.daemons(instance, f"slurmd.{name}"))
        processes.kill_all(lambda: processes.step_daemons(instance, name))
        processes.kill_all(lambda: processes.tasks(instance, name))
        self._daemons.reap()
        if noticed_at_once:
            # ReturnToService=1 keeps it so. With 2, an answer that the node gave before it died makes it idle:
            # slurmctld looks at answers up to a second later.
            self.run_as_root(["scontrol", "update", f"NodeName={name}", "State=DOWN", "Reason=killed"])

    def start_node(self, name: str) -> None:
        """Start a killed node again and wait until the controller takes it back."""
        if not self._daemons.is_alive(f"slurmd.{name}"):
            self._daemons.start_node(name)
        if self.node_states().get(name) == "down":
            self._resume(name)
        self.wait_for_node(name, up=True)

    def _resume(self, name: str) -> None:
        with contextlib.suppress(subprocess.CalledProcessError):  # it came back by itself meanwhile
            self.run_as_root(["scontrol", "update", f"NodeName={name}", "State=RESUME"])

    def wait_for_node(self, name: str, *, up: bool) -> None:
        """Wait until the controller calls the node usable, or down."""

        def reached() -> bool:
            state = self.node_states().get(name)
            return state is not None and (state in _DOWN_STATES) != up and not (up and state.endswith("*"))

        wait_for(reached, f"{name} to be {'up' if up else 'down'}", every_s=COMMAND_EVERY_S)

    def restore(self) -> None:
        """What a test should leave behind: controller and nodes up, none drained, no jobs."""
        if not self._daemons.is_alive("slurmctld"):
            self.start_controller()
        for name in self.node_names:
            if not self._daemons.is_alive(f"slurmd.{name}"):
                self._daemons.start_node(name)
        wait_for(self._is_at_rest, "every node to be idle again and no job to be left", every_s=COMMAND_EVERY_S)

    def _is_at_rest(self) -> bool:
        """Whether all is as it was; what is not is told so again: a job may requeue itself as it is cancelled."""
        own = f"--user={self.user.pw_name}"
        states, jobs = self.node_states(), self._states_of_jobs(own)
        if jobs is None:
            return False
        if jobs - {"COMPLETING"}:
            self.run(["scancel", own], check=False)  # a job that ends by itself meanwhile is an error
        for name in (name for name, state in states.items() if state == "down" or state.startswith("drain")):
            self._resume(name)
        return set(states.values()) == {"idle"} and not jobs

    def _states_of_jobs(self, option: str) -> set[str] | None:
        """The states of the jobs that squeue lists; None if it does not answer."""
        listed = self.run(["squeue", "--noheader", "--format=%T", option], check=False)
        return None if listed.returncode else set(listed.stdout.split())

    def stop_controller(self) -> None:
        """End slurmctld in its orderly way: jobs run on, every command that asks it fails."""
        self._daemons.stop("slurmctld")

    def start_controller(self) -> None:
        """Start slurmctld again; it takes its jobs up from its state directory."""
        if not self._daemons.is_alive("slurmctld"):
            self._daemons.start_controller()
        wait_for(self.node_states, "slurmctld to answer", every_s=COMMAND_EVERY_S)


def dismantle(wanted: Callable[[Instance], bool]) -> list[Instance]:
    """Clean up the clusters of this machine that are wanted gone, whichever process started them."""
    with hosts_file.machine_lock():
        gone = [instance for instance in Instance.all() if wanted(instance)]
        for instance in gone:
            _dismantle(instance)
        if not Instance.all():
            ordinary_user.remove_if_created()
    return gone


def _dismantle(instance: Instance) -> None:
    """Kill the members, then remove what was added to the machine. Call it under `machine_lock`."""
    processes.kill_all(lambda: processes.members(instance))
    hosts_file.remove(instance.id)
    for mount in _mounts_below(instance.directory):  # a full disk of a test that was killed
        subprocess.run(["umount", "--lazy", mount], check=False)
    shutil.rmtree(instance.directory)


def _mounts_below(directory: Path) -> list[str]:
    """Return what is mounted in a directory, the innermost first."""
    points = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
    return sorted((point for point in points if point.startswith(f"{directory}/")), reverse=True)
