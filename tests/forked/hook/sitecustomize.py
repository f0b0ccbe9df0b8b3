"""Has a module run by the server of tests/command_server.py; see tests/forked/__init__.py.

Python imports a module of this name by itself, before it runs what it was started for.
"""

import importlib.util
import os
import signal
import sys
from pathlib import Path


def stand_for_a_fork(server, module, arguments):
    file = Path(__file__).resolve().parents[2] / "command_server.py"
    spec = importlib.util.spec_from_file_location("command_server", file)
    command_server = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(command_server)
    code = command_server.stand_for(Path(server), arguments, module)
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


if (server := os.environ.get("ZSLURM_TEST_SERVER")) and "-m" in sys.orig_argv:
    module, *arguments = sys.orig_argv[sys.orig_argv.index("-m") + 1 :]
    if module in os.environ["ZSLURM_TEST_FORKED"].split(","):
        stand_for_a_fork(server, module, arguments)
