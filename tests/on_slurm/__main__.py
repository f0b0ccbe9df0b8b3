"""A Slurm to try things on: `python -m tests.on_slurm up`, `status`, `down` (as root)."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from tests.checkout import ROOT
from tests.on_slurm.cluster.layout import Instance
from tests.on_slurm.cluster.slurm_cluster import SlurmCluster, dismantle, why_impossible


def main() -> int:
    """Parse the command line and do it."""
    parser = argparse.ArgumentParser(prog="python -m tests.on_slurm", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    up = commands.add_parser("up", help="start a cluster that runs until `down`")
    up.add_argument("--nodes", type=int, default=8, metavar="N")
    up.add_argument("--accounting", action="store_true", help="with slurmdbd, so that sacct answers")
    commands.add_parser("status", help="list the clusters of this machine")
    down = commands.add_parser(
        "down", help="stop what `up` of this checkout started, and clean what dead processes left"
    )
    down.add_argument("directory", nargs="?", type=Path, help="only the cluster in this directory")
    down.add_argument("--all", action="store_true", help="also the clusters of tests that run right now")
    arguments = parser.parse_args()

    if reason := why_impossible():
        print(reason, file=sys.stderr)
        return 1
    if arguments.command == "up":
        return _up(arguments.nodes, accounting=arguments.accounting)
    if arguments.command == "down":
        return _down(arguments.directory, in_use_too=arguments.all)
    return _status()


def _up(nodes: int, *, accounting: bool) -> int:
    cluster = SlurmCluster(nodes=nodes, accounting=accounting, outlive_process=True)
    cluster.start()
    cluster.write_shell(with_zslurm=True)
    print(f"# {nodes} nodes are idle after {cluster.start_took_s:.1f} s")
    _print_use(cluster.instance)
    as_user = f"{cluster.instance.directory}/as-user"
    print(f"# try:  {as_user} zslurm init --yes")
    print(
        f"#       {as_user} zslurm submit {ROOT}/run.yaml --nodes 2   # the run file of README, by its whole path"
    )
    print(f"# Runs are below {cluster.instance.user}/home. `make slurm-down` stops the cluster and removes them.")
    return 0


def _down(directory: Path | None, *, in_use_too: bool) -> int:
    stopped = dismantle(
        lambda instance: (
            instance.directory == directory
            if directory
            else in_use_too or instance.abandoned or _is_ours(instance)
        )
    )
    for instance in stopped:
        print(f"stopped {instance.directory}")
    if directory and not stopped:
        print(f"{directory}: no such cluster", file=sys.stderr)
        return 1
    return 0


def _is_ours(instance: Instance) -> bool:
    """Return whether `up` of this checkout started a cluster: another checkout's is somebody else's."""
    return instance.owner_pid is None and instance.checkout == str(ROOT)


def _status() -> int:
    for instance in Instance.all():
        owner = "started by `up`" if instance.owner_pid is None else f"of process {instance.owner_pid}"
        print(f"# {instance.directory}, {'abandoned' if instance.abandoned else owner}")
        if not instance.abandoned:
            _print_use(instance)
            subprocess.run([f"{instance.directory}/as-user", "sinfo"])
    return 0


def _print_use(instance: Instance) -> None:
    print(f"export SLURM_CONF={instance.slurm_conf}")
    print(f"{instance.directory}/as-user              # a shell as the ordinary user, with zslurm")
    print(f"{instance.directory}/as-user COMMAND ...  # one command as the ordinary user")


if __name__ == "__main__":
    sys.exit(main())
