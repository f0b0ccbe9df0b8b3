"""Run a command on another version of Slurm, in a root directory of the Debian release that has it (as root).

    python -m tests.on_slurm.versions 26.05 pytest tests/on_slurm/test_topology.py
    python -m tests.on_slurm.versions 26.05 bash

The root directory is made once by mmdebstrap (about a minute and 0.7 GB) and kept in /var/cache/zslurm-slurm, or
in the directory that ZSLURM_SLURM_CACHE names. The command sees this checkout and its Python at their usual paths.
It has a network, processes, /tmp, /run, /dev/shm and /etc of its own: several commands can run at the same time.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.checkout import ROOT

SUITES = {"22.05": "bookworm", "24.11": "trixie", "26.05": "sid"}
"""Version of Slurm -> the Debian release that has it."""

_PACKAGES = "slurm-wlm slurmdbd mariadb-server munge python3 procps iproute2 git passwd".split()
_LIBRARIES = Path("/usr/lib/x86_64-linux-gnu")
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_NOT_NEEDED = ("/usr/share/man/*", "/usr/share/doc/*", "/usr/share/locale/*")

# In new namespaces, outside of the root directory yet: ROOT PATH ... -- COMMAND ...
_ENTER = r"""
set -eu
umask 022
root=$1; shift
mount --rbind /dev "$root/dev"
mount -t tmpfs -o mode=1777 tmpfs "$root/dev/shm"
mount -t tmpfs -o mode=1777 tmpfs "$root/tmp"
mount -t tmpfs -o mode=755 tmpfs "$root/run"
mount -t proc proc "$root/proc"
mount -t sysfs sysfs "$root/sys"
if [ -d /sys/fs/cgroup ]; then mount --rbind /sys/fs/cgroup "$root/sys/fs/cgroup"; fi  # slurmd 22.05 wants one
# The clusters change the users and the names of hosts.
mount -t tmpfs -o mode=755 tmpfs "$root/mnt"
cp -a "$root/etc/." "$root/mnt"
mount --move "$root/mnt" "$root/etc"
# slurmctld 26.05 looks up the host of a waiting srun, and tries for 70 s if the name is unknown.
echo "127.0.0.1 $(hostname) $(hostname | cut -d. -f1)" >> "$root/etc/hosts"
sed -i 's/^hosts:.*/hosts: files/' "$root/etc/nsswitch.conf"
while [ "$1" != -- ]; do
    if [ -d "$1" ]; then mkdir -p "$root$1"; else mkdir -p "$root$(dirname "$1")"; touch "$root$1"; fi
    above=$(dirname "$1")
    while [ "$above" != / ]; do chmod a+rx "$root$above"; above=$(dirname "$above"); done
    mount --bind "$1" "$root$1"
    shift
done
shift
exec chroot "$root" /bin/bash -c "$INSIDE" "$@"
"""

# Process 1 of the namespace. It stays bash, which reaps orphans: zombies would count as processes of the user.
_INSIDE = r"""
set -eu
ip link set lo up
# Without an address other than loopback's, getaddrinfo finds no host for slurmctld.
ip link add zslurm0 type veth peer name zslurm1
ip address add 10.255.255.1/30 dev zslurm0
ip link set zslurm0 up
ip link set zslurm1 up
cd "$0"
set +e
"$@"
exit $?
"""


class NoRoot(Exception):
    """The root directory cannot be made; the message is one line."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command of the command line; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.on_slurm.versions", description=__doc__)
    parser.add_argument("version", choices=SUITES)
    parser.add_argument("command", nargs=argparse.REMAINDER, help="default: only make the root directory")
    given = parser.parse_args(arguments)
    if os.geteuid() != 0:
        print("another version of Slurm needs root", file=sys.stderr)
        return 1
    try:
        root = root_directory(given.version)
    except NoRoot as error:
        print(error, file=sys.stderr)
        return 1
    return run(root, given.command) if given.command else 0


