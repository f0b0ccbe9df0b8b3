"""The table of treatments is consistent, and docs/policy.md names no setting that does not exist."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.checkout import DOCS
from zslurm.aegis.policy.responses import TREATMENTS, Treatment, treatment_of
from zslurm.config.aegis import AegisSection

DOCUMENT = DOCS / "policy.md"


def test_the_settings_that_the_document_names_exist() -> None:
    for name in re.findall(r"`aegis\.([a-z_.]+)(?:: \w+)?`", DOCUMENT.read_text()):
        section: Any = AegisSection()
        for part in name.split("."):
            section = getattr(section, part)


@pytest.mark.parametrize("kind", TREATMENTS)
def test_a_treatment_contradicts_itself_nowhere(kind: str) -> None:
    treatment = TREATMENTS[kind]
    assert treatment.words
    assert treatment.exclude_after == 1 or not treatment.certain
    assert treatment.exclude_after == 1 or treatment.then == "requeue" or not treatment.must_leave
    assert treatment.while_running == "tolerate" or not treatment.lasting
    assert treatment.then == "retry" or treatment.exclude_after is None


def test_a_kind_that_nobody_knows_is_treated_mildly() -> None:
    assert treatment_of("gpu_on_fire") == Treatment("gpu on fire")
