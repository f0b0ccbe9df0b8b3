"""What was done about a run's attempts beside what another policy would have done, as a table and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from checkpoint_tools.quantities import show_duration
from zslurm.aegis.policy.replay import Replayed
from zslurm.config.aegis import AegisSection
from zslurm.core.units import show_time

COLUMNS = ("attempt", "ended", "outcome", "done", "policy", "differs")


def as_row(one: Replayed) -> list[str]:
    """One line of the table."""
    differs = "yes" if one.differs else "" if one.done is not None else "?"
    return [str(one.attempt), show_time(one.ended), one.outcome, _done(one), _policy(one), differs]


def _done(one: Replayed) -> str:
    if one.done is None:
        return "nothing was decided"
    watched = "" if one.done.mode == "act" else f" (mode {one.done.mode}: not done)"
    return f"{one.done.action}{watched}: {one.done.reason}"


def _policy(one: Replayed) -> str:
    if one.goes_on:
        return "let the attempt go on"
    early = "" if one.gives_up_after is None else f"end it after {show_duration(one.gives_up_after)}, "
    assumed = "; which nodes there were is assumed" if one.assumed else ""
    return f"{early}{one.policy.action}: {one.policy.reason}{assumed}"


def as_json(path: Path, settings: AegisSection, found: Sequence[Replayed]) -> dict[str, Any]:
    """The settings of the policy, and every attempt."""
    return {
        "events": str(path),
        "settings": settings.model_dump(mode="json"),
        "attempts": [
            {
                "attempt": one.attempt,
                "ended": one.ended,
                "outcome": one.outcome,
                "done": asdict(one.done) if one.done is not None else None,
                "policy": one.policy.fields(),
                "gives_up_after_s": one.gives_up_after,
                "goes_on": one.goes_on,
                "assumed": one.assumed,
                "differs": one.differs,
            }
            for one in found
        ],
    }
