"""Fixtures of the profiles' tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from zslurm.cluster import profile


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the site's profiles, in a separate place."""
    folder = tmp_path / "site"
    monkeypatch.setattr(profile, "SITE_PROFILES", folder)
    return folder
