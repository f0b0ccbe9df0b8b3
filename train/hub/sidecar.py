"""zslurm.json: what an export knows and transformers' format has no place for, so that importing it loses nothing.

    {"skip_rule": "zero", "balancing_bias": [[..], ..]}

transformers 5.23 sets the skip class's balancing bias to -1 whenever it loads a model (its `_init_weights`
assigns it outside of the functions that spare loaded tensors), so a trained one is lost and tokens are routed
elsewhere. Only differences between a layer's biases decide, so an export shifts each layer's biases until the
skip class has -1: the choice is the same (to rounding at 6e-8), and the loader's assignment changes nothing. The
biases as they were trained are kept here and come back on import, unless the folder's own were changed since.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from zslurm.checkpoint_tools.plain import in_words, load_json
from zslurm.train.errors import HubError

FILE = "zslurm.json"
LOADED_SKIP_BIAS = -1.0
_SKIP_RULES = ("identity", "zero")


def shifted(bias_LC: NDArray[np.float32]) -> NDArray[np.float32]:
    """Balancing biases that choose the same classes and give the skip class, the last, exactly -1."""
    exact = bias_LC.astype(np.float64)
    return (exact - exact[:, -1:] + LOADED_SKIP_BIAS).astype(np.float32)


@dataclass(frozen=True)
class Sidecar:
    """The content of zslurm.json."""

    skip_rule: str
    balancing_bias: NDArray[np.float32]

    def write(self, directory: Path) -> None:
        """Write it into a folder."""
        content = {"skip_rule": self.skip_rule, "balancing_bias": self.balancing_bias.tolist()}
        (directory / FILE).write_text(json.dumps(content) + "\n", encoding="utf-8")

    @staticmethod
    def read(directory: Path) -> Sidecar | None:
        """Return the sidecar of a folder; None if it has none.

        Raises:
            HubError: it cannot be understood.
        """
        path = directory / FILE
        if not path.is_file():
            return None
        try:
            content = load_json(path.read_bytes())
            sidecar = Sidecar(content["skip_rule"], np.array(content["balancing_bias"], np.float32))
        except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:
            raise HubError(f"{path}: cannot be understood ({in_words(error)}); remove it to do without") from error
        if sidecar.skip_rule not in _SKIP_RULES:
            raise HubError(f"{path}: skip_rule must be one of {', '.join(_SKIP_RULES)}, got {sidecar.skip_rule!r}")
        return sidecar
