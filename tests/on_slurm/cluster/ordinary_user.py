"""The ordinary user that jobs and commands of tests run as: root would hide what users are refused."""

from __future__ import annotations

import os
import pwd
import subprocess

from tests.on_slurm.cluster import processes

NAME = "zslurm-test"
_CREATED_BY_US = "zslurm test cluster"
"""The comment field of a user that we made, and so may remove."""


def ensure() -> pwd.struct_passwd:
    """The user, created if it is missing. Call it under `machine_lock`."""
    try:
        return pwd.getpwnam(NAME)
    except KeyError:
        options = ["--no-create-home", "--home-dir=/nonexistent", "--shell=/bin/bash", "--user-group"]
        _run(["useradd", *options, "--no-log-init", f"--comment={_CREATED_BY_US}", NAME])
        return pwd.getpwnam(NAME)


def remove_if_created() -> None:
    """Remove the user, and whatever still runs as it, if we made it. Call it under `machine_lock`."""
    try:
        user = pwd.getpwnam(NAME)
    except KeyError:
        return
    if user.pw_gecos == _CREATED_BY_US:
        processes.kill_all(lambda: processes.of_user(user.pw_uid))
        _run(["userdel", NAME])


def _run(argv: list[str]) -> None:
    path = os.environ.get("PATH", "") + os.pathsep + "/usr/sbin:/sbin"
    result = subprocess.run(argv, env=os.environ | {"PATH": path}, capture_output=True, text=True)
    if result.returncode != 0:
        raise RuntimeError(f"{' '.join(argv)}: {result.stderr.strip()}")
