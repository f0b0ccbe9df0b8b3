"""NICs from sysfs: links that go down and come back, flaps between two looks, retries, retransmissions."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.aegis.contexts import context
from tests.fake_sysfs import FakeNode, h100_mlx5, mi300x_pollara
from zslurm.aegis.agent.sensors.nic import Nics, NicState, changes, exceeded_retries, make, retransmits_much
from zslurm.aegis.types import Fault

NAMES = [f"ionic_{index}" for index in range(8)]


@pytest.fixture
def node(tmp_path: Path) -> FakeNode:
    return mi300x_pollara(tmp_path / "root")


def sensor(node: FakeNode, **cluster: object) -> Nics:
    made = make(context(node.root, cluster={"nics": NAMES} | cluster))
    assert made is not None
    assert made.read().values == {"up": 8, "down": []}
    return made


def count(node: FakeNode, device: str, name: str, value: int, folder: str = "hw_counters") -> None:
    node.write(f"sys/class/infiniband/{device}/ports/1/{folder}/{name}", str(value))


def told(fault: Fault) -> tuple[str, str, str | None, bool]:
    return fault.kind, fault.role, fault.nic, fault.cleared


def test_a_link_goes_down_and_comes_back(node: FakeNode) -> None:
    nics = sensor(node)
    node.take_nic_down("ionic_3")
    reading = nics.read()
    (fault,) = reading.faults
    assert told(fault) == ("nic_link_down", "root", "ionic_3", False)
    assert (fault.scope, fault.node, fault.line) == ("nic", "node0", "ionic_3: port 1 is DOWN, Disabled")
    assert reading.values == {"up": 7, "down": ["ionic_3"]}
    assert nics.read().faults == (), "told once"
    node.bring_nic_up("ionic_3")
    (fault,) = nics.read().faults
    assert told(fault) == ("nic_link_down", "root", "ionic_3", True)


def test_a_card_that_falls_off_the_bus(node: FakeNode) -> None:
    nics = sensor(node)
    node.remove_nic("ionic_5")
    (fault,) = nics.read().faults
    assert told(fault) == ("nic_link_down", "root", "ionic_5", False)
    assert fault.line == "ionic_5: it has disappeared"


def test_an_interface_without_carrier(node: FakeNode) -> None:
    nics = sensor(node)
    (netdev,) = (node.root / "sys/class/infiniband/ionic_2/device/net").iterdir()
    (netdev / "operstate").write_text("down\n")
    (fault,) = nics.read().faults
    assert fault.line == "ionic_2: its interface is down"


@pytest.mark.parametrize(("folder", "name"), [("counters", "link_downed")])
def test_a_flap_between_two_looks_is_told_as_both(node: FakeNode, folder: str, name: str) -> None:
    count(node, "ionic_1", name, 4, folder)
    nics = sensor(node)
    count(node, "ionic_1", name, 6, folder)
    down, up = nics.read().faults
    assert told(down) == ("nic_link_down", "root", "ionic_1", False)
    assert told(up) == ("nic_link_down", "root", "ionic_1", True)
    assert down.line == "ionic_1: the link went down 2 times and is up again"


def test_a_link_that_is_down_from_the_start_is_an_advisory(node: FakeNode) -> None:
    node.take_nic_down("ionic_0")
    nics = make(context(node.root, cluster={"nics": NAMES}))
    assert nics is not None
    (fault,) = nics.read().faults
    assert told(fault) == ("nic_link_down", "advisory", "ionic_0", False)
    node.bring_nic_up("ionic_0")
    (fault,) = nics.read().faults
    assert told(fault) == ("nic_link_down", "root", "ionic_0", True)


@pytest.mark.parametrize("name", ["req_tx_retry_excd_err", "tx_rdma_ack_timeout"])
def test_exceeded_retries_are_a_root(node: FakeNode, name: str) -> None:
    count(node, "ionic_7", name, 3)
    nics = sensor(node)
    assert nics.read().faults == (), "what was counted before the run does not matter"
    count(node, "ionic_7", name, 5)
    (fault,) = nics.read().faults
    assert told(fault) == ("nic_fault", "root", "ionic_7", False)
    assert (fault.scope, fault.line) == ("nic", f"ionic_7: {name} +2")
    (fault,) = nics.read().faults
    assert told(fault) == ("nic_fault", "root", "ionic_7", True), "it is over"
    assert nics.read().faults == ()


def test_exceeded_retries_are_not_over_while_the_link_is_down(node: FakeNode) -> None:
    count(node, "ionic_7", "req_tx_retry_excd_err", 0)
    nics = sensor(node)
    node.take_nic_down("ionic_7")
    count(node, "ionic_7", "req_tx_retry_excd_err", 1)
    assert [told(fault)[0] for fault in nics.read().faults] == ["nic_fault", "nic_link_down"]
    assert nics.read().faults == ()
    node.bring_nic_up("ionic_7")
    assert [told(fault)[::3] for fault in nics.read().faults] == [("nic_fault", True), ("nic_link_down", True)]


def test_many_retransmissions_are_an_advisory_told_once(node: FakeNode) -> None:
    count(node, "ionic_4", "tx_rdma_retx_pkts", 0)
    count(node, "ionic_4", "tx_rdma_ucast_pkts", 0)
    nics = sensor(node)
    for look in (1, 2):
        count(node, "ionic_4", "tx_rdma_retx_pkts", 5_000 * look)
        count(node, "ionic_4", "tx_rdma_ucast_pkts", 1_000_000 * look)
        faults = nics.read().faults
        assert [told(fault) for fault in faults] == [("nic_errors", "advisory", "ionic_4", False)][: 2 - look]
    count(node, "ionic_4", "tx_rdma_ucast_pkts", 3_000_000)
    (fault,) = nics.read().faults
    assert told(fault) == ("nic_errors", "advisory", "ionic_4", True)


@pytest.mark.parametrize(
    ("again", "sent", "much"),
    [(99, 10, False), (100, 99_999, True), (100, 100_000, False), (10**6, 10**10, False)],
)
def test_retransmissions_are_a_share_of_what_was_sent(again: int, sent: int, much: bool) -> None:
    before = NicState(counters={"tx_rdma_retx_pkts": 7, "tx_rdma_ucast_pkts": 9})
    now = NicState(counters={"tx_rdma_retx_pkts": 7 + again, "tx_rdma_ucast_pkts": 9 + sent})
    assert bool(retransmits_much(before, now)) is much


def test_counters_that_go_back_or_appear_tell_nothing() -> None:
    before = NicState(downs={"link_downed": 5}, counters={"req_tx_retry_excd_err": 5})
    now = NicState(
        downs={"link_downed": 0, "eth0": 3}, counters={"req_tx_retry_excd_err": 0, "max_retry_exceeded": 4}
    )
    assert changes(before, now) == []
    assert exceeded_retries(before, now) == ""


def test_counters_that_cannot_be_read_tell_nothing(node: FakeNode) -> None:
    nics = sensor(node)
    node.write("sys/class/infiniband/ionic_4/ports/1/hw_counters/req_tx_retry_excd_err", "Invalid argument")
    (node.root / "sys/class/infiniband/ionic_4/ports/1/hw_counters/tx_rdma_ack_timeout").mkdir()
    assert nics.read().faults == ()


def test_without_a_profile_the_rails_are_found_by_pcie(tmp_path: Path) -> None:
    node = h100_mlx5(tmp_path / "root")
    nics = make(context(node.root, cluster={"network": "infiniband"}))
    assert nics is not None and nics.read().values["up"] == 8, "the ninth is the storage's"
    node.take_nic_down("mlx5_8")
    assert nics.read().faults == ()
    node.take_nic_down("mlx5_0")
    assert [fault.nic for fault in nics.read().faults] == ["mlx5_0"]


def test_no_nics_are_no_sensor(tmp_path: Path) -> None:
    assert make(context(tmp_path / "root")) is None
