"""What a GPU cannot hold or compute is refused before the queue, with a setting that fits."""

from __future__ import annotations

import re

import pytest

from zslurm.config import yaml12
from zslurm.config.layers import Override
from zslurm.config.spec import RunSpec
from zslurm.core.errors import ConfigError
from zslurm.submit.checks.fits import check_fits
from zslurm.submit.resolve import resolve_run
from zslurm.submit.size import card_of


def spec_of(recipe: str, *overrides: str, cluster: str = "mi300x-pollara") -> RunSpec:
    document = yaml12.parse(f"extends: {recipe}\n", "run file")
    return resolve_run(
        None, cluster=cluster, overrides=[Override.parse(each) for each in overrides], document=document
    ).spec


@pytest.mark.parametrize("recipe", ["zaya1-tiny", "zaya1-100m", "zaya1-1b", "zaya1-3b"])
def test_each_recipe_fits_on_a_node(recipe: str) -> None:
    assert check_fits(spec_of(recipe)) == []


def test_a_batch_that_cannot_fit_is_refused_with_one_that_does() -> None:
    large = ("slurm.nodes=128", "phases[0].micro_batch=64")
    with pytest.raises(ConfigError, match=r"642 GiB at the peak .*, and each mi300x has 192 GiB") as refusal:
        check_fits(spec_of("zaya1-8b", *large))
    advice = re.search(r"set phases\[0\]\.micro_batch to (\d+) ", str(refusal.value))
    assert advice is not None
    assert check_fits(spec_of("zaya1-8b", large[0], f"phases[0].micro_batch={advice[1]}")) == []


def test_recomputation_is_advised_if_no_batch_is_small_enough() -> None:
    single = "phases=[{tokens: 1e9, context: 131072, global_batch: 64, micro_batch: 1, lr: 1e-4}]"
    with pytest.raises(ConfigError, match=r"set parallel\.recompute to true"):
        check_fits(spec_of("zaya1-8b", "slurm.nodes=8", single))


def test_a_plan_that_may_be_too_high_refuses_nothing() -> None:
    (note,) = check_fits(spec_of("zaya1-1b", "phases[0].micro_batch=128", "parallel.compile=true"))
    assert "compiled layers may take less" in note


def test_little_memory_left_is_a_note() -> None:
    (note,) = check_fits(spec_of("zaya1-1b", "phases[0].micro_batch=64", "phases[0].context=4600"))
    assert "little is left" in note


def test_documents_kept_apart_need_no_scores_on_gpus() -> None:
    """Their bounds take the place of a mask, at any context; a mask is counted if torch has to take one."""
    apart = (
        "data.packing=best_fit",
        "phases[0].context=32768",
        "phases[0].micro_batch=1",
        "phases[0].warmup_steps=1",
    )
    for cluster in ("mi300x-pollara", "h100-ib"):
        assert check_fits(spec_of("zaya1-1b", *apart, cluster=cluster)) == []
    with pytest.raises(ConfigError, match="does not fit"):
        check_fits(spec_of("zaya1-1b", *apart, "phases[0].context=131072", "parallel.attention=sdpa"))


def test_gpus_whose_memory_is_not_known_refuse_nothing() -> None:
    large = ("phases[0].micro_batch=128", "cluster.gpu_family=null", "cluster.gpu_type=gpu")
    assert check_fits(spec_of("zaya1-1b", *large)) == []


def test_copies_of_the_state_take_the_memory_of_a_device_that_the_host_shares() -> None:
    """On an MI300A they are in the memory of the GPU, once; on an MI300X the host has its own."""
    run = ("slurm.nodes=2", "phases[0].micro_batch=8", "aegis.recovery=memory")
    shared, own = (
        card_of(spec_of("zaya1-3b", *run, cluster=c), None, "") for c in ("mi300a-slingshot", "mi300x-pollara")
    )
    assert own.copies == 0
    assert shared.copies > 0
    assert shared.memory is not None
    assert shared.memory + shared.copies == 128 << 30
    without = card_of(
        spec_of("zaya1-3b", *run[:2], "aegis.recovery=restart", cluster="mi300a-slingshot"), None, ""
    )
    assert 0 < without.copies < shared.copies  # the copy of a checkpoint is there without recovery
    with pytest.raises(ConfigError, match=r"each mi300a has .* besides .* of copies in the same memory"):
        check_fits(spec_of("zaya1-3b", *run[:1], "phases[0].micro_batch=64", cluster="mi300a-slingshot"))


def test_copies_that_take_more_than_a_shared_memory_are_named_with_what_fits() -> None:
    """Not as a negative amount of memory, and with fewer copies on more nodes."""
    large = ("slurm.nodes=1", "phases[0].micro_batch=1", "aegis.recovery=memory", "phases[0].global_batch=1024")
    large += ("model.layers=64", "parallel.recompute=true")
    spec = spec_of("zaya1-8b", *large, cluster="mi300a-slingshot")
    card = card_of(spec, None, "")
    assert (card.memory, card.whole) == (0, 128 << 30) and card.copies > 128 << 30
    with pytest.raises(
        ConfigError,
        match=r"^memory of a rank: copies of a rank's state, .* take (\d+) GiB, and the"
        r" GPU, whose memory is the host's as well, has 128 GiB: the run does not fit; set",
    ) as refusal:
        check_fits(spec)
    advice = re.search(r"set slurm\.nodes to (\d+) ", str(refusal.value))
    assert advice is not None
    assert (
        check_fits(spec_of("zaya1-8b", f"slurm.nodes={advice[1]}", *large[1:], cluster="mi300a-slingshot")) == []
    )


def test_a_gcd_of_an_mi250x_has_half_of_its_cards_memory() -> None:
    assert card_of(spec_of("zaya1-1b", cluster="lumi-g"), None, "").memory == 64 << 30
    with pytest.raises(ConfigError, match=r"each mi250x has 64\.0 GiB"):
        check_fits(spec_of("zaya1-8b", "phases[0].micro_batch=16", cluster="lumi-g"))
