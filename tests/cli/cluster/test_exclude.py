"""`zslurm cluster exclude`: nodes that Aegis leaves out, and how a person takes them back."""

from __future__ import annotations

import time

from tests.cli.commands import Shell
from tests.run.stories import Story
from zslurm.aegis.policy.history import active_exclusions, history_of
from zslurm.run.events import describe
from zslurm.run.state.run_state import look
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
    rows_of = [*read_jsonl(story.run.events), *read_jsonl(story.run.submissions)]
    assert set(active_exclusions(history_of(rows_of), time.time(), story.spec.aegis)) == {"node3"}, "the policy"
    assert describe(rows_of[-1]).startswith("node[7,9] may be used again, by ")


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
