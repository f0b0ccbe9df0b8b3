"""How the tests on a real Slurm went on each version: results of `make soak-slurm RECORD=1`."""

from __future__ import annotations

import json
from collections.abc import Mapping

from docs.tables.markdown import RESULTS, table


def slurm_versions() -> str:
    """Return the tests that passed, of those that are not skipped, for each file and version of Slurm."""
    body = json.loads((RESULTS / "slurm_versions.json").read_text(encoding="utf-8"))
    files = sorted({file for rows in body.values() for file in rows})
    rows = ((f"`{file}`", *(_outcome(body[version].get(file)) for version in sorted(body))) for file in files)
    return table(("tests", *sorted(body)), rows)


def _outcome(row: Mapping[str, int] | None) -> str:
    if row is None:
        return "not run"
    return f"{row['passed']} of {row['passed'] + row['failed']}"


TABLES = (slurm_versions,)
