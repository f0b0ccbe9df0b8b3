"""What a check is, what it says, and how checks are found: one file for each in `checks/`."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal

from zslurm.core.errors import ConfigError

if TYPE_CHECKING:
    from zslurm.hardware.node_sources import Sources


class Status(StrEnum):
    """The four words of a check, from good to bad. What could not be read is `unavailable`, never `pass`."""

    PASS = "pass"
    UNAVAILABLE = "unavailable"
    WARN = "warn"
    FAIL = "fail"

    @property
    def rank(self) -> int:
        """0 for pass; the worse, the higher."""
        return list(Status).index(self)


@dataclass(frozen=True)
class Outcome:
    """What a check says of one machine.

    Attributes:
        reason: what was found, with its numbers, in one line.
        remedy: what to do about it; empty where there is nothing to do.
        alike: what must be the same on every node, by name; None is what could not be read.
        data: what `compare` of the check wants to know of each node.
        blames: whether a failure is this machine's own; not where machines differ and none is known to be right.
    """

    status: Status
    reason: str
    remedy: str = ""
    alike: Mapping[str, str | None] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict)
    blames: bool = True

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Outcome:
        """The outcome of `to_json`."""
        return cls(**(dict(value) | {"status": Status(value["status"])}))


def passed(reason: str, **more: Any) -> Outcome:
    """All is well."""
    return Outcome(Status.PASS, reason, **more)


def warned(reason: str, remedy: str, **more: Any) -> Outcome:
    """Training works, but slower or less safely than it could."""
    return Outcome(Status.WARN, reason, remedy, **more)


def failed(reason: str, remedy: str, **more: Any) -> Outcome:
    """Do not train here."""
    return Outcome(Status.FAIL, reason, remedy, **more)


def unavailable(reason: str, remedy: str = "", **more: Any) -> Outcome:
    """It could not be found out."""
    return Outcome(Status.UNAVAILABLE, reason, remedy, **more)


def merged(outcomes: Sequence[Outcome]) -> Outcome:
    """One outcome for all that is said of a machine by one check; the first is its own."""
    own, problems = outcomes[0], [outcome for outcome in outcomes if outcome.status is not Status.PASS]
    blames = any(outcome.blames for outcome in problems if outcome.status is Status.FAIL)
    fine = outcomes[-1].reason
    return worst(problems, fine, alike=own.alike, data=own.data, blames=blames or not problems)


def worst(problems: Sequence[Outcome], fine: str, **more: Any) -> Outcome:
    """One outcome for several findings of a check: the worst status, all reasons, every remedy once."""
    if not problems:
        return passed(fine, **more)
    ordered = sorted(problems, key=lambda problem: -problem.status.rank)
    remedies = dict.fromkeys(problem.remedy for problem in ordered if problem.remedy)
    reasons = "; ".join(problem.reason for problem in ordered)
    return Outcome(ordered[0].status, reasons, "; ".join(remedies), **more)


@dataclass(frozen=True)
class NodeData:
    """A node's `Outcome.data`, and the times of its answer.

    Attributes:
        sent: when it was asked, by the clock here.
        began: when it began, by its own clock.
        ended: when it answered, by its own clock.
        received: when the answer came, by the clock here.
    """

    data: Mapping[str, Any]
    sent: float = 0.0
    began: float = 0.0
    ended: float = 0.0
    received: float = 0.0


@dataclass(frozen=True)
class Check:
    """One thing that is looked at.

    Attributes:
        name: as in `--only NAME`; also its file's.
        group: checks of one group are shown together.
        about: what it looks at, in one line.
        where: on the login node, on compute nodes, or both.
        examine: looks, and says what it found; None where the check does not apply to this cluster.
        compare: looks at the data of all nodes together; says what is wrong, by node.
        drift: what it is where a node's `alike` differs from that of most nodes.
        on_request: runs only when it is asked for (--only, --bars).
        uses_gpus: takes GPU memory, so that it waits for the checks that look at idle GPUs.
        patience: how many times `check_s` it may take.
    """

    name: str
    group: str
    about: str
    where: Literal["login", "node", "both"]
    examine: Callable[[Sources], Outcome | None]
    compare: Callable[[Mapping[str, NodeData], Sources], Mapping[str, Outcome]] | None = None
    drift: Status = Status.FAIL
    on_request: bool = False
    uses_gpus: bool = False
    patience: float = 1.0

    def runs_on(self, place: Literal["login", "node"]) -> bool:
        return self.where in (place, "both")


GROUPS = ("slurm", "gpu", "network", "limits", "system", "storage", "bars")


def all_checks() -> list[Check]:
    """Every check: each module in `checks/` has one, called CHECK. Ordered by group, then by name."""
    from zslurm.doctor import checks

    found = [
        importlib.import_module(f"{checks.__name__}.{module.name}").CHECK
        for module in pkgutil.iter_modules(checks.__path__)
    ]
    return sorted(found, key=lambda check: (GROUPS.index(check.group), check.name))


def chosen_checks(only: Iterable[str], skip: Iterable[str], *, bars: bool = False) -> list[Check]:
    """The checks that a user asked for.

    Args:
        only: names; empty is all that need not be asked for.
        skip: names.
        bars: also those that load the machine.

    Raises:
        ConfigError: no check has this name.
    """
    known = all_checks()
    only, skip = list(only), list(skip)
    for name in (*only, *skip):
        if name not in {check.name for check in known}:
            raise ConfigError(f"{name}: there is no such check; `zslurm doctor --list` shows them")
    return [
        check
        for check in known
        if check.name not in skip and (check.name in only or (not only and (not check.on_request or bars)))
    ]
