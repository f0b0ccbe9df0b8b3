"""Which faults end an attempt that still runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.aegis.attempts import (
    HARDWARE,
    NOW,
    SETTINGS,
    attempt_state,
    fault,
    history,
    incident,
)
from tests.aegis.core.policy.decisions import raised
from zslurm.aegis.core.root_cause import without_overcome
from zslurm.aegis.fault_kinds import FAULT_RULES


class TestAlarm:
    @pytest.mark.parametrize("kind", [*HARDWARE, "rank_hang"])
    def test_ends_the_attempt_at_once(self, kind: str) -> None:
        given = raised(fault(kind, ago=0.0))
        assert given.give_up
        assert given.exclude == (() if kind == "rank_hang" else ("node1",))

    @pytest.mark.parametrize("kind", [k for k, rule in FAULT_RULES.items() if rule.while_running == "record"])
    def test_lets_it_run(self, kind: str) -> None:
        assert not raised(fault(kind, ago=900.0), spares=1).give_up

    @pytest.mark.parametrize("kind", [*HARDWARE, "rank_hang", "nic_link_down", "straggler", "benign"])
    @pytest.mark.parametrize("role", ["advisory", "benign", "teardown"])
    def test_never_for_an_advisory(self, kind: str, role: Any) -> None:
        assert not raised(fault(kind, ago=900.0, role=role), spares=1).give_up

    @pytest.mark.parametrize("kind", ["nic_link_down", "nic_fault", "rccl_timeout", "hang_heartbeat"])
    def test_tolerates_the_network_for_a_while(self, kind: str) -> None:
        assert not raised(fault(kind, ago=59.0)).give_up
        assert raised(fault(kind, ago=61.0)).give_up
        assert not raised(fault(kind, ago=61.0), says={"tolerate_s": 90}).give_up
        assert raised(fault(kind, ago=61.0)).reason.endswith("for more than 60 s")

    @pytest.mark.parametrize("node", ["node1", None])
    def test_a_fault_that_stays_ends_one_attempt_and_no_second(self, node: str | None) -> None:
        """The link is down, and there was no other node to continue with."""
        down = fault("nic_link_down", ago=200.0, nic="n3")
        past = history(incident(replace(down, node=node, nic=node and "n3")))
        assert raised(down).give_up
        assert not raised(down, past=past).give_up
        assert raised(fault("nic_link_down", ago=100.0, nic="n3"), past=past).give_up, "it went down again"
        assert raised(fault("nic_link_down", "node2", ago=200.0, nic="n3"), past=past).give_up == (
            node is not None
        )

    def test_is_silent_when_the_link_came_back(self) -> None:
        down, up = fault("nic_link_down", ago=80.0, nic="n3"), fault("nic_link_down", nic="n3", cleared=True)
        assert not raised(down, up).give_up
        assert not raised(down, fault("nic_fault", ago=70.0), up).give_up
        assert raised(down, fault("nic_link_down", nic="n4", cleared=True)).give_up
        assert raised(down, fault("nic_link_down", "node2", nic="n3", cleared=True)).give_up
        assert raised(fault("nic_link_down", ago=99.0, nic="n3", cleared=True), down).give_up

    def test_is_silent_when_all_ranks_progressed_though_not_about_a_link_that_is_still_down(self) -> None:
        assert not raised(fault("nic_fault", ago=80.0), progressed_at=NOW - 1).give_up
        assert raised(fault("nic_fault", ago=80.0), progressed_at=NOW - 90).give_up
        assert raised(fault("nic_link_down", ago=80.0), progressed_at=NOW - 1).give_up
        assert raised(fault("gpu_hang_reset", ago=80.0), progressed_at=NOW - 1).give_up

    def test_what_the_run_overcame_is_forgotten(self) -> None:
        """A NIC that hiccups for days: each look at its thousands of faults would take seconds."""
        old = [fault("nic_fault", ago=ago, nic="n1", cleared=ago % 2 == 1) for ago in range(100, 4100)]
        down, up = fault("nic_link_down", ago=9.0, nic="n1"), fault("nic_link_down", nic="n1", cleared=True)
        now = attempt_state(*old, fault("host_oom", ago=90.0), down, up, outcome=None, progressed_at=NOW - 20)
        assert without_overcome(now, SETTINGS) == [down, up]
        later = replace(now, progressed_at=NOW - 1)
        assert without_overcome(later, SETTINGS) == []
        standing = attempt_state(down, fault("rank_killed", ago=90.0, source="srun"), progressed_at=NOW - 1)
        assert without_overcome(standing, SETTINGS) == list(standing.faults)

    def test_ends_after_a_collective_timed_out_whoever_it_waited_for(self) -> None:
        assert raised(fault("rccl_timeout", ago=80.0, role="cascade")).give_up
        assert not raised(fault("peer_lost", ago=80.0, role="cascade")).give_up

    def test_hang_that_was_over_by_itself(self) -> None:
        hang, over = fault("rank_hang", ago=9.0, rank=5), fault("rank_hang", rank=5, cleared=True)
        assert not raised(hang, over).give_up
        assert raised(hang, fault("rank_hang", rank=6, cleared=True)).give_up

    def test_straggler_only_where_settings_say_so_and_a_spare_is_there(self) -> None:
        slow, act = fault("straggler", role="advisory"), {"straggler": {"act": True}}
        assert raised(slow, says=act, spares=1).exclude == ("node1",)
        assert not raised(slow, says=act).give_up
        assert not raised(slow, spares=1).give_up
