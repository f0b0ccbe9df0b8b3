"""The table of all trials as JSON, which `schema.json` describes, and as a page."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
import jsonschema

_HERE = Path(__file__).parent
_KINDS = {
    "survived": "survived", "stopped": "stopped", "survived with help": "help", "hangs": "hangs",
    "ended": "hangs", "not a number": "hangs", "restarts for ever": "ever",
}  # fmt: skip


class BadTable(Exception):
    """A file is no table of this benchmark."""


def read(path: Path) -> dict[str, Any]:
    """Read a table.

    Raises:
        BadTable: the file cannot be read, or is not as `schema.json` says.
    """
    try:
        table: dict[str, Any] = json.loads(path.read_text())
        jsonschema.validate(table, json.loads((_HERE / "schema.json").read_text()))
    except (OSError, ValueError) as error:
        raise BadTable(f"{path}: {error}") from error
    except jsonschema.ValidationError as error:
        raise BadTable(f"{path}: {'.'.join(map(str, error.absolute_path)) or 'table'}: {error.message}") from error
    return table


def page(table: dict[str, Any]) -> str:
    """Return the page of a table."""
    plans = list(dict.fromkeys(row["plan"] for row in table["trials"]))
    cells = {
        (plan, row["contender"]): _cell(
            [each for each in table["trials"] if (each["plan"], each["contender"]) == (plan, row["contender"])]
        )
        for plan in plans
        for row in table["summary"]
    }
    environment = jinja2.Environment(loader=jinja2.FileSystemLoader(_HERE), autoescape=True)
    return environment.get_template("page.html.j2").render(table=table, plans=plans, cells=cells, show=_show)


def _cell(trials: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Return the text of a cell: the outcome of most of its trials, and the median of their seconds."""
    if not trials:
        return {"kind": "not", "text": "", "small": ""}
    outcome = statistics.mode(trial["outcome"] for trial in trials)
    alike = [trial for trial in trials if trial["outcome"] == outcome]
    seconds = [trial["first_new_step_s"] for trial in alike if trial.get("first_new_step_s") is not None]
    lost = statistics.median_low(trial["steps_lost"] for trial in alike)
    small = f"{statistics.median(seconds):.1f} s, {lost} steps lost" if seconds else ""
    others = len(trials) - len(alike)
    text = outcome if not others else f"{outcome} in {len(alike)} of {len(trials)}"
    return {"kind": _KINDS.get(outcome, "not"), "text": text, "small": small}


def _show(value: float | None) -> str:
    return "" if value is None else f"{value:g}"
