"""Wait for a run to come to rest."""

from __future__ import annotations

import time
from collections.abc import Iterator

from zslurm.run.run_dir import RunDir
from zslurm.run.state.run_state import RunState, look_all

_POLL_LOCAL_S = 0.3
_POLL_SLURM_S = 2.0


def states_until_rest(run: RunDir, *, deadline: float | None = None) -> Iterator[RunState]:
    """Yield the state of a run again and again; the last one is that in which it rests.

    With a `deadline` (of time.monotonic) the last one may be active.
    """
    while True:
        state = look_all([run], cached=True)[0]
        yield state
        remaining_s = float("inf") if deadline is None else deadline - time.monotonic()
        if not state.active or remaining_s <= 0:
            return
        time.sleep(min(remaining_s, _POLL_LOCAL_S if state.launcher == "local" else _POLL_SLURM_S))
