"""`zslurm config template`: copy one, change it, check it, and see what it changes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.commands import Shell
from zslurm.core.errors import Exit
from zslurm.submit.script.templates import user_templates_dir


def copied(shell: Shell, *arguments: str) -> Path:
    done = shell.zslurm("config", "template", "copy", *arguments)
    assert done.code == 0, done.stderr
    return Path(done.stdout.strip())


def test_a_copy_is_short_extends_the_shipped_one_and_changes_nothing_that_runs(shell: Shell) -> None:
    path = copied(shell, "train")
    assert path == user_templates_dir() / "train.sbatch.j2"
    text = path.read_text()
    assert '{% extends "train.sbatch.j2" %}' in text
    assert "directives, rails, identity, modules, environment, setup, python, launch" in text
    assert len(text.splitlines()) < 15
    done = shell.zslurm("config", "template", "check", "train")
    assert (done.code, done.stdout, done.stderr) == (0, "", f"{path}: in order\n")
    added = [
        line[1:]
        for line in shell.zslurm("config", "template", "diff", "train").stdout.splitlines()
        if line[0] in "+-"
    ]
    assert [line for line in added if line.strip() and not line.startswith(("++", "--", "#"))] == []


def test_the_full_copy_is_the_shipped_text(shell: Shell) -> None:
    path = copied(shell, "train", "--full")
    shown = shell.zslurm("config", "template", "show", "train").stdout
    assert path.read_text() == shown
    assert shell.zslurm("config", "template", "diff", "train").stdout == ""
    assert shell.zslurm("config", "template", "check", "train").code == 0


def test_an_edit_shows_in_the_scripts_diff(shell: Shell) -> None:
    path = copied(shell, "train")
    path.write_text(path.read_text().replace("{{ super() }}", "{{ super() }}\nmodule load site"))
    lines = shell.zslurm("config", "template", "diff", "train").stdout.splitlines()
    assert lines[:2] == ["--- sbatch_templates/train.sbatch.j2", f"+++ {path}"]
    assert "+module load site" in lines
    assert "+{% extends" in shell.zslurm("config", "template", "diff", "train", "--source").stdout


def test_a_file_that_is_there_is_not_overwritten(shell: Shell) -> None:
    path = copied(shell, "train")
    path.write_text("mine")
    code, line = shell.fails("config", "template", "copy", "train")
    assert (code, line) == (Exit.USAGE, f"zslurm: {path}: is there already; edit it, or replace it with --force")
    assert copied(shell, "train", "--force").read_text() != "mine"


def test_a_copy_may_have_another_name_or_place(shell: Shell) -> None:
    assert copied(shell, "train", "--to", "debug") == user_templates_dir() / "debug.sbatch.j2"
    assert copied(shell, "local", "--to", "./here.sh.j2") == shell.directory / "here.sh.j2"
    assert shell.zslurm("config", "template", "check", "./here.sh.j2").code == 0
    shell.write_run(cluster={"name": "local", "launcher": "slurm", "template": "debug"})
    assert shell.zslurm("submit", "run.yaml", "--dry-run").code == 0


def test_the_list_says_whose_each_is_and_which_is_hidden(shell: Shell) -> None:
    path = copied(shell, "train")
    found = json.loads(shell.zslurm("config", "template", "ls", "--json").stdout)
    assert [(row["name"], row["owner"], row["used"]) for row in found] == [
        ("local", "shipped", True),
        ("train", "yours", True),
        ("train", "shipped", False),
    ]
    assert f"train\tyours\t{path}\t" in shell.zslurm("config", "template", "ls").stdout


def test_a_broken_one_fails_the_check_with_every_finding(shell: Shell) -> None:
    path = copied(shell, "train")
    path.write_text('{% extends "train.sbatch.j2" %}\n{% block launch %}{{ nonesuch }}{% endblock %}\n')
    done = shell.zslurm("config", "template", "check", "train")
    assert done.code == Exit.CHECK_FAILED
    assert done.stdout.splitlines()[1].startswith(f"error\t{path}:2\t'nonesuch' is undefined")
    assert done.stderr == f"zslurm: {path}: 1 error; it would not be submitted\n"
    body = json.loads(shell.zslurm("config", "template", "check", "train", "--json").stdout)
    assert (body["ok"], body["findings"][0]["level"]) == (False, "error")


def test_a_check_can_take_the_users_own_run(shell: Shell) -> None:
    copied(shell, "train")
    shell.write_run(cluster={"name": "local", "launcher": "slurm", "setup": ["if true; then"]})
    done = shell.zslurm("config", "template", "check", "train", "--run", "run.yaml")
    assert done.code == Exit.CHECK_FAILED
    assert "not valid shell" in done.stdout


@pytest.mark.parametrize("command", [("copy",), ("check",), ("diff",), ("show",)])
def test_what_is_not_there_is_not_found(shell: Shell, command: tuple[str, ...]) -> None:
    code, line = shell.fails("config", "template", *command, "nonesuch")
    assert code == Exit.NOT_FOUND
    assert "no template and no file has this name" in line


def test_a_shipped_template_has_nothing_to_compare_with(shell: Shell) -> None:
    code, line = shell.fails("config", "template", "diff", "train")
    assert code == Exit.NOT_FOUND
    assert "`zslurm config template copy train`" in line
