"""What was measured on a cluster, in NAME.measured.json next to its profile: the values that runs take from it.

`zslurm calibrate` and `zslurm bench apply` write the file. Every value has its date, nodes, spread and command,
and the hardware and software that it was measured with. The values are layers of configuration below the profile's
own text and above what the profile extends, so a value that a person wrote wins.

The values, by their key below `cluster`:

    doctor.gemm_tflops, doctor.hbm_gb_s, doctor.all_reduce_gb_s    limits of `zslurm doctor --only speed`
    storage_iops                                                   pages of 4 KiB a second in random reads
    measured.bucket_mb.N, measured.collectives.N                   for runs on about N nodes
    measured.variables.NAME                                        values of a variable of RCCL that were compared
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from zslurm.checkpoint_tools.plain import load_json
from zslurm.config.measured import MeasuredVariable
from zslurm.config.software import is_card
from zslurm.config.yaml12 import YamlDocument
from zslurm.core.errors import ConfigError, ZslurmError
from zslurm.core.files import write_atomically

SCHEMA = 1
"""Number of the format; it grows if an old reader would misread a new file."""

SUFFIX = ".measured.json"
_REMEDY = "remove the file, and measure again with `zslurm calibrate`"
_COLLECTIVES = "measured."
_STORAGE = "storage_iops"
CPU = "cpu"
"""The device of ranks without GPUs."""
_KEY = re.compile(
    r"doctor\.(?:gemm_tflops|hbm_gb_s|all_reduce_gb_s)|storage_iops"
    r"|measured\.(?:(?:bucket_mb|collectives)\.[1-9][0-9]*|variables\.[A-Za-z_][A-Za-z0-9_]*)"
)

Spread = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class StoredValue(BaseModel):
    """One value, and the conditions under which it was measured.

    Attributes:
        value: as the profile's key takes it.
        spread: standard deviation of the measurements behind the value, relative to it; None if it is not known.
        date: when the measurement began, in UTC (ISO 8601).
        nodes: on which nodes: a hostlist.
        ranks_per_node: ranks on each of them.
        device: name of the GPUs; `cpu` if the ranks had none.
        versions: of driver, ROCm or CUDA, RCCL or NCCL, torch; None if there is none.
        command: the command line.
        result: file with all figures.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    value: float | str | MeasuredVariable
    spread: Spread | None = None
    date: str
    nodes: str
    ranks_per_node: int
    device: str
    versions: dict[str, str | None] = {}
    command: str
    result: str


class CalibrationPart(BaseModel):
    """One measurement of `zslurm calibrate`.

    Attributes:
        of: what was measured, on how many nodes and with which software, as one word: see `Part.identity`.
        date: when it ended, in UTC (ISO 8601).
        seconds: how long it took.
        nodes: a hostlist; empty: the machine of the command.
        slow: names of what is slower than its peers.
        exclude: nodes that are better left out.
        complete: whether it is not to be measured again.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    of: str
    date: str = ""
    seconds: float = 0.0
    nodes: str = ""
    slow: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    complete: bool = True


class Measurements(BaseModel):
    """All values of a cluster.

    Attributes:
        schema_version: number of the format.
        profile: name of the profile that the values were measured with.
        values: by key below `cluster`.
        parts: what `zslurm calibrate` measured, by name.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    schema_version: int = SCHEMA
    profile: str
    values: dict[str, StoredValue] = {}
    parts: dict[str, CalibrationPart] = {}

    def with_values(self, new: Mapping[str, StoredValue], *, is_partial: bool = False) -> Measurements:
        """Return the measurements with new values.

        Of collectives between other ranks nothing stays, but ranks on CPUs replace none on GPUs. Values of a
        measurement that `is_partial` only fill gaps.
        """
        kept = dict(self.values)
        on_gpus = any(key.startswith(_COLLECTIVES) and value.device != CPU for key, value in kept.items())
        added = {
            key: value
            for key, value in new.items()
            if not (key.startswith(_COLLECTIVES) and on_gpus and value.device == CPU)
            and not (is_partial and key in kept)
        }
        fresh = [value for key, value in added.items() if key.startswith(_COLLECTIVES)]
        for key, value in self.values.items():
            if key.startswith(_COLLECTIVES) and any(_ranks(value) != _ranks(other) for other in fresh):
                del kept[key]
        return self.model_copy(update={"values": kept | added})

    def documents(self, card: str | None) -> Iterator[tuple[YamlDocument, str]]:
        """Yield the values of each day as a section `cluster`, the oldest first, with the day.

        Values of GPUs other than `card`, by which the profile calls its own, are left out.
        """
        by_day: dict[str, dict[str, StoredValue]] = {}
        for key, value in sorted(self.values.items(), key=lambda item: item[1].date):
            if key == _STORAGE or value.device == CPU or is_card(card, value.device):
                by_day.setdefault(value.date[:10], {})[key] = value
        for day, values in by_day.items():
            section = _section(values)
            section.setdefault("measured", {})["profile"] = self.profile
            yield YamlDocument({"cluster": section}, {}), day


