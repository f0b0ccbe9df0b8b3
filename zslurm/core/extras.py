"""Optional parts of an installation: which extra brings a package, and the line for one that is missing.

The distribution without extras is what a login node needs. The rest is in the extras of pyproject.toml; what needs
one imports it late, and a user without it gets one line.
"""

from __future__ import annotations

import importlib.util

from zslurm.core.errors import ConfigError

EXTRA_OF = {
    "torch": "train",
    "triton": "train",
    "tokenizers": "data",
    "pyarrow": "data",
    "zstandard": "data",
    "transformers": "hf",
    "safetensors": "hf",
    "matplotlib": "plots",
    "lm_eval": "eval",
}
"""The extra that installs each optional package."""


class MissingExtra(ConfigError):
    """A package that a command needs is not installed, and an extra would bring it."""

    def __init__(self, package: str) -> None:
        """Name the package and its extra."""
        extra = EXTRA_OF[package]
        line = f"this needs {package}, which is not installed here: pip install 'zslurm-train[{extra}]'"
        builds = "; docs/install.md has the builds of PyTorch for each GPU"
        super().__init__(line + builds * (package == "torch"))


def require(package: str) -> None:
    """Refuse to begin if a package is missing that what is started will import.

    Raises:
        MissingExtra: it is not installed.
    """
    if importlib.util.find_spec(package) is None:
        raise MissingExtra(package)


def missing_extra(error: ImportError) -> MissingExtra | None:
    """Return the error for a user if an import failed because an extra is not installed; else None."""
    package = (error.name or "").partition(".")[0]
    if package not in EXTRA_OF or not isinstance(error, ModuleNotFoundError):
        return None
    return MissingExtra(package)
