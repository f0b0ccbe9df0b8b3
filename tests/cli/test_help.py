"""Every command explains itself with an example that works, and costs no more to start than it must."""

from __future__ import annotations

import json
import pkgutil
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import zslurm
from tests.cli.commands import Shell, fresh_python
from zslurm.bench.measurement import BENCHMARKS
from zslurm.cli.commands import COMMANDS as TABLE
from zslurm.cli.commands import FURTHER_HEADINGS, HEADINGS, load
from zslurm.core.errors import Exit

MODULES_OF = """
import json, sys
sys.argv = ["zslurm", *sys.argv[1:]]
from zslurm.cli.main import main
try:
    main()
except SystemExit as ended:
    print(json.dumps([ended.code, sorted(sys.modules)]))
"""
IMPORT_ALL = """
import importlib, json, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
    assert "torch" not in sys.modules, name
print(json.dumps(sorted(sys.modules)))
"""


def commands(group: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command below a group, with its words."""
    for name, listed in group.commands.items():
        command = listed if path else load(name)
        if hasattr(command, "commands"):
            yield from commands(command, (*path, name))
        else:
            yield (*path, name), command


COMMANDS = dict(found for name in TABLE for found in commands(SimpleNamespace(commands={name: load(name)})))


def examples_of(command: Any) -> list[str]:
    """What comes after `Example:` in a command's help."""
    lines = [line for line in command.help.splitlines() if line.startswith("Example: ")]
    assert lines
    return [str(line.removeprefix("Example: ")) for line in lines]


@pytest.mark.parametrize("name", TABLE)
def test_the_listed_help_is_the_commands(name: str) -> None:
    assert TABLE[name].help == load(name).get_short_help_str(1000)


def test_the_promised_commands_are_there() -> None:
    promised = "init submit status logs cancel requeue demo".split()
    groups = [
        ("config", "show"),
        ("config", "schema"),
        ("config", "template", "ls"),
        ("config", "template", "show"),
        ("data", "build"),
        ("data", "verify"),
    ]
    assert {(name,) for name in promised} | {*groups, ("data", "show"), ("aegis", "run")} <= set(COMMANDS)


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_a_commands_example_is_that_command_and_parses(path: tuple[str, ...]) -> None:
    for example in examples_of(COMMANDS[path]):
        words = shlex.split(example.partition(" > ")[0])
        assert tuple(words[: len(path) + 1]) == ("zslurm", *path)
        COMMANDS[path].make_context("zslurm", words[len(path) + 1 :])


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_a_commands_help_describes_every_option(shell: Shell, path: tuple[str, ...]) -> None:
    done = shell.zslurm(*path, "--help")
    assert (done.code, done.stderr) == (0, "")
    assert "Example: zslurm " in done.stdout
    for parameter in COMMANDS[path].params:
        assert parameter.help, parameter.name


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_help_has_words_for_values_and_no_types_of_python(shell: Shell, path: tuple[str, ...]) -> None:
    text = shell.zslurm(*path, "--help").stdout
    types = r"<(?!think>)\w+( range)?>|list\[|x>=|<=x|\{[A-Z]"  # <think> is a value: the tag of chains of thought
    assert not re.search(types, text), text
    assert not re.search(r"^  [A-Z]+\]|\[[^]]*(\de[+-]?\d|\d{7})[^]]*\]$", text, re.MULTILINE), text


GROUPS = [(), *sorted({path[:-1] for path in COMMANDS if len(path) > 1})]


@pytest.mark.parametrize("group", GROUPS, ids=" ".join)
def test_no_line_of_a_list_of_commands_is_cut(shell: Shell, group: tuple[str, ...]) -> None:
    text = shell.zslurm(*group, "--help").stdout
    assert "..." not in text.replace("[ARGS]...", "")
    assert max(map(len, text.splitlines())) <= 80


EVERYDAY = [name for names in HEADINGS.values() for name in names.split()]


def test_every_command_is_under_a_heading_and_help_shows_the_everyday_ones(shell: Shell) -> None:
    everything = HEADINGS | FURTHER_HEADINGS
    short, whole = shell.zslurm("--help").stdout, shell.zslurm.ok("help", "--all").stdout
    for text, headings in ((short, HEADINGS), (whole, everything)):
        places = [text.index(f"\n{heading}:\n") for heading in headings]
        assert places == sorted(places)
    assert set(TABLE) == {name for names in everything.values() for name in names.split()}
    listed = [name for name in TABLE if f"\n  {name} " in short]
    assert sorted(listed) == sorted(EVERYDAY)
    assert len(EVERYDAY) == 18
    assert [name for name in TABLE if f"\n  {name} " not in whole] == []
    assert max(map(len, whole.splitlines())) <= 80


@pytest.mark.parametrize("path", [("eval",), ("generate",), ("data", "build"), ("plan", "run")], ids=" ".join)
def test_short_help_has_ten_options_and_help_all_has_all(shell: Shell, path: tuple[str, ...]) -> None:
    options = [each for each in COMMANDS[path].params if each.param_type_name == "option"]
    short, whole = shell.zslurm.ok(*path, "--help").stdout, shell.zslurm.ok("help", "--all", *path).stdout

    def shown(text: str) -> list[str]:
        return [each.name for each in options if re.search(rf"^  (-\w, )?{each.opts[-1]}\b", text, re.MULTILINE)]

    assert len(shown(short)) <= 10
    assert shown(whole) == [each.name for each in options]
    assert f"{len(options) - len(shown(short))} more options: zslurm help --all {' '.join(path)}" in short


def test_help_of_a_command_is_that_of_its_option_and_an_unknown_one_is_refused(shell: Shell) -> None:
    assert shell.zslurm.ok("help").stdout == shell.zslurm.ok("--help").stdout
    for words in (("submit",), ("config", "template"), ("config", "template", "copy")):
        assert shell.zslurm.ok("help", *words).stdout == shell.zslurm.ok(*words, "--help").stdout
    for words in (("nonesuch",), ("data", "nonesuch"), ("submit", "nonesuch")):
        code, line = shell.fails("help", *words)
        assert (code, f"there is no command `{' '.join(words)}`" in line) == (Exit.USAGE, True)


@pytest.mark.parametrize(
    "name", "events compare size env rails template move kernels tune hostlist hold release".split()
)
def test_a_command_that_is_elsewhere_now_is_not_found_under_its_old_name(shell: Shell, name: str) -> None:
    assert shell.fails(name)[0] == Exit.USAGE


def test_commands_that_only_scripts_call_are_not_listed(shell: Shell) -> None:
    assert "\n  run " not in shell.zslurm("aegis", "--help").stdout
    assert "Supervise" in shell.zslurm("aegis", "run", "--help").stdout


def test_the_short_options_are_those_of_sbatch(shell: Shell) -> None:
    shell.write_run(cluster={"launcher": "slurm"})
    short = ("-N", "3", "-p", "gpu", "-A", "lab", "-t", "60", "-w", "node[0-2]", "-x", "node9", "-J", "mine")
    names = "--nodes --partition --account --time --nodelist --exclude --job-name".split()
    long = [word for name, value in zip(names, short[1::2], strict=True) for word in (name, value)]
    shown = shell.zslurm("submit", "--dry-run", "run.yaml", *short)
    assert shown.stdout == shell.zslurm("submit", "--dry-run", "run.yaml", *long).stdout
    for line in ("--nodes=3", "--partition=gpu", "--account=lab", "--nodelist=node[0-2]", "--exclude=node9"):
        assert f"#SBATCH {line}\n" in shown.stdout, line
    assert "/runs/mine" in shown.stdout


@pytest.mark.parametrize("arguments", [("--help",), ("-h",)])
def test_the_programs_help_lists_commands_and_exit_codes(shell: Shell, arguments: tuple[str, ...]) -> None:
    done = shell.zslurm(*arguments)
    assert (done.code, done.stderr) == (0, "")
    assert done.stdout.startswith("Usage: zslurm [OPTIONS] COMMAND")
    text = " ".join(done.stdout.split())
    for code in Exit:
        assert f" {int(code)} " in text.partition("Exit codes:")[2]


@pytest.mark.parametrize("arguments", [(), ("config",), ("data",)])
def test_a_command_without_arguments_shows_its_help(shell: Shell, arguments: tuple[str, ...]) -> None:
    done = shell.zslurm(*arguments)
    assert done.code == Exit.USAGE
    assert done.stderr.startswith("Usage: zslurm ")


def test_the_version(shell: Shell) -> None:
    assert shell.zslurm("--version").stdout == f"zslurm {zslurm.__version__}\n"


def modules_of(*arguments: str, cwd: Path) -> set[str]:
    """What a command has imported when it is done."""
    done = fresh_python(MODULES_OF, *arguments, cwd=cwd)
    code, modules = json.loads(done.stdout.splitlines()[-1])
    assert code == 0, done.stderr
    return set(modules)


def test_help_loads_nothing_but_the_parser(shell: Shell) -> None:
    ours = {"zslurm.config", "zslurm.submit", "zslurm.cluster", "zslurm.slurm", "zslurm.train"}
    heavy = {"torch", "yaml", "jinja2", "submitit", "numpy", "h5py", "psutil", "rich.console", "rich.table"}
    assert not modules_of("--help", cwd=shell.directory) & (ours | heavy | {"pydantic"})
    of_submit = modules_of("submit", "--help", cwd=shell.directory)
    alone = ours | heavy | {"zslurm.run", "zslurm.slurm.client"}
    assert not of_submit & (alone - {"zslurm.train", "zslurm.slurm"}), "its options alone"


def test_a_dry_run_and_status_load_no_torch(shell: Shell) -> None:
    shell.write_run()
    assert not modules_of("submit", "--dry-run", "run.yaml", cwd=shell.directory) & {"torch", "submitit"}
    assert not modules_of("status", cwd=shell.directory) & {"torch", "submitit", "numpy", "yaml", "jinja2"}


def test_no_module_above_the_trainer_imports_torch() -> None:
    """The linter's contract names rooms; this holds for all modules but those that only ranks import."""
    in_ranks = {f"zslurm.bench.run.{name}" for name in ("local", "machine", "rank", "store", "timing")}
    in_ranks |= {"zslurm.bench.pairs", "zslurm.bench.parts", "zslurm.bench.ranks"}
    in_ranks |= {f"zslurm.job.{kind}_{part}" for kind in ("evaluation", "generation") for part in ("rank", "step")}
    in_ranks |= {"zslurm.job.ranks_step"}
    in_ranks |= {benchmark.module for benchmark in BENCHMARKS.values()}
    names = [
        module.name
        for module in pkgutil.walk_packages(zslurm.__path__, "zslurm.")
        if not module.name.startswith(("zslurm.train.", "zslurm.kernels."))
        and not module.name.endswith("__main__")
        and module.name not in in_ranks
    ]
    assert len(names) > 40
    done = fresh_python(IMPORT_ALL, *names)
    assert done.code == 0, done.stderr
    assert set(names) <= set(json.loads(done.stdout))
