"""The Python standard library's sources: real text on every machine (11 to 31 MB, by distribution)."""

from __future__ import annotations

import sysconfig
from pathlib import Path

from zslurm.train.errors import DataError

DEMO_CORPUS_GLOB = "*.py"


def demo_corpus_sources() -> Path:
    """Return the directory of the running Python's library.

    To be searched for DEMO_CORPUS_GLOB; `sources.EXCLUDED_DIRECTORIES` leaves installed packages out.

    Raises:
        DataError: this Python came without its sources.
    """
    directory = Path(sysconfig.get_path("stdlib"))
    if not (directory / "argparse.py").is_file():
        raise DataError(
            f"{directory}: this Python has no sources of its standard library; "
            "install them (on Debian: libpython3-stdlib) or use other text"
        )
    return directory
