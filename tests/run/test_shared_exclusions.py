"""The exclusions of a group: what one run writes, the others avoid, and nothing is lost on the way."""

from __future__ import annotations

import json
import stat
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.submit.specs import run_spec
from zslurm.aegis.supervisor.job import Job
from zslurm.run.events import Decided, NodesExcluded, NodesReadmitted, Readmitted
from zslurm.run.events.event import Event
from zslurm.run.exclusion_store import ExclusionStore
from zslurm.run.exclusions import active_exclusions, exclusions_in
from zslurm.run.run_dir import RunDir
from zslurm.run.shared_exclusions import SharedExclusion, take_over

NOW = 1_000_000.0
DAY = 86400.0


def shared(
    node: str, run: str = "/runs/night", since: float = NOW - 60, expires: float = NOW + DAY
) -> SharedExclusion:
    return SharedExclusion(node, "lab", "ann", run, "GPU 3: ECC error", since, expires)


def after(events: Iterable[Event], *, time: float) -> list[Event]:
    """Events as they are read back after they were recorded."""
    return [type(event)(**{"time": time, "job_id": "7"} | event.fields()) for event in events]


def test_a_run_takes_over_what_others_exclude_once() -> None:
    mine = Path("/runs/day")
    store = [shared("node1"), shared("node2"), shared("node3", run=str(mine)), shared("node4", expires=NOW - 1)]
    taken = take_over([], store, mine, NOW)
    assert [event.row for event in taken] == [
        {
            "event": "nodes_excluded",
            "nodes": "node[1-2]",
            "reason": "run night of ann: GPU 3: ECC error",
            "expires": NOW + DAY,
            "shared": True,
        }
    ]
    recorded = after(taken, time=NOW)
    assert take_over(recorded, store, mine, NOW + 60) == []
    assert set(active_exclusions(exclusions_in(recorded), NOW + 60)) == {"node1", "node2"}


def test_what_the_group_gives_up_is_used_again() -> None:
    recorded = after(take_over([], [shared("node1"), shared("node2")], Path("/runs/day"), NOW), time=NOW)
    own = after([NodesExcluded(nodes="node5", reason="it died", expires=NOW + DAY)], time=NOW)
    (event,) = take_over([*recorded, *own], [shared("node2")], Path("/runs/day"), NOW + 60)
    assert isinstance(event, NodesReadmitted) and event.nodes == "node1"
    events = [*recorded, *own, *after([event], time=NOW + 60)]
    assert set(active_exclusions(exclusions_in(events), NOW + 61)) == {"node2", "node5"}


def test_what_a_person_allowed_stays_allowed_until_the_node_fails_again() -> None:
    allowed = after([Readmitted(nodes="node1")], time=NOW)
    assert take_over(allowed, [shared("node1", since=NOW - 60)], Path("/runs/day"), NOW + 1) == []
    (event,) = take_over(allowed, [shared("node1", since=NOW + 5)], Path("/runs/day"), NOW + 10)
    assert isinstance(event, NodesExcluded) and event.shared


def test_the_newest_exclusion_of_a_node_counts_whatever_file_it_is_in() -> None:
    """A command that releases a held job writes to submissions.jsonl, which is read behind events.jsonl."""
    by_command = after([NodesExcluded(nodes="node1", reason="not started", expires=NOW + DAY)], time=NOW)
    by_person = after([Readmitted(nodes="node1")], time=NOW + 60)
    by_run = after([NodesExcluded(nodes="node1", reason="it died", expires=NOW + 3 * DAY)], time=NOW + 120)
    assert exclusions_in([*by_run, *by_command])["node1"].expires == NOW + 3 * DAY
    assert set(exclusions_in([*by_run, *by_command, *by_person])) == {"node1"}


def test_a_node_that_the_run_excludes_itself_is_not_news() -> None:
    decided = after([Decided(action="restart", reason="", acted=True, exclude=["node1"])], time=NOW)
    assert take_over(decided, [shared("node1")], Path("/runs/day"), NOW + 1) == []


def test_two_runs_that_write_at_once_lose_nothing(tmp_path: Path) -> None:
    def write(run: int) -> None:
        for node in range(20):
            store = ExclusionStore(tmp_path, "lab")
            store.write(Path(f"/runs/r{run}"), [f"node{node}"], f"reason {run}", NOW, 4e9)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write, range(8)))
    contents = ExclusionStore(tmp_path, "lab").read()
    assert contents.problems == ()
    assert {(e.node, e.run) for e in contents.exclusions} == {
        (f"node{node}", f"/runs/r{run}") for node in range(20) for run in range(8)
    }
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o664 for path in tmp_path.iterdir())


