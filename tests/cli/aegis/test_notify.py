"""`zslurm aegis notify`: whether the hooks work, found out before they are needed."""

from __future__ import annotations

import json

import pytest

from tests.cli.commands import Shell


def test_a_hook_that_works(shell: Shell) -> None:
    settings = {"command": f"cat > {shell.directory}/got; echo $HOOK_NAME > {shell.directory}/name"}
    shell.write_run(aegis={"notify": settings}, cluster={"env": {"HOOK_NAME": "mine"}})
    done = shell.zslurm("aegis", "notify", "run.yaml")
    assert (done.code, done.stdout, done.stderr) == (0, "aegis.notify.command took the event\n", "")
    event = json.loads((shell.directory / "got").read_text())
    assert (event["run"], event["event"]) == ("tiny", "notify_test")
    assert event["text"] == "tiny: a test of aegis.notify: this hook works"
    assert (shell.directory / "name").read_text() == "mine\n", "as in the job"


def test_hooks_that_do_not_work_are_all_named(shell: Shell) -> None:
    settings = {"command": "echo no mailer >&2; exit 9", "url": "http://127.0.0.1:1/$MY_HOOK"}
    shell.write_run(aegis={"notify": settings})
    done = shell.zslurm("aegis", "notify", "run.yaml")
    assert (done.code, done.stdout) == (5, "")
    assert done.stderr.splitlines() == [
        "zslurm: aegis.notify.command: exit code 9: no mailer",
        "zslurm: aegis.notify.url: $MY_HOOK is not set, which aegis.notify.url names",
    ]


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({}, "zslurm: aegis.notify: no hook; set aegis.notify.command, aegis.notify.url or aegis.notify.apprise"),
        (
            {"command": "touch sent", "events": ["fault_detect"]},
            "zslurm: aegis.notify.events: there are no events `fault_detect`; did you mean `fault_detected`?",
        ),
    ],
)
def test_what_would_never_be_sent_is_refused(shell: Shell, settings: dict[str, object], complaint: str) -> None:
    shell.write_run(aegis={"notify": settings})
    assert shell.fails("aegis", "notify", "run.yaml") == (2, complaint)
