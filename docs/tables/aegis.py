"""What Aegis can be set to, and how it answers each kind of fault."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import resources

from pydantic import BaseModel

from docs.tables.markdown import table
from zslurm.aegis.core.policy.policy import MOST_REFUSALS
from zslurm.aegis.fault_kinds import FAULT_RULES, FaultKind, FaultRule, rule_of
from zslurm.config import yaml12
from zslurm.config.aegis import AegisSection


def aegis_settings() -> str:
    """Return every setting below `aegis`, with its default."""
    return table(("setting", "default", "what"), _settings(AegisSection()))


def _settings(section: BaseModel, prefix: str = "") -> Iterator[tuple[str, str, str | None]]:
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, BaseModel):
            yield from _settings(value, f"{prefix}{name}.")
        else:
            yield f"`{prefix}{name}`", _default(value), field.description


def _default(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, tuple):
        return ", ".join(f"`{item}`" for item in value)
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f"`{value:g}`" if isinstance(value, float) and value < 1e6 else f"`{value}`"


_WHILE_RUNNING = {"give up": "ends it", "tolerate": "ends it if it lasts", "record": "continues"}
_EXCLUDES = {1: "at once", 2: "the 2nd time", 3: "the 3rd time", None: "never"}
_THEN = {
    "retry": "start again",
    "wait": "wait, then start again",
    "ask again": f"wait, try up to {MOST_REFUSALS} times, then stop",
    "test": "start again; test the GPU",
    "stop": "stop",
    "gpu_oom": "`aegis.gpu_oom`",
    "requeue": "requeue",
    "time limit": "requeue",
    "slurm": "leave it to Slurm",
}


def responses() -> str:
    """Return how each kind of fault is answered."""
    head = ("fault", "meaning", "while it runs", "in memory", "excludes its node", "afterwards")
    return table(head, (_response(kind, rule) for kind, rule in FAULT_RULES.items() if not rule.advisory))


def _response(kind: FaultKind, rule: FaultRule) -> tuple[str, ...]:
    excludes, in_memory = _EXCLUDES[rule.exclude_after], {"": "", "rank": "ranks", "node": "node"}[rule.in_memory]
    if rule.lasting:
        excludes += ", or if it lasts"
    if rule.must_leave:
        excludes += ", or stops"
    return f"`{kind}`", rule.message, _WHILE_RUNNING[rule.while_running], in_memory, excludes, _THEN[rule.then]


def advisory_kinds() -> str:
    """Return the kinds of fault that are never a root cause."""
    rows = ((f"`{kind}`", rule.message) for kind, rule in FAULT_RULES.items() if rule.advisory)
    return table(("kind", "meaning"), rows)


_SCOPES = {
    "gpu": "a GPU",
    "nic": "a NIC",
    "node": "a node",
    "fabric": "the network",
    "storage": "storage",
    "scheduler": "Slurm",
    "user": "the program or its settings",
    "unknown": "unknown, or nothing",
}


def log_classes() -> str:
    """Return the classes of log lines, by what is broken and the role."""
    text = resources.files("zslurm.aegis.logs").joinpath("signatures.yaml").read_text(encoding="utf-8")
    found: dict[tuple[str, str], list[str]] = {}
    for kind in yaml12.parse(text, "signatures.yaml").data["kinds"]:
        rule = rule_of(kind)
        found.setdefault((rule.scope, rule.role), []).append(f"`{kind}`")
    order = list(_SCOPES)
    rows = sorted(found.items(), key=lambda row: order.index(row[0][0]))
    return table(
        ("what is broken", "role", "classes"),
        ((_SCOPES[scope], role, ", ".join(kinds)) for (scope, role), kinds in rows),
    )


TABLES = (
    aegis_settings,
    responses,
    advisory_kinds,
    log_classes,
)
