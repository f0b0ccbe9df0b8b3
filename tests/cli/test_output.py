"""Data goes to stdout and messages to stderr; --json is JSON; piped tables are tab-separated."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest

from tests.cli.commands import Outcome, Shell
from tests.train.runs import clean_environment
from zslurm.cli.terminal.table import print_table
from zslurm.config.spec import RunSpec


def json_of(done: Outcome) -> object:
    """What a command printed as JSON, and nothing else."""
    assert (done.code, done.stderr) == (0, "")
    return json.loads(done.stdout)


def rows_of(done: Outcome) -> list[list[str]]:
    """A piped table: its header and rows."""
    assert (done.code, done.stderr) == (0, "")
    rows = [line.split("\t") for line in done.stdout.splitlines()]
    assert len({len(row) for row in rows}) == 1
    assert "\x1b" not in done.stdout
    return rows


def test_config_show_prints_every_value(shell: Shell) -> None:
    run_file = shell.write_run()
    lines = shell.zslurm("config", "show", run_file).stdout.splitlines()
    assert "model.layers = 2" in lines
    assert f"data.path = {shell.directory}/tokens.h5" in lines
    assert "slurm.time = -" in lines
    broken = shell.zslurm("config", "show", run_file, "--set", 'phases[0].name="two\\nlines"').stdout
    assert 'phases[0].name = "two\\nlines"' in broken.splitlines()
    rows = rows_of(shell.zslurm("config", "show", run_file, "--origin", "--set", "model.layers=3"))
    assert rows[0] == ["key", "value", "origin"]
    assert ["model.layers", "3", "--set model.layers"] in rows
    assert ["aegis.grace_s", "30.0", "default"] in rows
    assert ["cluster.launcher", "local", "cluster profile local:4"] in rows
    assert len(rows) == len(lines) + 1


def test_config_show_as_json_is_the_run_that_would_be_submitted(shell: Shell) -> None:
    run_file = shell.write_run()
    body = json_of(shell.zslurm("config", "show", run_file, "--json"))
    assert RunSpec.model_validate(body).model.layers == 2
    origins = json_of(shell.zslurm("config", "show", run_file, "--json", "--origin"))
    assert isinstance(origins, dict)
    assert origins["model.layers"] == {"value": 2, "origin": f"run file {run_file}:{_line(run_file, 'layers')}"}


def test_a_run_file_from_standard_input(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    text = shell.write_run().read_text()
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    done = shell.zslurm("config", "show", "-", "--origin")
    place = f"run file standard input:{_line(shell.directory / 'run.yaml', 'layers')}"
    assert ["model.layers", "2", place] in rows_of(done)
    assert f"{shell.directory}/tokens.h5" in done.stdout, "paths are relative to the working directory"
    monkeypatch.setattr(sys, "stdin", io.StringIO("run: [\n"))
    assert shell.fails("submit", "-")[1].startswith("zslurm: standard input:2: not valid YAML")


def test_the_schema_is_printed_as_json(shell: Shell) -> None:
    schema = json_of(shell.zslurm("config", "schema"))
    jsonschema.validate(json.loads(shell.write_run().read_text()), schema)


def test_a_dry_run_shows_the_script_and_where_values_came_from(shell: Shell) -> None:
    run_file = shell.write_run(cluster={"launcher": "slurm", "env": {"A": "b"}})
    before = shell.everything()
    arguments = ("submit", "--dry-run", run_file, "--nodes", "3", "--set", "phases.0.lr=3e-4")
    done = shell.zslurm(*arguments)
    assert (done.code, done.stderr) == (0, "")
    head, _, script = done.stdout.partition("#!/bin/bash\n")
    assert all(line.startswith("#") for line in head.splitlines())
    assert "# 3 nodes x 1 rank on local; 10 steps, 960 tokens of 4k in the data" in head
    shown = [" ".join(line.split()) for line in head.splitlines()]
    assert "# phases[0].lr 0.0003 [--set phases.0.lr]" in shown
    assert f"# cluster.env.A b [run file {run_file}:{_line(run_file, 'A')}]" in shown
    assert "#SBATCH --nodes=3\n" in script
    body = json_of(shell.zslurm(*arguments, "--json"))
    assert isinstance(body, dict)
    assert body["script"] == f"#!/bin/bash\n{script}"
    assert (body["nodes"], body["ranks"], body["steps"], body["launcher"]) == (3, 3, 10, "slurm")
    assert body["values"]["slurm.nodes"] == {"value": 3, "origin": "--nodes"}
    assert body["environment"]["A"] == "b"
    assert body["run_dir"] == f"{shell.directory}/runs/tiny"
    assert shell.everything() == before


def _line(run_file: Path, key: str) -> int:
    lines = run_file.read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if line.strip().startswith(f'"{key}"'))


def test_profile_is_short_for_a_setting(shell: Shell) -> None:
    shell.write_run()
    shown = shell.zslurm("submit", "--dry-run", "run.yaml", "--profile", "2:5").stdout
    by_key = shell.zslurm("submit", "--dry-run", "run.yaml", "--set", "metrics.profile=2:5").stdout
    lines, others = ([" ".join(line.split()) for line in text.splitlines()] for text in (shown, by_key))
    line = "# metrics.profile 2:5 [--profile]"
    assert line in lines
    assert [each.replace("--set metrics.profile", "--profile") for each in others] == lines


def test_templates_are_listed_and_shown(shell: Shell) -> None:
    rows = rows_of(shell.zslurm("config", "template", "ls"))
    assert rows[0] == ["name", "owner", "place", ""]
    assert [row[0] for row in rows[1:]] == ["local", "train"]
    assert json_of(shell.zslurm("config", "template", "ls", "--json")) == [
        {"name": name, "owner": owner, "used": True, "place": place} for name, owner, place, _ in rows[1:]
    ]
    source = shell.zslurm("config", "template", "show", "train").stdout
    assert "#SBATCH --{{ flag }}{{ value | directive }}" in source
    (shell.directory / "mine.j2").write_text(source)
    assert shell.zslurm("config", "template", "show", "mine.j2").stdout == source


def test_data_is_described(shell: Shell) -> None:
    body = json_of(shell.zslurm("data", "show", "tokens.h5", "--json"))
    assert isinstance(body, dict)
    assert (body["tokens"], body["vocab_size"], body["bundles"]) == (4000, 64, 1)
    assert "tokens            4000\n" in shell.zslurm("data", "show", "tokens.h5").stdout


def test_status_of_no_runs_is_an_empty_list(shell: Shell) -> None:
    assert json_of(shell.zslurm("status", "--json")) == []
    done = shell.zslurm("status")
    assert (done.code, done.stdout) == (0, "")
    assert done.stderr == "no runs yet; `zslurm submit run.yaml` starts one\n"


def test_status_of_a_run_that_was_only_prepared(shell: Shell) -> None:
    run = shell.directory / "runs" / "r"
    run.mkdir(parents=True)
    (run / "config.json").write_text("{}")
    rows = rows_of(shell.zslurm("status"))
    assert rows[0][:3] == ["run", "state", "job"]
    assert rows[1][:3] == ["r", "prepared", "-"]
    (body,) = json_of(shell.zslurm("status", "r", "--json"))  # type: ignore[misc]
    assert (body["state"], body["active"], body["job_id"]) == ("prepared", False, None)


def test_init_without_slurm_prints_the_profile_it_writes(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(shell.directory))
    done = shell.zslurm("init", "--yes", "--name", "desk")
    path = Path(os.environ["XDG_CONFIG_HOME"]) / "zslurm" / "clusters" / "desk.yaml"
    assert done.code == 0
    assert done.stdout == path.read_text()
    assert done.stderr == f"wrote {path}; it is now the default cluster\n"
    shown = shell.zslurm("config", "show", shell.write_run(cluster=None))
    assert "cluster.name = desk" in shown.stdout.splitlines()
    code, line = shell.fails("init", "--yes", "--name", "../evil")
    assert code == 2
    assert "a profile's name is letters" in line


def test_init_asks_before_it_replaces_a_profile(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(shell.directory))
    shell.zslurm("init", "--yes", "--name", "desk")
    path = Path(os.environ["XDG_CONFIG_HOME"]) / "zslurm" / "clusters" / "desk.yaml"
    path.write_text("cluster: {launcher: local}\n# mine\n")
    for answer, code in (("n\n", 1), ("", 1), ("y\n", 0)):
        assert path.read_text().endswith("# mine\n")
        monkeypatch.setattr(sys, "stdin", io.StringIO(answer))
        assert shell.zslurm("init", "--name", "desk").code == code
    assert not path.read_text().endswith("# mine\n")


@pytest.mark.parametrize("arguments", [["config", "schema"], ["foo"]])
def test_a_reader_that_has_gone_ends_a_command_as_sigpipe_does(arguments: list[str]) -> None:
    """As in `zslurm config schema | head -1`; a command that prints nothing there is not concerned."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "zslurm", *arguments]
    environment = {name: value for name, value in clean_environment().items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, env=environment)
    os.close(writer)
    if arguments == ["foo"]:
        assert done.returncode == 2
    else:
        assert (done.returncode, done.stderr) == (141, "")


