"""What an event is: one row of a run's events.jsonl or submissions.jsonl, as an object of the class of its kind.

The kinds are the classes in events/; the field `event` of a row (`action` in submissions.jsonl) names the kind.
Files outlive versions: further fields of a row are kept, a row of an unknown kind, or without a field that its
kind needs, is an `UnknownEvent`; an optional field with a value of another type counts as missing.

These classes are neither dataclasses nor pydantic models, because each command imports them: fifty of either would
take as long to build as the rest of `zslurm status` to import, and to check a row needs no more than `_fits`.
"""

from __future__ import annotations

import json
import types
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import (
    Any,
    ClassVar,
    Literal,
    NamedTuple,
    TypeVar,
    Union,
    dataclass_transform,
    get_args,
    get_origin,
    get_type_hints,
)

from zslurm.core.errors import ZslurmError
from zslurm.core.units import show_time
from zslurm.run.events import event_text

Row = Mapping[str, Any]
E = TypeVar("E", bound="Event")
Nodes = str | list[str]
"""Nodes as Slurm writes them, or their names."""

_HEADER = ("time", "event", "job_id", "attempt", "action")


@dataclass_transform(kw_only_default=True)
class _Fields:
    """Lets type checkers know the arguments of every event: its fields."""

    def __init__(self, **fields: Any) -> None:
        """Set the fields that are known; the others have their defaults."""
        vars(self).update(fields)


class Event(_Fields):
    """One thing that happened to a run. Fields without a default are in every row of the kind.

    Attributes:
        NAME: of the kind of event; the tag of its rows.
        CHANGES_STATE: it changes the state of the run, as `zslurm status` shows it.
        TEXT: the sentence that describes it, for `str.format` with the event as `event`; a kind whose sentence
            depends on more overrides `_sentence`.
        time: UNIX seconds; 0 if a damaged row has none.
        job_id: the job in which it happened.
        attempt: the attempt in which it happened, if it belongs to one.
        nodes: the nodes that it is about, if there are any.
        reason: why, in one line, if that is known.
    """

    NAME: ClassVar[str] = ""
    CHANGES_STATE: ClassVar[bool] = False
    TEXT: ClassVar[str] = ""
    time: float = 0.0
    job_id: str = ""
    attempt: int | None = None
    nodes: Nodes | None = None
    reason: str | None = None

    def __init_subclass__(cls, *, name: str = "", changes_state: bool = False) -> None:
        """Enter a class into the union under the name of its kind."""
        cls.NAME, cls.CHANGES_STATE = name, changes_state
        if name:
            CLASSES[name] = cls

    @classmethod
    def renew(cls, row: Row) -> Row:
        """Return the row without what is damaged in it."""
        return row

    def __repr__(self) -> str:
        return f"<{self.tag} of {show_time(self.time)}: {self.describe()}>"

    def fields(self) -> dict[str, Any]:
        """Return the fields that are set, by name, in the order in which they were set."""
        return {name: value for name, value in vars(self).items() if name != "_row"}

    @property
    def row(self) -> dict[str, Any]:
        """The event as it was recorded, or as it will be."""
        row = vars(self).get("_row")
        return dict(row) if row is not None else {"event": self.NAME, **self.fields()}

    @property
    def tag(self) -> str:
        """What the row calls itself, which for an unknown event is no kind of this version."""
        return self.NAME or _tag(self.row) or "?"

    @property
    def because(self) -> str:
        """The end of a sentence that gives the reason; empty if there is none."""
        return f": {self.reason}" if self.reason else ""

    @property
    def on_nodes(self) -> str:
        """The part of a sentence that names the nodes; empty if there are none."""
        return f" on {self.node_list}" if self.nodes else ""

    @property
    def node_list(self) -> str:
        """The nodes as a hostlist."""
        return event_text.node_list(self.nodes)

    def describe(self) -> str:
        """Return what happened as a sentence for a person who was just woken, or as fields if that fails."""
        try:
            return self._sentence()
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError, ZslurmError):  # damaged fields
            return self._as_fields()

    def _sentence(self) -> str:
        return self.TEXT.format(event=self) if self.TEXT else self._as_fields()

    def _as_fields(self) -> str:
        shown = {name: value for name, value in self.row.items() if name not in _HEADER and value is not None}
        return " ".join(
            f"{name}={value if isinstance(value, str) else json.dumps(value)}" for name, value in shown.items()
        )


