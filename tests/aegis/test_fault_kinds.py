"""The table of fault kinds: it is consistent, and the only one."""

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
from zslurm.aegis.types import Fault
from zslurm.config.aegis import AegisSection

DOCUMENT = DOCS / "policy.md"


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
