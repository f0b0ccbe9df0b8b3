"""CHANGELOG.md is whole."""

from __future__ import annotations

import re
from collections import Counter

from tests.checkout import ROOT

TEXT = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_merges_left_no_conflict_and_no_entry_twice() -> None:
    assert not re.search(r"^(<{7}|={7}$|>{7})", TEXT, re.MULTILINE)
    entries = [" ".join(entry.split()) for entry in re.split(r"^(?:- |#)", TEXT, flags=re.MULTILINE)]
    assert [entry for entry, count in Counter(entries).items() if count > 1 and len(entry) > 40] == []