def results_folder(path: Path) -> Path:
    """Return the folder of the results behind a file of measurements: NAME.measured, or FILE.results."""
    name = path.name.removesuffix(".json")
    return path.with_name(name if path.name.endswith(SUFFIX) else f"{name}.results")


def _ranks(value: StoredValue) -> tuple[str, int]:
    return value.device, value.ranks_per_node


def _section(values: Mapping[str, StoredValue]) -> dict[str, Any]:
    """Return values as a section `cluster` of a profile."""
    section: dict[str, Any] = {}
    for key, stored in values.items():
        *parents, last = key.split(".")
        inside = section
        for parent in parents:
            inside = inside.setdefault(parent, {})
        inside[last] = stored.value.model_dump() if isinstance(stored.value, MeasuredVariable) else stored.value
        if key.startswith(_COLLECTIVES):
            section["measured"] |= {
                "date": stored.date, "device": stored.device, "ranks_per_node": stored.ranks_per_node
            }  # fmt: skip
    return section


def read_measurements(path: Path, profile: str) -> Measurements | None:
    """Return the measurements of a profile; None if there are none.

    Raises:
        ConfigError: the file cannot be read, is damaged, was edited into what no measurement gives, is of another
            profile, or of a newer zslurm.
    """
    try:
        data = load_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path}: not a file of measurements: {error}; {_REMEDY}") from error
    version = data.get("schema_version") if isinstance(data, dict) else None
    if isinstance(version, int) and version > SCHEMA:
        raise ConfigError(f"{path}: format {version}, of a newer zslurm; this one reads up to {SCHEMA}")
    try:
        measurements = Measurements.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"{path}: {key}: {first['msg']}; {_REMEDY}") from error
    if unknown := [key for key in measurements.values if not _KEY.fullmatch(key)]:
        raise ConfigError(f"{path}: values.{unknown[0]}: no such measurement; {_REMEDY}")
    if measurements.profile != profile:
        raise ConfigError(
            f"{path}: was measured with the profile {measurements.profile}, not with {profile}; {_REMEDY}"
        )
    ranks = {_ranks(value): key for key, value in measurements.values.items() if key.startswith(_COLLECTIVES)}
    if len(ranks) > 1:
        first_key, second_key, *_ = ranks.values()
        raise ConfigError(
            f"{path}: values.{first_key} and values.{second_key} are of different ranks or GPUs; {_REMEDY}"
        )
    return measurements


def write_measurements(path: Path, measurements: Measurements) -> None:
    """Replace the file.

    Raises:
        ZslurmError: it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, measurements.model_dump_json(indent=1) + "\n")
    except OSError as error:
        raise ZslurmError(f"{path}: cannot be written: {error.strerror}; name another file with --out") from error
