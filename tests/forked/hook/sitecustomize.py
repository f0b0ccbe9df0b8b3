"""Has a module run by the server of tests/command_server.py; see tests/forked/__init__.py.

Python imports a module of this name by itself, before it runs what it was started for; the next one is imported
from here, in the process that does the work. What stands for a fork imports little: there are many of them.
"""

import os
import sys

HERE = os.path.dirname(os.path.realpath(__file__))  # noqa: PTH120


def stand_for_a_fork(server, module, arguments):
    import _signal

    sys.path.insert(0, os.path.dirname(HERE))  # noqa: PTH120
    import client

    code = client.stand_for(server, arguments, module)
    if code < 0:
        if -code != _signal.SIGKILL:
            _signal.signal(-code, _signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def import_next():
    import importlib.util
    from importlib.machinery import PathFinder

    here = next(number for number, path in enumerate(sys.path) if path and os.path.realpath(path) == HERE)
    if spec := PathFinder.find_spec("sitecustomize", sys.path[here + 1 :]):
        module = sys.modules["sitecustomize"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)


if (server := os.environ.get("ZSLURM_TEST_SERVER")) and "-m" in sys.orig_argv:
    module, *arguments = sys.orig_argv[sys.orig_argv.index("-m") + 1 :]
    if module in os.environ["ZSLURM_TEST_FORKED"].split(","):
        stand_for_a_fork(server, None if module == "zslurm" else module, arguments)
import_next()
