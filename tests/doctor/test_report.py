"""The table, the list of nodes to exclude, and the exit code."""

from __future__ import annotations

from zslurm.cli.cluster.doctor import left_alone, remedies, summary, table
from zslurm.core.errors import Exit
from zslurm.doctor.check import Check, CheckOutcome, Status, failed, passed, unavailable, warned
from zslurm.doctor.report import LOGIN, DoctorReport

ECC = Check("gpu-ecc", "gpu", "", "node", lambda sources: None)
DISK = Check("disk", "storage", "", "both", lambda sources: None)


def report(**outcomes: dict[str, CheckOutcome | None]) -> DoctorReport:
    made = DoctorReport("mi", [ECC, DISK], asked=("node0", "node1", "node2"))
    for check, by_node in outcomes.items():
        made.add({"ecc": "gpu-ecc"}.get(check, check), by_node)
    return made


def test_nodes_with_the_same_reason_share_a_row_the_worst_first() -> None:
    bad = failed("GPU 2: 1 uncorrectable error", "exclude it")
    made = report(
        ecc={"node0": passed("no error"), "node1": bad, "node2": bad},
        disk={
            LOGIN: passed("70 GiB free"),
            "node0": passed("69 GiB free"),
            "node1": warned("1 GiB free", "clean"),
        },
    )
    assert table(made) == [
        ["gpu-ecc", "fail", "2", "node[1-2]", "GPU 2: 1 uncorrectable error"],
        ["gpu-ecc", "pass", "1", "node0", "no error"],
        ["disk", "warn", "1", "node1", "1 GiB free"],
        ["disk", "pass", "2", "(login), node0", "such as: 70 GiB free"],
    ]
    assert remedies(made) == ["gpu-ecc on node[1-2]: exclude it", "disk on node1: clean"]
    assert (made.exclude, made.exit_code, summary(made)) == (
        "node[1-2]",
        Exit.CHECK_FAILED,
        "2 of 3 nodes fail (0.0 s)",
    )


def test_many_different_faults_are_one_row() -> None:
    made = report(ecc={f"node{index}": failed(f"GPU {index}", "") for index in range(128)})
    assert table(made) == [["gpu-ecc", "fail", "128", "node[0-127]", "e.g. GPU 0"]]


def test_warnings_and_what_is_unavailable_do_not_fail() -> None:
    made = report(ecc={"node0": warned("deferred", ""), "node1": unavailable("no tool")})
    assert (made.exclude, made.exit_code, made.worst) == ("", Exit.DONE, Status.WARN)
    assert summary(made) == "3 nodes: no failure (0.0 s)"


def test_what_blames_no_node_fails_but_excludes_none() -> None:
    made = report(
        ecc={"node0": CheckOutcome(Status.FAIL, "differ", node_fault=False)}, disk={LOGIN: failed("full", "")}
    )
    assert (made.exclude, made.exit_code) == ("", Exit.CHECK_FAILED)


def test_without_slurm_the_code_is_4_whatever_else_was_found() -> None:
    made = report(disk={LOGIN: failed("full", "")})
    made.slurm_error = "the controller does not answer"
    assert made.exit_code is Exit.SLURM_UNAVAILABLE


def test_nodes_that_were_left_alone_are_grouped_by_reason() -> None:
    made = report()
    made.not_asked = {"node0": "busy (allocated)", "node1": "busy (allocated)", "node2": "down: fan"}
    assert left_alone(made) == ["not asked: node[0-1]: busy (allocated)", "not asked: node2: down: fan"]


def test_json_is_complete_and_gives_the_outcomes_back() -> None:
    bad = failed("GPU 2: 1 uncorrectable error", "exclude it", must_match={"kernel": "6.8"})
    body = report(ecc={"node1": bad}).as_json()
    (result,) = body["results"]
    assert CheckOutcome.from_json({key: result[key] for key in bad.to_json()}) == bad
    assert (result["check"], result["node"]) == ("gpu-ecc", "node1")
    assert (body["exclude"], body["failing"], body["status"]) == ("node1", ["node1"], "fail")
    assert [check["name"] for check in body["checks"]] == ["gpu-ecc", "disk"]
