"""What a check is, what it finds, and how checks are found: what `@check` decorates in a file of `checks/`."""

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
    """The four results of a check, from good to bad. What could not be read is `unavailable`, never `pass`."""

    PASS = "pass"
    UNAVAILABLE = "unavailable"
    WARN = "warn"
    FAIL = "fail"

    @property
    def rank(self) -> int:
        """0 for pass; the worse, the higher."""
        return list(Status).index(self)


@dataclass(frozen=True)
class CheckOutcome:
    """What a check found on one machine.

    Attributes:
        reason: what was found, with its numbers, in one line.
        remedy: what to do about it; empty if there is nothing to do.
        must_match: what must be the same on every node, by name; None is what could not be read.
        data: what `compare` of the check wants to know of each node.
        node_fault: whether a failure is this machine's own; not if machines differ and none is known right.
    """

    status: Status
    reason: str
    remedy: str = ""
    must_match: Mapping[str, str | None] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict)
    node_fault: bool = True

    def to_json(self) -> dict[str, Any]:
        """Return plain values; readers of the report know `must_match` as `alike`."""
        return {"alike" if name == "must_match" else name: value for name, value in asdict(self).items()}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> CheckOutcome:
        """Return the outcome that `to_json` gave."""
        fields = {"must_match" if name == "alike" else name: field for name, field in value.items()}
        return cls(**(fields | {"status": Status(value["status"])}))


def passed(reason: str, **more: Any) -> CheckOutcome:
    """Return the outcome if all is well."""
    return CheckOutcome(Status.PASS, reason, **more)


def warned(reason: str, remedy: str, **more: Any) -> CheckOutcome:
    """Return the outcome if training works, but slower or less safely than it could."""
    return CheckOutcome(Status.WARN, reason, remedy, **more)


def failed(reason: str, remedy: str, **more: Any) -> CheckOutcome:
    """Return the outcome of a machine that must not train."""
    return CheckOutcome(Status.FAIL, reason, remedy, **more)


def unavailable(reason: str, remedy: str = "", **more: Any) -> CheckOutcome:
    """Return the outcome if it could not be found out."""
    return CheckOutcome(Status.UNAVAILABLE, reason, remedy, **more)


def merged(outcomes: Sequence[CheckOutcome]) -> CheckOutcome:
    """Merge all outcomes of one check for one machine; the first is the machine's."""
    first, problems = outcomes[0], [outcome for outcome in outcomes if outcome.status is not Status.PASS]
    node_fault = any(outcome.node_fault for outcome in problems if outcome.status is Status.FAIL) or not problems
    return worst(
        problems, outcomes[-1].reason, must_match=first.must_match, data=first.data, node_fault=node_fault
    )


def worst(problems: Sequence[CheckOutcome], fine: str, **more: Any) -> CheckOutcome:
    """Merge several findings of a check: the worst status, all reasons, every remedy once."""
    if not problems:
        return passed(fine, **more)
    ordered = sorted(problems, key=lambda problem: -problem.status.rank)
    remedies = dict.fromkeys(problem.remedy for problem in ordered if problem.remedy)
    reasons = "; ".join(problem.reason for problem in ordered)
    return CheckOutcome(ordered[0].status, reasons, "; ".join(remedies), **more)


MOST_NAMED = 4


def first_few(names: Sequence[str]) -> str:
    """Return names in one line, such as `a, b, c, d and 8 more`."""
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return f"{', '.join(names[:MOST_NAMED])}{more}"


@dataclass(frozen=True)
class NodeData:
    """A node's `CheckOutcome.data`, and the times of its answer.

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
        name: as in `--only NAME`.
        group: checks of one group are shown together.
        about: what it looks at, in one line.
        where: on the login node, on compute nodes, or both.
        run: looks, and returns what it found; None if the check does not apply to this cluster.
        compare: looks at the data of all nodes together, and returns what is wrong, by node.
        inconsistent: its status if a node's `must_match` differs from most nodes.
        on_request: runs only when it is asked for by --only.
        uses_gpus: takes GPU memory, so that it waits for the checks that look at idle GPUs.
        time_factor: how many times `check_s` it may take.
    """

    name: str
    group: str
    about: str
    where: Literal["login", "node", "both"]
    run: Callable[[Sources], CheckOutcome | None]
    compare: Callable[[Mapping[str, NodeData], Sources], Mapping[str, CheckOutcome]] | None = None
    inconsistent: Status = Status.FAIL
    on_request: bool = False
    uses_gpus: bool = False
    time_factor: float = 1.0

    def runs_on(self, machine: Literal["login", "node"]) -> bool:
        """Return whether the check runs on a login node, or on a compute node."""
        return self.where in (machine, "both")


def check(
    group: str, about: str, where: Literal["login", "node", "both"], **options: Any
) -> Callable[[Callable[[Sources], CheckOutcome | None]], Check]:
    """Make a check of the function that this decorates: `gpu_ecc` is the check gpu-ecc.

    `options` are the other fields of `Check`.
    """
    return lambda run: Check(run.__name__.replace("_", "-"), group, about, where, run, **options)


GROUPS = ("slurm", "gpu", "network", "limits", "system", "storage", "speed")


def all_checks() -> list[Check]:
    """Return the checks in all files of `checks/`, ordered by group, then by name."""
    from zslurm.doctor import checks

    modules = [f"{checks.__name__}.{module.name}" for module in pkgutil.iter_modules(checks.__path__)]
    defined = (value for name in modules for value in vars(importlib.import_module(name)).values())
    checks_defined = [value for value in defined if isinstance(value, Check)]
    return sorted(checks_defined, key=lambda check: (GROUPS.index(check.group), check.name))


def chosen_checks(only: Iterable[str], skip: Iterable[str]) -> list[Check]:
    """Return the checks that a user asked for.

    Args:
        only: their names; if there are none, all checks that run without being asked for.
        skip: names of checks to leave out.

    Raises:
        ConfigError: no check has this name.
    """
    every_check = all_checks()
    only, skip = list(only), list(skip)
    for name in (*only, *skip):
        if name not in {check.name for check in every_check}:
            raise ConfigError(f"{name}: there is no such check; `zslurm doctor --list` shows them")
    return [
        check
        for check in every_check
        if check.name not in skip and (check.name in only or (not only and not check.on_request))
    ]
