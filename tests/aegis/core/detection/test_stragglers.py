"""Which rank is a straggler."""

from __future__ import annotations

from tests.aegis.core.detection.simulated_training import SETTINGS, Training


def test_a_rank_slower_than_its_peers_for_long_is_named_once() -> None:
    training = Training(own_s={2: 1.5})
    assert training.run(95) == []
    (fault,) = training.run(60)
    assert (fault.kind, fault.role, fault.node, fault.rank) == ("straggler", "advisory", "node1", 2)
    assert "1.50 times as long as its peers" in fault.line
    assert training.run(300) == []


def test_who_is_slow_only_for_a_while_is_no_straggler() -> None:
    assert Training(own_s={2: 1.5}, slow_steps=(20, 60)).run(600) == []


def test_a_straggler_that_recovers_is_cleared() -> None:
    training = Training(own_s={2: 1.5}, slow_steps=(0, 80))
    assert [(fault.rank, fault.cleared) for fault in training.run(300)] == [(2, False), (2, True)]


def test_the_setting_makes_it_a_root() -> None:
    settings = SETTINGS.model_copy(update={"straggler": SETTINGS.straggler.model_copy(update={"act": True})})
    (fault,) = Training(own_s={0: 2.0}, settings=settings).run(150)
    assert fault.role == "root"


def test_a_little_slower_is_no_straggler() -> None:
    assert Training(own_s={2: 1.25}).run(600) == []
