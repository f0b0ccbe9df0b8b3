"""What the command line says of mixtures before a run is submitted."""

from __future__ import annotations

from tests.cli.commands import PHASE, Shell
from tests.cli.test_output import json_of
from tests.train.runs import make_corpus
from zslurm.core.errors import Exit

SOURCES = {"path": None, "sources": {"web": "tokens.h5", "code": "code.h5"}}


def test_a_dry_run_shows_what_is_taken_of_each_source(shell: Shell) -> None:
    make_corpus(shell.directory / "code.h5", 801)
    phases = [PHASE | {"name": "first"}, PHASE | {"name": "second", "mix": {"web": 1}}]
    shell.write_run(data=SOURCES, phases=phases)
    text = shell.zslurm("submit", "--dry-run", "run.yaml").stdout
    first, second = [line for line in text.splitlines() if " mixes " in line]
    assert first.startswith("# phase first mixes code 16.7 % (")
    assert second.startswith("# phase second mixes web 100 % (960 tokens, 0.24")
    found = json_of(shell.zslurm("submit", "--dry-run", "run.yaml", "--json"))["mixtures"]
    assert [mixture["phase"] for mixture in found] == ["first", "second"]
    assert found[1]["sources"]["web"]["share"] == 1
    assert sum(source["tokens"] for source in found[0]["sources"].values()) == 960


def test_one_corpus_is_no_mixture(shell: Shell) -> None:
    shell.write_run()
    assert " mixes " not in shell.zslurm("submit", "--dry-run", "run.yaml").stdout
    assert json_of(shell.zslurm("submit", "--dry-run", "run.yaml", "--json"))["mixtures"] == []


def test_a_misspelt_source_is_one_line(shell: Shell) -> None:
    shell.write_run(data=SOURCES, phases=[PHASE | {"mix": {"wbe": 1}}])
    code, line = shell.fails("submit", "run.yaml")
    assert code == Exit.USAGE
    assert line.endswith(": phases[0].mix.wbe: is not in data.sources; did you mean `web`?")
