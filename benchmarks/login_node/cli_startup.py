"""How long the command line takes to answer, against importing the libraries it cannot do without.

Peer: `python -c "import typer, rich.console, rich.table"`, the least that a Typer program with Rich tables pays.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.common import alternate, write_result
from tests.train.runs import VOCAB, make_corpus

_PEER = "import typer, rich.console, rich.table"


def run(runs: int = 21) -> None:
    """Measure and write results/cli_startup.json."""
    # Byte code is compiled once, as in any installation.
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    with tempfile.TemporaryDirectory() as folder:
        make_corpus(Path(folder) / "tokens.h5")
        run_file = Path(folder) / "run.yaml"
        run_file.write_text(f"extends: zaya1-tiny\nmodel: {{vocab_size: {VOCAB}}}\ndata: {{path: tokens.h5}}\n")

        def command(*arguments: str) -> object:
            return subprocess.run(
                [sys.executable, *arguments], env=environment, stdout=subprocess.DEVNULL, check=True
            )

        dry_run = ("-m", "zslurm", "submit", str(run_file), "--cluster", "local", "--dry-run")
        timings = alternate(
            {
                "python -c pass": lambda: command("-c", "pass"),
                "import typer and rich": lambda: command("-c", _PEER),
                "zslurm --help": lambda: command("-m", "zslurm", "--help"),
                "zslurm submit --dry-run": lambda: command(*dry_run),
            },
            runs=runs,
        )
    peer = timings["import typer and rich"].median
    write_result(
        "cli_startup",
        {
            "timings": [timing.row() for timing in timings.values()],
            "ratio_to_import_typer_and_rich": {
                name: round(timings[name].median / peer, 2)
                for name in ("zslurm --help", "zslurm submit --dry-run")
            },
        },
    )
