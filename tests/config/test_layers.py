"""Later layers win, key by key; lists are replaced whole; every value remembers the file and line it came from."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.config.run_files import PHASES, complaint, resolve_text, write
from zslurm.config.layers import Override, parse_path, show_path
from zslurm.config.load import Resolved
from zslurm.config.spec import RunSpec


def origins(resolved: Resolved, directory: Path) -> dict[str, str]:
    """Key -> origin of every value."""
    return {show_path(path): str(origin).replace(f"{directory}/", "") for path, _, origin in resolved.rows()}


def test_each_layer_wins_over_those_before_it(tmp_path: Path) -> None:
    """aegis.grace_s is 30 by default; every further layer that gives it wins, and says so."""
    write(tmp_path / "base.yaml", f"{PHASES}aegis: {{grace_s: 3}}\n")
    layers = [
        ("", {}, 30.0, "default"),
        ("", {"profile": "aegis: {grace_s: 1}\n"}, 1.0, "cluster profile lab.yaml:1"),
        ("extends: base.yaml\n", {"profile": "aegis: {grace_s: 1}\n"}, 3.0, "base file base.yaml:7"),
        (
            "extends: base.yaml\naegis:\n  grace_s: 4\n",
            {"profile": "aegis: {grace_s: 1}\n"},
            4.0,
            "run file run.yaml:3",
        ),
    ]
    for text, profile, value, origin in layers:
        phases = "" if "extends" in text else PHASES
        resolved = resolve_text(tmp_path, text + phases, **profile)
        assert resolved.spec.aegis.grace_s == value
        assert origins(resolved, tmp_path)["aegis.grace_s"] == origin
    text, profile, _, _ = layers[-1]
    resolved = resolve_text(tmp_path, text, "aegis.grace_s=5", "aegis.grace_s=6", **profile)
    assert resolved.spec.aegis.grace_s == 6
    assert origins(resolved, tmp_path)["aegis.grace_s"] == "--set aegis.grace_s"


def test_a_recipe_lies_between_profile_and_run_file(tmp_path: Path) -> None:
    profile = "parallel:\n  dtype: bf16\n  threads: 3\n"
    resolved = resolve_text(tmp_path, "extends: zaya1-tiny\nmodel: {layers: 2}\n", profile=profile)
    found = origins(resolved, tmp_path)
    assert (resolved.spec.parallel.dtype, resolved.spec.parallel.threads) == ("fp32", 3)
    assert found["parallel.dtype"].startswith("recipe zaya1-tiny:")
    assert found["parallel.threads"] == "cluster profile lab.yaml:3"
    assert found["model.layers"] == "run file run.yaml:2"
    assert found["model.hidden_size"].startswith("recipe zaya1-tiny:")
    assert found["model.norm_eps"] == "default"


def test_mappings_merge_and_lists_replace(tmp_path: Path) -> None:
    profile = (
        "cluster:\n  setup: [module load rocm, ulimit -l unlimited]\n  env: {A: site, B: site}\n"
        "slurm: {flags: {reservation: spring}}\n"
    )
    text = f"{PHASES}cluster:\n  setup: [echo mine]\n  env: {{B: mine}}\nslurm: {{flags: {{exclusive: true}}}}\n"
    resolved = resolve_text(tmp_path, text, profile=profile)
    assert resolved.spec.cluster.setup == ("echo mine",)
    assert resolved.spec.cluster.env == {"A": "site", "B": "mine"}
    assert resolved.spec.slurm.flags == {"reservation": "spring", "exclusive": True}
    found = origins(resolved, tmp_path)
    assert found["cluster.setup[0]"] == "run file run.yaml:8"
    assert found["cluster.env.A"] == "cluster profile lab.yaml:3"
    assert found["cluster.env.B"] == "run file run.yaml:9"


def test_overrides_reach_into_lists_and_make_sections(tmp_path: Path) -> None:
    resolved = resolve_text(
        tmp_path,
        PHASES,
        "phases.0.lr=3e-4",
        "optim.betas=[0.8, 0.9]",
        "optim.betas[1]=0.95",
        "slurm.flags.comment=a=b:c",
        "slurm.time=24:00:00",
        "optim.clip_norm=",
    )
    spec = resolved.spec
    assert spec.phases[0].lr == 3e-4
    assert spec.phases[0].tokens == 960
    assert spec.optim.betas == (0.8, 0.95)
    assert spec.slurm.flags["comment"] == "a=b:c"
    assert spec.slurm.time == "24:00:00"
    assert spec.optim.clip_norm is None
    found = origins(resolved, tmp_path)
    assert found["phases[0].lr"] == "--set phases.0.lr"
    assert found["phases[0].tokens"] == "run file run.yaml:2"
    assert found["optim.betas[0]"] == "--set optim.betas"
    assert found["optim.betas[1]"] == "--set optim.betas[1]"
    assert found["optim.clip_norm"] == "--set optim.clip_norm"


def test_a_replaced_list_forgets_where_its_old_items_came_from(tmp_path: Path) -> None:
    resolved = resolve_text(tmp_path, f"extends: zaya1-tiny\n{PHASES}")
    found = origins(resolved, tmp_path)
    assert found["phases[0].tokens"] == "run file run.yaml:3"
    assert found["phases[0].warmup_steps"] == "default"
    for path in resolved.layers.origins:
        value: object = resolved.layers.data
        for part in path:
            value = value[part]  # type: ignore[index]


def test_every_value_of_a_run_has_an_origin(tmp_path: Path) -> None:
    rows = resolve_text(tmp_path, PHASES).rows()
    sections = {str(path[0]) for path, _, _ in rows}
    assert sections == set(RunSpec.model_fields)
    given = {show_path(path) for path, _, origin in rows if origin.layer != "default"}
    assert given == {f"phases[0].{key}" for key in ("tokens", "context", "global_batch", "micro_batch", "lr")}


def test_a_section_whose_lines_are_all_commented_out_says_nothing(tmp_path: Path) -> None:
    profile = "slurm:\n  partition: gpu\n"
    text = f"{PHASES}slurm:\n  # time: 24:00:00\nmodel:\n"
    spec = resolve_text(tmp_path, text, "model.layers=2", profile=profile).spec
    assert spec.slurm.partition == "gpu"
    assert spec.model.layers == 2


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("slurm.nodes", "--set slurm.nodes: expected KEY=VALUE, such as phases.0.lr=3e-4"),
        ("=4", "--set =4: expected KEY=VALUE, such as phases.0.lr=3e-4"),
        ("a b=4", "--set a b=4: expected KEY=VALUE, such as phases.0.lr=3e-4"),
        ("phases[x].lr=4", "--set phases[x].lr=4: expected KEY=VALUE, such as phases.0.lr=3e-4"),
        ("phases[1].lr=1", "--set phases[1].lr: there is no item [1]; the list has 1"),
        ("model[0]=1", "--set model[0]: `model` is not a list"),
        ("phase[0].lr=1", "--set phase[0].lr: `phase` is not a list; did you mean `phases[0]`?"),
        (Override.of("slurm.nodes", "two", "--nodes"), '--nodes: slurm.nodes: expected a number, got "two"'),
        (
            Override.of("run.name", "grün", "--job-name"),
            "--job-name: run.name: must be letters, digits, '.', '_' and '-', and begin with a letter or digit "
            '(it becomes a directory and a job name), got "grün"',
        ),
        ("phases.lr=1", "--set phases.lr: phases holds no keys"),
        ("phases[0].lr.x=1", "--set phases[0].lr.x: phases[0].lr holds no keys"),
        ("run.name=[a", "--set run.name:1: not valid YAML: expected ',' or ']', but got '<stream end>': [a"),
        ("slurm.nodes=two", '--set slurm.nodes: slurm.nodes: expected a number, got "two"'),
        ("slurm.node=2", "--set slurm.node: slurm.node: unknown key; did you mean `nodes`?"),
    ],
)
def test_a_bad_override_is_one_line(tmp_path: Path, assignment: str | Override, message: str) -> None:
    assert complaint(tmp_path, f"{PHASES}model: {{layers: 2}}\n", assignment) == message


def test_paths_of_keys_are_read_and_shown_alike() -> None:
    for text in ("a", "a.b", "phases[0].lr", "optim.betas[1]", "a-b.c_d[10][2]"):
        assert show_path(parse_path(text)) == text
    assert parse_path("phases[0].lr") == parse_path("phases.0.lr") == ("phases", 0, "lr")
    assert parse_path("a..b") == parse_path("[0]") == parse_path("") == parse_path("a[-1]") == ()
    assert show_path(("env", "two\nlines")) == 'env."two\\nlines"'
