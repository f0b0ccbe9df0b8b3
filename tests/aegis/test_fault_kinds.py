"""The table of fault kinds: it is consistent, the only one, and docs/policy.md shows it as it is."""

from __future__ import annotations

import copy
import json
import pickle
import re
from typing import Any

import pytest

from tests.checkout import DOCS, ROOT
from zslurm.aegis import fault_kinds
from zslurm.aegis.fault_kinds import FAULT_KINDS, FaultKind, fault_kind
from zslurm.aegis.logs.prefilter import TableError
from zslurm.aegis.logs.signatures import Signatures
from zslurm.aegis.policy.policy import _MOST_REFUSALS
from zslurm.aegis.types import Fault
from zslurm.config.aegis import AegisSection

DOCUMENT = DOCS / "policy.md"
WHILE_RUNNING = {"give up": "ends it", "tolerate": "ends it if it lasts", "record": "goes on"}
EXCLUDES = {1: "at once", 2: "the 2nd time", 3: "the 3rd time", None: "never"}
THEN = {
    "retry": "start again",
    "wait": "wait, then start again",
    "ask again": f"wait, try up to {_MOST_REFUSALS} times, then stop",
    "test": "start again; test the GPU",
    "stop": "stop",
    "gpu_oom": "`aegis.gpu_oom`",
    "requeue": "requeue",
    "time limit": "requeue",
    "slurm": "leave it to Slurm",
}


def row(kind: FaultKind) -> list[str]:
    """A line of the document's table."""
    excludes = EXCLUDES[kind.exclude_after]
    if kind.lasting:
        excludes += ", or if it lasts"
    if kind.must_leave:
        excludes += ", or stops"
    cells = [kind.message, WHILE_RUNNING[kind.while_running], excludes, THEN[kind.then]]
    return [f"`{kind}`", *cells]


def test_the_document_shows_the_table() -> None:
    lines = [line for line in DOCUMENT.read_text().splitlines() if line.startswith("| `")]
    shown = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert shown == [row(kind) for kind in FAULT_KINDS.values() if not kind.advisory]


def test_the_document_names_the_advisory_kinds() -> None:
    (paragraph,) = [p for p in DOCUMENT.read_text().split("\n\n") if p.startswith("Advisory kinds")]
    assert re.findall(r"`(\w+)`", paragraph) == [kind for kind in FAULT_KINDS.values() if kind.advisory]


def test_the_settings_that_the_document_names_exist() -> None:
    for name in re.findall(r"`aegis\.([a-z_.]+)(?:: \w+)?`", DOCUMENT.read_text()):
        section: Any = AegisSection()
        for part in name.split("."):
            section = getattr(section, part)


@pytest.mark.parametrize("kind", FAULT_KINDS.values())
def test_a_row_contradicts_itself_nowhere(kind: FaultKind) -> None:
    assert kind.message
    assert kind.exclude_after == 1 or not kind.certain
    assert kind.exclude_after == 1 or kind.then == "requeue" or not kind.must_leave
    assert kind.while_running == "tolerate" or not kind.lasting
    assert kind.then == "retry" or kind.exclude_after is None
    assert not kind.advisory or (kind.while_running, kind.exclude_after, kind.then) == ("record", None, "retry")


def test_each_kind_has_a_constant_of_its_name() -> None:
    constants = {name: value for name, value in vars(fault_kinds).items() if isinstance(value, FaultKind)}
    assert {name.lower() for name in constants} == {*FAULT_KINDS, "unknown"}


def test_every_kind_that_a_log_can_show_has_advice() -> None:
    for rule in Signatures.load().rules:
        assert rule.match.advice


def test_patterns_of_a_kind_that_the_table_does_not_have_are_refused() -> None:
    text = """
prefilter: [fire]
ignore: []
kinds:
  gpu_on_fire:
    rules: [{any: [fire], matches: 'fire', rejects: 'water'}]
"""
    with pytest.raises(TableError, match="gpu_on_fire"):
        Signatures.of(text)


def test_no_kind_is_named_by_a_bare_string_in_the_source() -> None:
    """Names that are also something else: roles, an event, a check of the doctor, an action of the policy."""
    also = {"benign", "teardown", "agent_lost", "memlock", "gpu_oom"}
    names = "|".join(name for name in map(str, FAULT_KINDS) if name not in also)
    found = [
        f"{path}:{number}"
        for path in sorted((ROOT / "zslurm" / "aegis").rglob("*.py"))
        if path.name != "fault_kinds.py"
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if re.search(rf"""["'](?:{names})["']""", line)
    ]
    assert found == []


def test_a_kind_is_its_name_in_events_and_copies() -> None:
    fault = Fault.of_kind(fault_kinds.NODE_DEAD, 1.0, "srun", "node0 failed", node="node0")
    assert json.loads(json.dumps(fault.fields()))["kind"] == "node_dead"
    assert Fault.of(fault.fields()) == fault
    assert Fault.of(fault.fields()).kind is fault_kinds.NODE_DEAD
    assert pickle.loads(pickle.dumps(fault)).kind is copy.deepcopy(fault).kind is fault_kinds.NODE_DEAD


def test_a_kind_that_nobody_knows_is_treated_mildly() -> None:
    kind = fault_kind("gpu_on_fire")
    assert kind == "gpu_on_fire"
    assert (kind.message, kind.while_running, kind.exclude_after) == ("gpu on fire", "record", None)
