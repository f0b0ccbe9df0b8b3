"""What `zslurm bench` has in its ranks if a test asks which points are measured, and not how fast anything is.

Three samples of a tenth of their time are enough for a point, and a moment is a twentieth of a second. Python
imports a module of this name by itself when it finds one: a test puts this directory on PYTHONPATH, and the
product knows nothing of it.

With ZSLURM_TEST_SLOW_RANK the rank of that number does each operation twice, and ranks are compared by how many
operations they did, not by the processor time that these took: it depends on what else the machine does.
"""

import importlib.abc
import importlib.util
import os
import sys
import types

_OPERATION_S = 1e-3
"""What an operation counts as, where operations are counted."""


def _few_samples(timing):
    timing.is_stable = lambda samples: len(samples) >= 3
    timing._SAMPLE_S /= 10


def _short_moments(local):
    whole, clock = local.time_at_once, local.time

    def time_at_once(operation, ranks, *, moments, moment_s):
        slow = os.environ.get("ZSLURM_TEST_SLOW_RANK")
        if slow is None:
            return whole(operation, ranks, moments=moments, moment_s=min(moment_s, 0.05))
        done = 0

        def counted():
            nonlocal done
            for _ in range(2 if ranks.rank == int(slow) else 1):
                operation()
                done += 1

        local.time = types.SimpleNamespace(
            perf_counter=clock.perf_counter, process_time=lambda: done * _OPERATION_S
        )
        return whole(counted, ranks, moments=moments, moment_s=_OPERATION_S)

    local.time_at_once = time_at_once


class Finder(importlib.abc.MetaPathFinder):
    """Changes each of the modules when it has been imported."""

    changes = {"zslurm.bench.run.timing": _few_samples, "zslurm.bench.run.local": _short_moments}  # noqa: RUF012

    def find_spec(self, name, path, target=None):
        if (change := self.changes.pop(name, None)) is None:
            return None
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            change(module)

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, Finder())
for name in [name for name in sys.modules if name.startswith("zslurm.bench.")]:
    del sys.modules[name]  # of the process that this one was forked from: they are imported again
