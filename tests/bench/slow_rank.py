"""Slow one rank of a benchmark from outside: a module that Python loads at its start wraps one function of it.

The rank does extra work in every call (a quarter of the processor time that the call took, so it has 80 % of the
speed), as a GPU that is throttled takes longer for each kernel. It does not sleep, which would leave its core to
the others and cost no processor time. Nothing in the product knows of it.
"""

from __future__ import annotations

from pathlib import Path

_HOOK = '''
"""Wraps a function of one module, in the rank that is to be slow, as soon as the module is imported."""
import importlib.abc, importlib.util, os, sys, time

MODULE, NAME = {module!r}, {name!r}


class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            wrap(module)

        spec.loader.exec_module = exec_module
        return spec


def wrap(module):
    *owners, last = NAME.split(".")
    owner = module
    for each in owners:
        owner = getattr(owner, each)
    function = getattr(owner, last)

    def slow(*arguments, **named):
        own = time.process_time()
        result = function(*arguments, **named)
        until = time.process_time() + {extra} * (time.process_time() - own)
        while time.process_time() < until:
            pass
        return result

    setattr(owner, last, slow)


if os.environ.get("RANK") == {rank!r}:
    sys.meta_path.insert(0, Finder())
'''


def slowed(module: str, name: str, rank: int | None, folder: Path, extra: float = 0.25) -> dict[str, str]:
    """Return the environment in which a rank's calls of `module.name` take 1 + `extra` times their time.

    Args:
        module: of the product, which the ranks import.
        name: of a function or method in it.
        rank: to be slowed; none if None.
        folder: for the file that Python loads.
        extra: share of each call's processor time that is spent again.
    """
    if rank is None:
        return {}
    hook = folder / "slow_rank"
    hook.mkdir(exist_ok=True)
    text = _HOOK.format(module=module, name=name, rank=str(rank), extra=extra)
    (hook / "sitecustomize.py").write_text(text)
    return {"PYTHONPATH": str(hook)}
