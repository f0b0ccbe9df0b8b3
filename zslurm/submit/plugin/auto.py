"""submitit's AutoExecutor and the parameters of Slurm: `slurm_partition` holds for the cluster `zslurm` too.

AutoExecutor drops the parameters of other clusters than its own without a word, and a plugin never sees them. So
the two places if it does that are wrapped: `flexible_init`, which makes the executor, and the method that
updates parameters. For other clusters they do what they did. One thing is kept as it was there: AutoExecutor's
deprecated names without a prefix (`partition` for `slurm_partition`), which it would give to the last executor
with such a parameter.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from submitit.auto import auto
from submitit.core.core import Executor

from zslurm.submit.plugin.parameters import GENERIC, OWN, PARAMETERS, UnknownParameter, unknown_parameter

_SLURM = "slurm_"
_MARK = "_wrapped_by_zslurm"


def pass_parameters_on(name: str) -> None:
    """Wrap AutoExecutor, once: what is given as `slurm_X` reaches the executor `name`."""
    if hasattr(auto.flexible_init, _MARK):
        return
    auto.flexible_init = _wrapped_init(auto.flexible_init, name)
    auto.AutoExecutor._internal_update_parameters = _wrapped_update(  # type: ignore[method-assign]
        auto.AutoExecutor._internal_update_parameters, name
    )


def _wrapped_init(original: Callable[..., Executor], name: str) -> Callable[..., Executor]:
    @functools.wraps(original)
    def init(cls: type[Executor], folder: Any, **kwargs: Any) -> Executor:
        return original(cls, folder, **(renamed(kwargs, name) if cls.name() == name else kwargs))

    setattr(init, _MARK, True)
    return init


def _wrapped_update(original: Callable[..., None], name: str) -> Callable[..., None]:
    prefix = f"{name}_"

    @functools.wraps(original)
    def update(self: auto.AutoExecutor, **kwargs: Any) -> None:
        if self.cluster == name:
            for keyword in kwargs:
                if (
                    keyword.startswith((_SLURM, prefix))
                    and keyword.partition("_")[2] not in PARAMETERS | OWN | GENERIC
                ):
                    raise UnknownParameter(unknown_parameter(keyword))
            kwargs = renamed(kwargs, name)
        else:
            self._deprecated_args = {
                old: f"{_SLURM}{old}" if new.startswith(prefix) else new
                for old, new in self._deprecated_args.items()
                if not new.startswith(prefix) or old in PARAMETERS
            }
        original(self, **kwargs)

    return update


def renamed(parameters: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the parameters with `slurm_X` as `NAME_X`; if both names are given, NAME wins."""
    slurm = {f"{name}_{key.removeprefix(_SLURM)}": key for key in parameters if key.startswith(_SLURM)}
    kept = {key: value for key, value in parameters.items() if not key.startswith(_SLURM)}
    return {new: parameters[old] for new, old in slurm.items()} | kept
