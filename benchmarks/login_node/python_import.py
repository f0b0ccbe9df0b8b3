"""`import zslurm` and all names of its API, against `import submitit`; and what the plugin costs others' programs.

Every program that makes a submitit executor loads the plugins that are installed, and so does every task of its
jobs: the last two contenders differ in zslurm's plugin alone.
"""

from __future__ import annotations

import os
import subprocess
import sys

from benchmarks.common import alternate, ratio, write_result

_NAMES = "import zslurm\nfor name in zslurm.__all__: getattr(zslurm, name)"
_PLUGINS = "from submitit.core import plugins; plugins.get_executors(); plugins.get_job_environments()"
_WITHOUT = f"import submitit.core.plugins as p; p._iter_submitit_entrypoints = lambda: []\n{_PLUGINS}"


def run(runs: int = 21) -> None:
    """Measure and write results/python_import.json."""
    # Byte code is compiled once, as in any installation.
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}

    def python(program: str) -> object:
        return subprocess.run([sys.executable, "-c", program], env=environment, check=True)

    timings = alternate(
        {
            "pass": lambda: python("pass"),
            "import submitit": lambda: python("import submitit"),
            "import zslurm": lambda: python("import zslurm"),
            "every name of zslurm": lambda: python(_NAMES),
            "submitit's executors, without the plugin": lambda: python(_WITHOUT),
            "submitit's executors, with the plugin": lambda: python(_PLUGINS),
        },
        runs=runs,
    )
    plain = timings["pass"].median
    submitit, zslurm = (timings[f"import {name}"].median - plain for name in ("submitit", "zslurm"))
    write_result(
        "python_import",
        {
            "timings": [timing.row() for timing in timings.values()],
            "import_zslurm_over_import_submitit": round(zslurm / submitit, 3),
            "every_name_to_import_submitit": ratio(timings["every name of zslurm"], timings["import submitit"]),
            "executors_with_the_plugin_to_without": ratio(
                timings["submitit's executors, with the plugin"],
                timings["submitit's executors, without the plugin"],
            ),
        },
    )
