"""docs/rccl.md has the limits and misspelt names of the rules, and its profiles are valid."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.checkout import DOCS
from tests.cluster.places import own
from zslurm.cluster.rccl.rules import rules, variables
from zslurm.cluster.site import resolve_profile

DOCUMENT = DOCS / "rccl.md"


def test_the_figures_are_those_of_the_limits() -> None:
    text, limits = DOCUMENT.read_text(encoding="utf-8"), rules().limits
    assert f"NCCL_IB_TIMEOUT={limits.ib_timeout}" in text
    assert f"NCCL_IB_RETRY_CNT={limits.ib_retries}" in text
    assert f"{limits.network_patience_s} s" in text


def test_every_misspelt_name_is_listed() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    for entry in variables().misspelt:
        assert f"`{entry.name}`" in text


@pytest.mark.parametrize("document", ["clusters.md", "rccl.md"])
def test_profiles_shown_in_documents_are_valid(document: str, site: Path) -> None:
    text = (DOCUMENT.parent / document).read_text(encoding="utf-8")
    examples = re.findall(r"^```yaml\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert examples
    for example in examples:
        own("lab", example)
        resolve_profile("lab")
