"""What runs on the login node: submission, sweeps, control, the Slurm and the local launcher.

`zslurm.submit(...)` submits a run: see `zslurm.api.submission.submit`, which this package calls when it is called.
"""

from __future__ import annotations

import inspect
import sys
from types import ModuleType
from typing import Any


class _Callable(ModuleType):
    """This package, and the function of the same name: `zslurm.submit` is both."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Submit a run, and return it."""
        from zslurm.api.submission import submit

        return submit(*args, **kwargs)

    @property
    def __signature__(self) -> inspect.Signature:
        from zslurm.api.submission import submit

        return inspect.signature(submit)


sys.modules[__name__].__class__ = _Callable