def run(root: Path, command: Sequence[str]) -> int:
    """Run a command, or pytest with its arguments, in a root directory; returns its exit code."""
    words = [sys.executable, "-m", *command] if command[0] == "pytest" else list(command)
    entering = ["unshare", "--mount", "--net", "--pid", "--ipc", "--fork", "--kill-child"]
    paths = [str(path) for path in _paths(root)]
    return subprocess.run(
        [*entering, "/bin/bash", "-c", _ENTER, "enter", str(root), *paths, "--", str(ROOT), *words],
        env=os.environ | {"INSIDE": _INSIDE, "PATH": _PATH, "HOME": "/root", "LC_ALL": "C.UTF-8"},
        check=False,
    ).returncode


def _paths(root: Path) -> Iterator[Path]:
    """Yield what is mounted: the checkout, its Python, and libraries that the release lacks."""
    yield ROOT
    if not Path(sys.prefix).is_relative_to(ROOT):
        yield Path(sys.prefix)
    base = Path(sys.base_prefix)
    if base == Path("/usr"):
        yield Path(sys.executable).resolve()
        yield Path(sysconfig.get_path("stdlib"))
    else:
        yield base
    # slurmdbd's query `select @var := concat('')` fails with libmariadb 11.8 (error 5027), not with Debian 12's.
    if not (root / "etc/debian_version").read_text().startswith("12"):
        yield _LIBRARIES / "libmariadb.so.3"
    nsl = _LIBRARIES / "libnsl.so.2"  # of Python's module nis
    if nsl.exists() and not (root / nsl.relative_to("/")).exists():
        yield nsl


def root_directory(version: str) -> Path:
    """Return the root directory with this version of Slurm, made if there is none.

    Raises:
        NoRoot: mmdebstrap is missing, or did not succeed.
    """
    suite = SUITES[version]
    cache = Path(os.environ.get("ZSLURM_SLURM_CACHE", "/var/cache/zslurm-slurm"))
    cache.mkdir(mode=0o755, parents=True, exist_ok=True)
    root = cache / suite
    with (cache / f"{suite}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not root.is_dir():
            _make(suite, root)
    return root


def _make(suite: str, root: Path) -> None:
    if shutil.which("mmdebstrap", path=_PATH) is None:
        raise NoRoot("not installed: mmdebstrap (apt-get install mmdebstrap)")
    print(f"making {root} of Debian's packages", file=sys.stderr)
    part = root.with_suffix(".part")
    shutil.rmtree(part, ignore_errors=True)
    mirror = _mirror()
    with tempfile.NamedTemporaryFile("w", suffix=".sources") as sources:
        sources.write(f"Types: deb\nURIs: {mirror}\nSuites: {suite}\nComponents: main\n")
        sources.write("Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg\n")
        sources.flush()
        done = subprocess.run(
            [
                "mmdebstrap",
                "--variant=minbase",
                f"--include={','.join(_PACKAGES)}",
                '--aptopt=Acquire::Check-Valid-Until "false"',  # a mirror of sid may be some weeks old
                *(f"--dpkgopt=path-exclude={pattern}" for pattern in _NOT_NEEDED),
                suite,
                str(part),
                sources.name,
            ],
            env=os.environ | {"PATH": _PATH, "TMPDIR": "/tmp"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode != 0:
        shutil.rmtree(part, ignore_errors=True)
        errors = [line for line in done.stderr.splitlines() if line.startswith(("E:", "Err:"))]
        why = errors[0] if errors else done.stderr.strip()[-200:]
        raise NoRoot(f"no root directory of Debian {suite} from {mirror}: {why}")
    part.chmod(0o755)
    part.rename(root)


def _mirror() -> str:
    """Return the package source of this machine, or else Debian's own."""
    for path in sorted(Path("/etc/apt").glob("sources.list*")) + sorted(Path("/etc/apt/sources.list.d").glob("*")):
        with contextlib.suppress(OSError):
            lines = [line for line in path.read_text().splitlines() if not line.lstrip().startswith("#")]
            if found := re.search(r"https?://\S+/debian/?(?=\s|$)", "\n".join(lines)):
                return found[0]
    return "http://deb.debian.org/debian"


if __name__ == "__main__":
    sys.exit(main())
