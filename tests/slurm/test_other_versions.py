"""Output of older and newer Slurms, as recorded elsewhere, reads as that of the test cluster does."""

from __future__ import annotations

from datetime import timedelta

import pytest

from tests.slurm.recordings import recorded_elsewhere as recorded
from zslurm.slurm.inventory import count_gpus, parse_config, parse_partitions
from zslurm.slurm.jobs import QUEUE_FIELDS
from zslurm.slurm.run_command import _UNREACHED
from zslurm.slurm.version import parse_version


def test_the_configuration_of_20_11() -> None:
    config = parse_config(recorded.CONFIG_20_11)
    assert (config["ClusterName"], config["AccountingStorageEnforce"]) == ("mycluster", "associations")
    assert parse_version(config["SLURM_VERSION"]) == (20, 11, 6)


def test_a_partition_of_20_11() -> None:
    (partition,) = parse_partitions(recorded.PARTITION_20_11)
    assert (partition.name, partition.nodes, partition.n_nodes) == ("mypart", "node1,node2", 2)
    assert (partition.is_default, partition.is_up, partition.max_nodes) == (True, True, None)
    assert (partition.max_time, partition.default_time) == (timedelta(days=3), timedelta(hours=1))


@pytest.mark.parametrize(
    ("gres", "gpus"),
    [
        *zip(recorded.GRES_20_11, [(0, None), (2, None)], strict=True),
        *zip(recorded.GRES_21_08, [(8, None)], strict=True),
        *zip(recorded.GRES_UNTOLD, [(0, None), (8, "a100")], strict=True),
    ],
)
def test_gpus_of_nodes(gres: str, gpus: tuple[int, str | None]) -> None:
    assert count_gpus(gres) == gpus


def test_every_field_that_is_asked_of_squeue_was_there_in_20_11() -> None:
    assert {name.lower() for name in QUEUE_FIELDS} <= set(recorded.SQUEUE_FIELDS_20_11)


@pytest.mark.parametrize("words", [*recorded.RATE_LIMITS, recorded.CONNECTION_TIMEOUT])
def test_newer_words_for_a_controller_that_asks_to_wait_are_known(words: str) -> None:
    assert any(known in words for known in _UNREACHED)
