"""CHANGELOG.md lists every option and key that has a new name."""

from __future__ import annotations

import re
from collections import Counter

from tests.checkout import ROOT
from zslurm.cli.commands import RENAMED_OPTIONS
from zslurm.config.renamed_keys import RENAMED

TEXT = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_every_renamed_option_is_listed() -> None:
    rows = [
        f"| `zslurm {command}` | `{old}` | `{new}`"
        for command, names in RENAMED_OPTIONS.items()
        for old, new in names.items()
    ]
    assert rows
    assert [row for row in rows if row not in TEXT] == []


def test_every_renamed_key_is_listed() -> None:
    rows = [f"| `{section}.{old}` | `{section}.{new}` |" for (section, old), new in RENAMED.items()]
    assert rows
    assert [row for row in rows if row not in TEXT] == []


def test_merges_left_no_conflict_and_no_entry_twice() -> None:
    assert not re.search(r"^(<{7}|={7}$|>{7})", TEXT, re.MULTILINE)
    entries = [" ".join(entry.split()) for entry in re.split(r"^(?:- |#)", TEXT, flags=re.MULTILINE)]
    assert [entry for entry, count in Counter(entries).items() if count > 1 and len(entry) > 40] == []