def test_damaged_files_and_those_of_other_clusters_are_named_and_the_rest_is_used(tmp_path: Path) -> None:
    ExclusionStore(tmp_path, "lab").write(Path("/runs/a"), ["node1"], "it died", NOW, 4e9)
    ExclusionStore(tmp_path, "far").write(Path("/runs/b"), ["node1", "node2"], "it died", NOW, 4e9)
    (tmp_path / "node3.x.excluded.json").write_text('{"node": "node3"')
    row = json.loads(next(tmp_path.glob("node1.*")).read_text())
    (tmp_path / "node4.x.excluded.json").write_text(json.dumps(row | {"node": "../../x"}))
    (tmp_path / "notes.txt").write_text("of people")
    contents = ExclusionStore(tmp_path, "lab").read()
    assert [exclusion.node for exclusion in contents.exclusions] == ["node1"]
    assert contents.problems == (
        f"{tmp_path}/node3.x.excluded.json: not an exclusion, or damaged: remove the file",
        f"{tmp_path}/node4.x.excluded.json: not an exclusion, or damaged: remove the file",
        f"{tmp_path}: 2 exclusions are of cluster far, not of lab, and not used",
    )


def test_one_run_or_every_run_gives_a_node_up(tmp_path: Path) -> None:
    store = ExclusionStore(tmp_path, "lab")
    for run in ("/runs/a", "/runs/b"):
        store.write(Path(run), ["node1", "node2"], "it died", NOW, 4e9)
    assert store.remove(["node1", "node9"], Path("/runs/a")) == ["node1"]
    assert sorted((e.node, e.run) for e in store.read().exclusions) == [
        ("node1", "/runs/b"), ("node2", "/runs/a"), ("node2", "/runs/b"),
    ]  # fmt: skip
    assert store.remove(["node1", "node2"]) == ["node1", "node2"]
    assert store.read().exclusions == ()


def test_files_of_exclusions_that_ended_long_ago_are_removed(tmp_path: Path) -> None:
    store = ExclusionStore(tmp_path, "lab")
    store.write(Path("/runs/a"), ["node1"], "it died", NOW, NOW + DAY)
    store.write(Path("/runs/a"), ["node2"], "it died", NOW, 4e9)
    assert [path.name.partition(".")[0] for path in tmp_path.iterdir()] == ["node2"]


class TwoRuns:
    """The supervisors of two runs that share a directory."""

    def __init__(self, place: Path, directory: Path) -> None:
        self.jobs = []
        for name in ("a", "b"):
            run = RunDir(place / name)
            run.path.mkdir()
            spec = run_spec(place, cluster={"name": "lab", "launcher": "slurm", "exclusions": str(directory)})
            self.jobs.append(Job(run, spec, {"SLURM_CLUSTER_NAME": "lab"}, "7", 0, self._record(run)))

    def _record(self, run: RunDir) -> Callable[[Event], None]:
        def record(event: Event) -> None:
            row = {**event.row, "time": 2e9, "job_id": "7"}
            with run.events.open("a") as file:
                file.write(json.dumps(row) + "\n")

        return record

    def kinds(self, index: int) -> list[str]:
        path = self.jobs[index].run.events
        return [json.loads(line)["event"] for line in path.read_text().splitlines()] if path.exists() else []


def test_a_node_that_one_supervisor_excludes_is_avoided_by_the_other(tmp_path: Path) -> None:
    (directory := tmp_path / "group").mkdir()
    runs = TwoRuns(tmp_path, directory)
    first, second = runs.jobs
    first.exclude(["node3"], "GPU 3: ECC error", 1)
    assert second.excluded() == set()
    for _ in range(2):
        second.follow_group()
        first.follow_group()
    assert (second.excluded(), runs.kinds(1)) == ({"node3"}, ["nodes_excluded"])
    assert (first.excluded(), runs.kinds(0)) == ({"node3"}, ["nodes_excluded"])


def test_a_directory_that_is_away_is_reported_once_and_gives_nothing_up(tmp_path: Path) -> None:
    (directory := tmp_path / "group").mkdir()
    runs = TwoRuns(tmp_path, directory)
    first, second = runs.jobs
    first.exclude(["node3"], "it died", 1)
    second.follow_group()
    directory.rename(tmp_path / "away")
    for _ in range(3):
        second.follow_group()
        first.exclude(["node4"], "it died", 2)
    assert (second.excluded(), runs.kinds(1)) == ({"node3"}, ["nodes_excluded", "shared_exclusions_failed"])
    assert runs.kinds(0) == ["nodes_excluded", "nodes_excluded", "shared_exclusions_failed"]
