"""Options that the measurements of `zslurm bench` share, and how their values are read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from typer import Option

from zslurm.core.errors import ConfigError
from zslurm.core.units import parse_size

_MOST = 1 << 20
_DIGITS = 20

Nodes = Annotated[
    int | None, Option(metavar="N", min=1, help="As a Slurm job on N nodes; default: on this machine.")
]
Nodelist = Annotated[str | None, Option(metavar="LIST", help="As a Slurm job on these nodes.")]
Ranks = Annotated[
    int | None, Option(metavar="R", min=1, help="Ranks on each node; default: one for each GPU, two on CPUs.")
]
Quick = Annotated[bool, Option("--quick", help="Measure a few points only.")]
Minutes = Annotated[
    float | None,
    Option(metavar="M", min=0.01, help="Measure what fits into so many minutes, the shortest points first."),
]
Out = Annotated[
    Path | None, Option(metavar="FILE", help="Write the result here; default: in the user's state directory.")
]
Plot = Annotated[Path | None, Option(metavar="DIR", help="Draw plots of the result there (SVG and PNG).")]
Apply = Annotated[bool, Option("--apply", help="Keep what follows from the result for runs on the cluster.")]


@dataclass(frozen=True)
class Measure:
    """Where to measure, for how long, and what becomes of the result: the values of the options above."""

    cluster: str | None
    nodes: int | None
    nodelist: str | None
    ranks: int | None
    quick: bool
    minutes: float | None
    out: Path | None
    plot: Path | None
    json: bool
    apply: bool = False


def chosen(option: str, given: list[str] | None, known: Sequence[str]) -> list[str]:
    """Return the names that an option selects, in the order of `known`; all without it.

    Raises:
        ConfigError: one is not known.
    """
    if unknown := [name for name in given or [] if name not in known]:
        raise ConfigError(f"{option} {unknown[0]}: expected one of {', '.join(known)}")
    return [name for name in known if not given or name in given]


def format_of(given: str, known: Sequence[str]) -> str:
    """Return a format of numbers.

    Raises:
        ConfigError: it is not known.
    """
    if given not in known:
        raise ConfigError(f"--dtype {given}: expected one of {', '.join(known)}")
    return given


def sizes_between(smallest: str, largest: str, *, factor: int) -> list[int]:
    """Return sizes in bytes, each `factor` times the one before, and the largest.

    Raises:
        ConfigError: these are no sizes, or the first is the larger one.
    """
    least, most = size_of("--min", smallest), size_of("--max", largest)
    if least > most:
        raise ConfigError(f"--min {smallest} is more than --max {largest}")
    sizes = [least]
    while sizes[-1] * factor <= most:
        sizes.append(sizes[-1] * factor)
    return sizes if sizes[-1] == most else [*sizes, most]


def size_of(option: str, text: str) -> int:
    """Return a size in bytes.

    Raises:
        ConfigError: it is none; the message names the option.
    """
    try:
        return parse_size(text)
    except ConfigError as error:
        raise ConfigError(f"{option}: {error}") from None


def numbers(option: str, given: str | None) -> list[int] | None:
    """Return a list such as "512,1024"; None without the option.

    Raises:
        ConfigError: it has something else than whole numbers from 1 to 2^20.
    """
    if given is None:
        return None
    parts = [word.strip().replace("_", "") for word in given.split(",")]
    # Python reads no number of more than 4,300 digits.
    if not all(word.isdecimal() and len(word) <= _DIGITS and 0 < int(word) <= _MOST for word in parts):
        raise ConfigError(
            f"{option} {given:.40}: expected numbers from 1 to {_MOST:,} with commas, such as 512,1024"
        )
    return list(dict.fromkeys(int(word) for word in parts))
