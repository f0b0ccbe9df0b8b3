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
from zslurm.aegis.fault_kinds import FAULT_RULES, FaultRule, rule_of
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


@pytest.mark.parametrize("rule", [pytest.param(rule, id=kind) for kind, rule in FAULT_RULES.items()])
def test_a_row_contradicts_itself_nowhere(rule: FaultRule) -> None:
    assert rule.message
    assert rule.exclude_after == 1 or not rule.certain
    assert rule.exclude_after == 1 or rule.then == "requeue" or not rule.must_leave
    assert rule.while_running == "tolerate" or not rule.lasting
    assert rule.then == "retry" or rule.exclude_after is None
    assert not rule.advisory or (rule.while_running, rule.exclude_after, rule.then) == ("record", None, "retry")


def test_each_kind_has_a_constant_of_its_name() -> None:
    names = {name.lower(): value for name, value in vars(fault_kinds).items() if name.isupper()}
    assert all(names.get(kind) == kind for kind in FAULT_RULES)


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
    """Names that are also something else: roles, an event, a check of the doctor, an action of the policy.

    The simulated world is left out: it has its own names for what happens, some of which are those of kinds.
    """
    also = {"benign", "teardown", "agent_lost", "memlock", "gpu_oom"}
    names = "|".join(name for name in FAULT_RULES if name not in also)
    found = [
        f"{path}:{number}"
        for path in sorted((ROOT / "zslurm" / "aegis").rglob("*.py"))
        if path.name != "fault_kinds.py" and path.parent.name != "simulation"
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if re.search(rf"""["'](?:{names})["']""", line)
    ]
    assert found == []


def test_a_kind_is_its_name_in_events_and_copies() -> None:
    fault = Fault.of_kind(fault_kinds.NODE_DEAD, 1.0, "srun", "node0 failed", node="node0")
    assert json.loads(json.dumps(fault.fields()))["kind"] == "node_dead"
    assert Fault.of(fault.fields()) == fault
    assert Fault.of(fault.fields()).rule is fault_kinds.FAULT_RULES[fault_kinds.NODE_DEAD]
    assert pickle.loads(pickle.dumps(fault)) == copy.deepcopy(fault) == fault


def test_a_kind_that_nobody_knows_is_treated_mildly() -> None:
    rule = rule_of("gpu_on_fire")
    assert (rule.message, rule.while_running, rule.exclude_after) == ("gpu on fire", "record", None)
