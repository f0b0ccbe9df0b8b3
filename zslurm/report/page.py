"""The report as one HTML page that opens from a file: style, script and pictures are inside."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from zslurm import __version__
from zslurm.core.console import harmless
from zslurm.report.page_parts import ReportPage

_TEMPLATES = Path(__file__).parent / "templates"


def as_html(report: ReportPage) -> str:
    """Return the page."""
    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.tests["a"] = _is_a
    template = environment.get_template("page.html.j2")
    return harmless(template.render(report=report, version=__version__))


def _is_a(value: Any, kind: str) -> bool:
    return type(value).__name__ == kind
