"""A run file may extend a recipe or another file; relative paths belong to the file that gives them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.config.run_files import PHASES, complaint, resolve_text, write
from zslurm.config.load import recipes, resolve


def test_a_chain_of_files_down_to_a_recipe(tmp_path: Path) -> None:
    write(
        tmp_path / "common" / "base.yaml", "extends: zaya1-tiny\nmodel: {layers: 3}\nrun: {name: base, seed: 1}\n"
    )
    write(tmp_path / "middle.yaml", "extends: common/base.yaml\nrun: {name: middle}\n")
    spec = resolve_text(tmp_path, "extends: middle.yaml\nrun: {seed: 2}\n").spec
    assert (spec.run.name, spec.run.seed, spec.model.layers, spec.model.hidden_size) == ("middle", 2, 3, 128)


def test_a_recipes_name_wins_over_a_file_of_that_name(tmp_path: Path) -> None:
    write(tmp_path / "zaya1-tiny", "nonsense: 1\n")
    assert resolve_text(tmp_path, "extends: zaya1-tiny\n").spec.model.hidden_size == 128


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("zaya1-tyni", "no recipe and no file is called `zaya1-tyni`; did you mean `zaya1-tiny`?"),
        ("nonesuch.yaml", f"no recipe and no file is called `nonesuch.yaml`; recipes: {', '.join(recipes())}"),
        ("~nobodyatall/x", f"no recipe and no file is called `~nobodyatall/x`; recipes: {', '.join(recipes())}"),
        ("[a, b]", 'expected the name of a recipe or a file, got ["a", "b"]'),
        ("12", "expected the name of a recipe or a file, got 12"),
    ],
)
def test_an_unknown_base_suggests_the_nearest(tmp_path: Path, name: str, message: str) -> None:
    text = f"run: {{name: x}}\nextends: {name}\n"
    assert complaint(tmp_path, text) == f"run.yaml:2: extends: {message}"


@pytest.mark.parametrize("back", ["run.yaml", "./run.yaml", "../{here}/run.yaml"])
def test_files_that_extend_each_other_are_refused(tmp_path: Path, back: str) -> None:
    write(tmp_path / "base.yaml", f"extends: {back.format(here=tmp_path.name)}\n")
    line = complaint(tmp_path, "extends: base.yaml\n")
    assert line.startswith("base.yaml:1: extends: ")
    assert line.endswith("is laid under itself; a base cannot extend its heir")


def test_a_file_that_extends_itself_is_refused(tmp_path: Path) -> None:
    assert "is laid under itself" in complaint(tmp_path, f"extends: ../{tmp_path.name}/run.yaml\n")


def test_a_problem_in_a_base_names_the_base(tmp_path: Path) -> None:
    write(tmp_path / "base.yaml", "run:\n  name: a b\n")
    assert complaint(tmp_path, f"extends: base.yaml\n{PHASES}").startswith(
        "base.yaml:2: run.name: must be letters"
    )
    write(tmp_path / "base.yaml", "run: [\n")
    assert complaint(tmp_path, "extends: base.yaml\n").startswith("base.yaml:2: not valid YAML")


def test_relative_paths_belong_to_the_file_that_gives_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    write(tmp_path / "base" / "base.yaml", "data: {path: tokens}\ncluster: {template: site.sbatch.j2}\n")
    text = f"extends: base/base.yaml\nrun: {{runs_dir: out}}\n{PHASES}"
    spec = resolve_text(tmp_path, text).spec
    assert spec.data.path == str(tmp_path / "base" / "tokens")
    assert spec.cluster.template == str(tmp_path / "base" / "site.sbatch.j2")
    assert spec.run.runs_dir == str(tmp_path / "out")
    spec = resolve_text(tmp_path, text, "data.path=tokens", "cluster.template=train", "run.runs_dir=here").spec
    assert spec.data.path == str(elsewhere / "tokens")
    assert spec.run.runs_dir == str(elsewhere / "here")
    assert spec.cluster.template == "train", "a name, not a path"
    assert resolve_text(tmp_path, PHASES).spec.run.runs_dir == str(elsewhere / "runs"), "the default"


def test_a_relative_place_of_weights_is_that_of_the_file_that_gives_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    write(tmp_path / "base" / "base.yaml", "init: hf:zaya-hf\n")
    text = f"extends: base/base.yaml\n{PHASES}"
    assert resolve_text(tmp_path, text).spec.init == f"hf:{tmp_path}/base/zaya-hf"
    assert resolve_text(tmp_path, text, "init=ckpt:runs/a").spec.init == f"ckpt:{elsewhere}/runs/a"
    assert resolve_text(tmp_path, text + "init: ckpt:~/a\n").spec.init == f"ckpt:{Path.home()}/a"
    assert resolve_text(tmp_path, text + "init: ckpt:/a/b:c\n").spec.init == "ckpt:/a/b:c"
    assert resolve_text(tmp_path, text, "init=null").spec.init is None
    assert resolve_text(tmp_path, text + "init:\n").spec.init is None
    assert complaint(tmp_path, PHASES + "init: hf:a%j\n").startswith("run.yaml:7: init: a path here cannot hold")


def test_a_relative_run_file_gives_absolute_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "sub" / "run.yaml", f"{PHASES}data: {{path: tokens}}\n")
    monkeypatch.chdir(tmp_path)
    assert resolve(Path("sub/run.yaml")).spec.data.path == str(tmp_path / "sub" / "tokens")


def test_home_directories_are_filled_in(tmp_path: Path) -> None:
    spec = resolve_text(tmp_path, f"{PHASES}data: {{path: ~/tokens}}\nrun: {{runs_dir: ~nobodyatall}}\n").spec
    assert spec.data.path == str(Path.home() / "tokens")
    assert spec.run.runs_dir == str(tmp_path / "~nobodyatall"), "nobody's home is a name like any other"


@pytest.mark.parametrize("path", [r"a\b", "a%j", r'"a\nb"', r'"a\0b"', r'"a\x1bb"', r'"a\u2028b"', r'"a\ud800"'])
@pytest.mark.parametrize("key", ["data.path", "run.runs_dir"])
def test_paths_that_no_script_can_hold_are_refused(tmp_path: Path, key: str, path: str) -> None:
    section, name = key.split(".")
    line = complaint(tmp_path, f"{PHASES}{section}:\n  {name}: {path}\n")
    assert line.startswith(f"run.yaml:8: {key}: a path here cannot hold '%', '\\' or control characters: ")


def test_a_working_directory_that_no_script_can_hold_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "100%").mkdir()
    run_file = write(tmp_path / "run.yaml", PHASES)
    monkeypatch.chdir(tmp_path / "100%")
    with pytest.raises(Exception, match=r"^default: run\.runs_dir: a path here cannot hold '%'"):
        resolve(run_file)
