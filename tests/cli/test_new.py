"""`zslurm new`, and the YAML of `zslurm config show --changed`."""

from __future__ import annotations

import json
import shlex
from typing import Any

import pytest
import yaml

from tests.cli.commands import PHASE, Shell
from zslurm.train.data.bundle import Corpus


def resolved(shell: Shell, *arguments: str) -> Any:
    return shell.zslurm.ok("config", "show", *arguments, "--json", "--cluster", "local").json


def test_a_new_run_file_is_commented_and_valid_for_each_recipe(shell: Shell) -> None:
    for recipe in ("zaya1-tiny", "zaya1-8b"):
        name = f"{recipe}.yaml"
        shell.zslurm.ok("new", name, "--recipe", recipe, "--data", "tokens.h5", "--nodes", "3")
        text = (shell.directory / name).read_text()
        assert text.count("#") > 20
        spec = resolved(shell, name)
        assert (spec["run"]["name"], spec["slurm"]["nodes"]) == (recipe, 3)
        assert spec["data"]["path"] == f"{shell.directory}/tokens.h5"


@pytest.mark.parametrize("recipe", ["zaya1-100m", "zaya1-8b"])
def test_every_commented_key_can_be_taken_in(shell: Shell, recipe: str) -> None:
    """Each `# key: value` becomes part of the file; what it says is what holds already, or an example."""
    shell.zslurm.ok("new", "run.yaml", "--recipe", recipe)
    lines = (shell.directory / "run.yaml").read_text().splitlines()
    taken = []
    for line in lines:
        bare = line.replace("# ", "", 1)
        is_key = line.lstrip().startswith("#") and bare.strip() and _is_key(bare)
        taken.append(bare if is_key else line)
    (shell.directory / "taken.yaml").write_text("\n".join(taken) + "\n")
    spec = resolved(shell, "taken.yaml")
    assert (spec["slurm"]["time"], spec["slurm"]["partition"], spec["slurm"]["account"]) == (
        "24:00:00", "gpu", "my-account",
    )  # fmt: skip
    assert any("batch_ramp" in line for line in taken) == (recipe == "zaya1-8b")
    assert not [line for line in taken if line.startswith("# phases:")]
    before = resolved(shell, "run.yaml")
    for section in ("model", "phases", "checkpoint", "optim", "parallel", "metrics", "aegis", "evaluation"):
        assert spec[section] == before[section], section


def _is_key(line: str) -> bool:
    key, colon, value = line.strip().removeprefix("- ").partition(":")
    return bool(colon) and key.isidentifier() and (value == "" or value.startswith(" "))


def test_a_file_is_not_replaced_and_an_unknown_recipe_is_named(shell: Shell) -> None:
    shell.write_run()
    assert "it exists" in shell.fails("new", "run.yaml")[1]
    assert "no such recipe" in shell.fails("new", "other.yaml", "--recipe", "zaya9")[1]
    assert shell.zslurm.ok("new", "-").stdout.startswith("# A run of zaya1-tiny: ")


def test_what_is_changed_is_a_run_file_of_the_same_run(shell: Shell) -> None:
    shell.write_run(slurm={"time": "24:00:00", "account": "1e5"}, aegis={"retries": 7})
    text = shell.zslurm.ok("config", "show", "run.yaml", "--changed", "--set", "run.seed=9").stdout
    assert "retries: 7" in text
    assert "grace_s" not in text, "a default"
    assert "schedule" not in text, "a default of a phase"
    assert yaml.safe_load(text)["phases"] == [PHASE]
    (shell.directory / "again.yaml").write_text(text)
    assert resolved(shell, "again.yaml") == resolved(shell, "run.yaml", "--set", "run.seed=9")
    assert yaml.safe_load(text)["run"]["seed"] == 9
    body = json.loads(shell.zslurm.ok("config", "show", "run.yaml", "--changed", "--json").stdout)
    assert body["slurm"]["account"] == "1e5"
    assert "--origin" in shell.fails("config", "show", "run.yaml", "--changed", "--origin")[1]


def test_the_commands_that_new_prints_work_without_a_profile(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ZSLURM_CLUSTER", raising=False)
    (shell.directory / "TEXTS").write_text(" ".join(f"word{n % 97} of line {n}" for n in range(30000)))
    build, see = shell.zslurm.ok("new", "run.yaml").stderr.splitlines()
    for line in (build, see):
        command = shlex.split(line.partition(": ")[2])
        assert command.pop(0) == "zslurm"
        shell.zslurm.ok(*command)


def test_texts_become_the_data_of_the_run(shell: Shell) -> None:
    words = " ".join(f"word{n % 97} of line {n}" for n in range(3000))
    (shell.directory / "texts").mkdir()
    (shell.directory / "texts" / "book.txt").write_text(words)
    shell.zslurm.ok("new", "run.yaml", "--text", "texts", "--data", "mine")
    assert Corpus.open(shell.directory / "mine").document_count == 1
    assert resolved(shell, "run.yaml")["data"]["path"] == f"{shell.directory}/mine"
    assert shell.fails("new", "other.yaml", "--text", "nowhere")[0] == 3
    assert not (shell.directory / "other.yaml").exists()


def test_pairs_are_compared_with_the_context_of_the_recipe(shell: Shell) -> None:
    rows = [{"prompt": f"def f{n}():\n", "completion": f"Return {n}. " * (200 if n < 2 else 1)} for n in range(60)]
    (shell.directory / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    refused = shell.zslurm("new", "run.yaml", "--pairs", "pairs.jsonl")
    assert refused.code == 2
    assert "2 pairs of 60 are longer than the context of the recipe, 256 tokens" in refused.stderr
    assert not (shell.directory / "run.yaml").exists()
    shell.zslurm.ok("new", "run.yaml", "--pairs", "pairs.jsonl", "--long-pairs", "trim")
    assert resolved(shell, "run.yaml")["data"]["long_documents"] == "trim"
    (shell.directory / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[2:]))
    shell.zslurm.ok("new", "short.yaml", "--pairs", "pairs.jsonl", "--data", "short")
    assert resolved(shell, "short.yaml")["data"]["long_documents"] == "refuse"


def test_long_pairs_without_pairs_are_refused(shell: Shell) -> None:
    code, line = shell.fails("new", "run.yaml", "--long-pairs", "trim")
    assert (code, "there are no pairs; name their files with --pairs" in line) == (2, True)
