"""Read options of measurements: one of several names, numbers, ranges of sizes."""

from __future__ import annotations

from collections.abc import Sequence

from zslurm.core.errors import ConfigError
from zslurm.core.units import parse_size

_MOST = 1 << 20
_DIGITS = 20


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
    parts = [part.strip().replace("_", "") for part in given.split(",")]
    # Python reads no number of more than 4,300 digits.
    if not all(part.isdecimal() and len(part) <= _DIGITS and 0 < int(part) <= _MOST for part in parts):
        raise ConfigError(
            f"{option} {given:.40}: expected numbers from 1 to {_MOST:,} with commas, such as 512,1024"
        )
    return list(dict.fromkeys(int(part) for part in parts))
