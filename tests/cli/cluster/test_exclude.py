"""`zslurm cluster exclude`: nodes that Aegis leaves out, and how a person takes them back."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from tests.cli.commands import Shell
from tests.run.stories import Story
from zslurm.aegis.supervisor.job import Job
from zslurm.core.errors import Exit
from zslurm.run.events import describe
from zslurm.run.exclusion_store import ExclusionStore
from zslurm.run.state.run_state import look
from zslurm.slurm.client import SlurmClient
from zslurm.slurm.hostlist import expand
from zslurm.submit.script.render import directives
from zslurm.train.jsonl import read_jsonl


def excluding(shell: Shell) -> Story:
    """A run that has rested since it excluded three nodes, two of them for one reason."""
    story = Story(shell.directory / "runs/tiny").submitted()
    story.clock = time.time() - 60
    story.started()
    for nodes, reason in (("node[3,7]", "uncorrectable memory error of a GPU"), ("node9", "the node is dead")):
        story.event("nodes_excluded", nodes=nodes, reason=reason, expires=time.time() + 3600)
    return story.ended("interrupted", 75)


def test_ls_lists_nodes_with_their_reason_and_rm_takes_one_back(shell: Shell) -> None:
    story = excluding(shell)
    found = shell.zslurm.ok("cluster", "exclude", "ls", "tiny", "--json").json
    assert [(each["nodes"], each["by"], each["reason"]) for each in found] == [
        ("node[3,7]", "Aegis", "uncorrectable memory error of a GPU"),
        ("node9", "Aegis", "the node is dead"),
    ]
    done = shell.zslurm.ok("cluster", "exclude", "rm", "tiny", "node[7,9]")
    assert done.stderr == "tiny may use node[7,9] again\n"
    rows = [line.split("\t") for line in shell.zslurm.ok("cluster", "exclude", "ls").stdout.splitlines()]
    assert [row[:3] for row in rows[1:]] == [["node3", "tiny", "Aegis"]]
    assert look(story.run).aegis.excluded == ("node3",)
    assert excluded_everywhere(shell, story) == {"node3"}
    *_, last = read_jsonl(story.run.submissions)
    assert describe(last).startswith("node[7,9] may be used again, by ")


def excluded_everywhere(shell: Shell, story: Story) -> set[str]:
    """Return the excluded nodes; the policy, `status`, the script and `exclude ls` must agree about them."""
    found = Job.of(story.run, {"ZSLURM_JOB_ID": "local-1"}, lambda event: None).excluded()
    assert set(look(story.run).aegis.excluded) == found
    listed = shell.zslurm.ok("cluster", "exclude", "ls", story.run.name, "--json").json
    assert {node for each in listed for node in expand(each["nodes"])} == found
    assert set(expand(str(dict(directives(story.spec, story.run)).get("exclude", "")))) == found
    return found


def test_what_the_policy_avoids_is_shown_and_what_is_over_counts_nowhere(shell: Shell) -> None:
    story = excluding(shell)
    story.event("nodes_excluded", nodes="node[4-5]", reason="over", expires=time.time() - 1)
    story.event("nodes_excluded", nodes="node6", reason="an older version wrote no end")
    story.event("exclusion_failed", nodes="node9", reason="Slurm did not answer; the run avoids it all the same")
    story.event("decision", attempt=1, action="requeue", mode="act", exclude=["node8"], reason="not recorded yet")
    assert excluded_everywhere(shell, story) == {"node3", "node6", "node7", "node8", "node9"}
    story.event("nodes_excluded", nodes="node8", reason="for a short time", expires=time.time() - 1)
    assert excluded_everywhere(shell, story) == {"node3", "node6", "node7", "node9"}


def test_a_node_that_fails_again_is_excluded_again(shell: Shell) -> None:
    story = excluding(shell)
    shell.zslurm.ok("cluster", "exclude", "rm", "tiny", "node9")
    story.clock = time.time() + 1
    story.event("nodes_excluded", nodes="node9", reason="the node is dead", expires=time.time() + 3600)
    assert look(story.run).aegis.excluded == ("node3", "node7", "node9")


def test_what_is_not_excluded_is_refused(shell: Shell) -> None:
    excluding(shell)
    assert "is not excluded" in shell.fails("cluster", "exclude", "rm", "tiny", "node1")[1]
    assert shell.fails("cluster", "exclude", "rm", "tiny", "node[1-")[0] == 2
    assert shell.fails("cluster", "exclude", "rm", "other", "node1")[0] == 3


def test_no_exclusion_is_a_message(shell: Shell) -> None:
    assert shell.zslurm.ok("cluster", "exclude", "ls").stderr == "no run excludes a node\n"


def test_what_the_group_excludes_is_listed_and_given_up_for_all(
    shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (directory := tmp_path / "group").mkdir()
    monkeypatch.setattr(SlurmClient, "scontrol_config", lambda _: {"ClusterName": "lab"})
    story = excluding(shell)
    config = json.loads(story.run.config.read_text())
    config["cluster"] |= {"launcher": "slurm", "exclusions": str(directory)}
    story.run.config.write_text(json.dumps(config))
    store = ExclusionStore(directory, "lab")
    store.write(Path("/runs/night"), ["node3", "node5"], "it died", 1.0, 4e9)
    story.event("nodes_excluded", nodes="node5", reason="run night of ann: it died", expires=4e9, shared=True)
    rows = shell.zslurm.ok("cluster", "exclude", "ls", "tiny", "--json").json
    assert [row["nodes"] for row in rows if row["by"] == "group"] == ["node5"]
    done = shell.zslurm.ok("cluster", "exclude", "rm", "tiny", "node[3,5]", "--group")
    assert done.stderr == "tiny may use node[3,5] again\nno run of the group excludes node[3,5] any more\n"
    assert store.read().exclusions == ()
    fails = shell.zslurm("cluster", "exclude", "rm", "tiny", "node5", "--group")
    assert (fails.code, "node5 is not excluded" in fails.stderr) == (Exit.NOT_FOUND, True)
    directory.rmdir()
    fails = shell.zslurm("cluster", "exclude", "rm", "tiny", "node7", "--group")
    assert fails.stderr.startswith(f"zslurm: {directory}: No such file or directory; ")
