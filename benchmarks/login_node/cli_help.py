"""`zslurm --help` against `torchx --help` and `nemo --help`, each as its own documentation calls it.

The peers are installed from PyPI into temporary environments of their own. nemo_run asks for torchx and others,
but not for torch; a peer that cannot be installed here is left out, and the result says why.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.common import alternate, write_result

# Program -> what pip is asked for, the package itself first. nemo_run 0.11.1 imports leptonai.api.v1, which the
# leptonai that pip would choose for it (0.47.1) does not have any more.
_PEERS = {"torchx": ["torchx==0.7.0"], "nemo": ["nemo_run==0.11.1", "leptonai==0.26.6"]}
_PATIENCE_S = 600


def run(runs: int = 11) -> None:
    """Measure and write results/cli_help.json."""
    # Byte code is compiled once, as in any installation.
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    with tempfile.TemporaryDirectory() as folder:
        programs: dict[str, list[str]] = {"zslurm": [sys.executable, "-m", "zslurm"]}
        versions, absent = {}, {}
        for name, packages in _PEERS.items():
            place = Path(folder) / name
            program = str(place / "bin" / name)
            if reason := _install(place, packages, program):
                absent[name] = reason
            else:
                programs[name] = [program]
                versions[name] = packages
        environment["PYTHONPYCACHEPREFIX"] = str(Path(folder) / "compiled")

        def help_of(command: list[str]) -> object:
            return subprocess.run([*command, "--help"], env=environment, capture_output=True, check=True)

        load = os.getloadavg()[0]
        timings = alternate(
            {f"{name} --help": lambda command=command: help_of(command) for name, command in programs.items()},
            runs=runs,
        )
    ours = timings["zslurm --help"].median
    write_result(
        "cli_help",
        {
            "load_at_the_start": round(load, 2),
            "timings": [timing.row() for timing in timings.values()],
            "versions": versions,
            "left_out": absent,
            "times_ours": {
                name: round(timing.median / ours, 1) for name, timing in timings.items() if "zslurm" not in name
            },
        },
    )


def _install(place: Path, packages: list[str], program: str) -> str | None:
    """Make an environment in which a program shows its help; returns why that failed, in one line."""
    try:
        subprocess.run([sys.executable, "-m", "venv", str(place)], check=True, capture_output=True)
        pip = [str(place / "bin" / "python"), "-m", "pip", "install", "--quiet", *packages]
        subprocess.run(pip, check=True, capture_output=True, text=True, timeout=_PATIENCE_S)
        subprocess.run([program, "--help"], check=True, capture_output=True, text=True)
    except subprocess.TimeoutExpired:
        return f"pip was not done after {_PATIENCE_S} s"
    except subprocess.CalledProcessError as error:
        return str(error.stderr).strip().splitlines()[-1] if error.stderr else str(error)
    return None