def only_known(event: E) -> E:
    """Return an event without the fields that were set to None, so that its row does not have them."""
    fields_known = {name: value for name, value in event.fields().items() if value is not None}
    return type(event)(**fields_known)


class UnknownEvent(Event):
    """A row of a kind that this version does not know, or without what its kind needs."""


CLASSES: dict[str, type[Event]] = {}
"""The classes of the union by the name of their kind; filled when events/ is imported."""


@cache
def fields_of(name: str) -> Mapping[str, tuple[Any, bool]]:
    """Return type and necessity of each field of a kind of event."""
    cls = CLASSES.get(name, UnknownEvent)

    def is_needed(name: str) -> bool:
        owner = next(base for base in cls.__mro__ if name in vars(base).get("__annotations__", {}))
        return name not in vars(owner)

    hints = {name: hint for name, hint in get_type_hints(cls).items() if get_origin(hint) is not ClassVar}
    return {name: (hint, is_needed(name)) for name, hint in hints.items()}


class _Reading(NamedTuple):
    """How rows of a kind are read.

    Attributes:
        plain: types of JSON whose values fit a field, whatever they hold.
        others: the fields that values of further types may fit.
        needed: the fields that every row has.
    """

    plain: Mapping[str, frozenset[type]]
    others: Mapping[str, Any]
    needed: frozenset[str]


@cache
def _reading(kind: str) -> _Reading:
    fields = fields_of(kind)
    plain = {name: _plain_types(hint) for name, (hint, _) in fields.items()}
    others = {name: hint for name, (hint, _) in fields.items() if _has_other_types(hint)}
    return _Reading(plain, others, frozenset(name for name, (_, needed) in fields.items() if needed))


def _has_other_types(hint: Any) -> bool:
    if get_origin(hint) in (Union, types.UnionType):
        return any(map(_has_other_types, get_args(hint)))
    return not _plain_types(hint)


def _plain_types(hint: Any) -> frozenset[type]:
    if get_origin(hint) in (Union, types.UnionType):
        return frozenset[type]().union(*map(_plain_types, get_args(hint)))
    if hint is float:
        return frozenset({int, float})
    return frozenset({hint}) if hint in (int, str, bool, types.NoneType) else frozenset()


def from_row(row: Row) -> Event:
    """Return the event of a row; see the module for rows that do not fit."""
    cls = CLASSES.get(_tag(row), UnknownEvent)
    plain, others, needed = _reading(cls.NAME)
    renewed = cls.renew(row)
    body = {name: value for name, value in renewed.items() if name in plain and type(value) in plain[name]}
    for name, hint in others.items():
        if name in renewed and name not in body and _fits(renewed[name], hint):
            body[name] = renewed[name]
    if not needed <= body.keys():
        cls, body = UnknownEvent, {}
    body["_row"] = row
    event = cls.__new__(cls)
    event.__dict__ = body
    return event


def select(rows: Iterable[Row], *kinds: type[E]) -> Iterator[E]:
    """Yield the events of some kinds; of a run of some weeks most rows are of others and stay rows."""
    names = {kind.NAME for kind in kinds}
    for row in rows:
        if _tag(row) in names and isinstance(event := from_row(row), kinds):
            yield event


def _tag(row: Row) -> str:
    tag = row.get("event") or row.get("action") or ""
    return tag if type(tag) is str else str(tag)


def _fits(value: object, hint: Any) -> bool:
    """Return whether a value of JSON has a type."""
    if hint is Any:
        return True
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return any(_fits(value, arg) for arg in args)
    if origin is Literal:
        return value in args
    if origin is not None:
        if origin is list:
            return isinstance(value, list | tuple) and all(_fits(item, args[0]) for item in value)
        return isinstance(value, origin)
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, hint)
