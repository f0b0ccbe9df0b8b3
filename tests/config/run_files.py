"""Run files for tests of the configuration: real files, resolved as the command line resolves them."""

from __future__ import annotations

from pathlib import Path

import pytest

from zslurm.config import yaml12
from zslurm.config.layers import Override
from zslurm.config.load import Resolved, resolve
from zslurm.core.errors import ConfigError

PHASES = """\
phases:
  - tokens: 960
    context: 16
    global_batch: 6
    micro_batch: 2
    lr: 1e-3
"""


def write(path: Path, text: str) -> Path:
    """A file with this text."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def resolve_text(directory: Path, text: str, *overrides: str | Override, profile: str | None = None) -> Resolved:
    """Resolve `text` as DIRECTORY/run.yaml, over the text of a profile and under `--set` overrides."""
    run_file = write(directory / "run.yaml", text)
    laid_under = []
    if profile is not None:
        path = write(directory / "lab.yaml", profile)
        laid_under = [(yaml12.read(path), str(path))]
    return resolve(
        run_file,
        profile=laid_under,
        overrides=[each if isinstance(each, Override) else Override.parse(each) for each in overrides],
    )


def complaints(directory: Path, text: str, *overrides: str | Override, profile: str | None = None) -> list[str]:
    """The lines that refuse `text`; the directory is left out of them."""
    with pytest.raises(ConfigError) as caught:
        resolve_text(directory, text, *overrides, profile=profile)
    return str(caught.value).replace(f"{directory}/", "").splitlines()


def complaint(directory: Path, text: str, *overrides: str | Override, profile: str | None = None) -> str:
    """The one line that refuses `text`."""
    (line,) = complaints(directory, text, *overrides, profile=profile)
    return line
