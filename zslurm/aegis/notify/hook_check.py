"""`zslurm aegis notify`: whether the hooks of a run work, before the night in which they are needed."""

from __future__ import annotations

import difflib
import os
import time
from collections.abc import Iterator

from zslurm.aegis.notify.hooks import hooks, message
from zslurm.checkpoint_tools.plain import reason_of
from zslurm.config.spec import RunSpec
from zslurm.core.errors import CheckFailed, ConfigError
from zslurm.run.events import KINDS, NotifyTest
from zslurm.run.events.event import from_row


def try_hooks(spec: RunSpec) -> Iterator[str]:
    """Send a sample event through every hook; a line for each that took it.

    Raises:
        ConfigError: there is no hook, or `aegis.notify.events` names what never happens.
        CheckFailed: some hook did not take it; a line for each.
    """
    settings = spec.aegis.notify
    if settings.command is None and settings.url is None and not settings.apprise:
        raise ConfigError(
            "aegis.notify: no hook; set aegis.notify.command, aegis.notify.url or aegis.notify.apprise"
        )
    for kind in settings.events:
        if kind not in KINDS:
            near = difflib.get_close_matches(kind, KINDS, 1)
            meant = f"; did you mean `{near[0]}`?" if near else "; docs/run-directory.md lists them"
            raise ConfigError(f"aegis.notify.events: there are no events `{kind}`{meant}")
    values = {name: value for name, value in spec.cluster.env.items() if value is not None}
    sample = message(from_row({"time": time.time(), "event": NotifyTest.NAME}), {"run": spec.run.name})
    failed = []
    for hook in hooks(settings, {**os.environ, **values}):
        try:
            hook.deliver(sample)
        except Exception as error:  # a hook is other people's code; whatever is wrong with it is the answer
            failed.append(f"aegis.notify.{hook.name}: {reason_of(error)}")
        else:
            yield f"aegis.notify.{hook.name} took the event"
    if failed:
        raise CheckFailed("\n".join(failed))
