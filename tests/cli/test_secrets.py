"""No command shows a secret: not a dry run, not the configuration, not a complaint."""

from __future__ import annotations

from typing import Any

import pytest

from tests.cli.commands import Shell

TOKEN = "hf_" + "AbCd" * 8 + "xY"
CLUSTER: dict[str, Any] = {"name": "local", "env": {"HF_TOKEN": TOKEN, "DB_PASSWORD": "hunter22"}}


@pytest.mark.parametrize(
    "command",
    [
        ("config", "show", "run.yaml"),
        ("config", "show", "run.yaml", "--origin"),
        ("config", "show", "run.yaml", "--json"),
        ("config", "show", "run.yaml", "--json", "--origin"),
        ("submit", "run.yaml", "--dry-run"),
        ("submit", "run.yaml", "--dry-run", "--json"),
    ],
)
def test_what_is_shown_has_a_placeholder(shell: Shell, command: tuple[str, ...]) -> None:
    shell.write_run(cluster=CLUSTER)
    done = shell.zslurm(*command)
    assert done.code == 0
    assert "[redacted]" in done.stdout
    assert TOKEN not in done.stdout + done.stderr
    assert "hunter22" not in done.stdout + done.stderr


@pytest.mark.parametrize("setting", [f"cluster.env.HF_TOKEN=[{TOKEN}", f"cluster.gid_index={TOKEN}", TOKEN])
def test_a_complaint_about_it_does_not_repeat_it(shell: Shell, setting: str) -> None:
    shell.write_run(cluster={"name": "local"})
    done = shell.zslurm("submit", "run.yaml", "--set", setting, "--dry-run")
    assert done.code == 2
    assert TOKEN not in done.stderr