def test_a_closed_stream_is_no_reason_for_a_traceback() -> None:
    """As in `zslurm config recipes >&-`, from cron or a daemon."""
    command = f"{sys.executable} -m zslurm config recipes"
    for closed, code in ((">&-", 0), ("<&- >&- 2>&-", 0), ("--foo 2>&-", 2)):
        shell = ["sh", "-c", f"{command} {closed}"]
        done = subprocess.run(shell, capture_output=True, text=True, env=clean_environment())
        assert (done.returncode, done.stderr) == (code, ""), closed


@pytest.mark.parametrize("ignored", [False, True])
def test_an_interrupt_while_modules_are_imported_shows_no_imports(ignored: bool, tmp_path: Path) -> None:
    """If the caller ignores it, as nohup and `&` in a script do, the command goes on."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, signal, sys\n"
        "class Interrupts:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'zslurm.cli.main':\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Interrupts())\n"
    )
    trap = "trap '' INT;" if ignored else ""
    command = f"{trap} exec {sys.executable} -m zslurm --version"
    environment = clean_environment() | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, env=environment)
    assert done.stderr == ""
    assert done.returncode == (0 if ignored else -signal.SIGINT)


def test_cells_of_a_piped_table_hold_no_tabs_or_line_breaks(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(["a", "b"], [["x\ty", "1\n2"], ["", "é"]])
    assert capsys.readouterr().out == "a\tb\nx y\t1 2\n\té\n"


def test_a_table_on_a_terminal_is_aligned_and_shows_markup_as_it_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "60")
    print_table(["run", "note"], [["[red]x[/red]", "y"]])
    out = capsys.readouterr().out
    assert "[red]x[/red]" in out
    assert "\t" not in out
