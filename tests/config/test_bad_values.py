"""Whatever is wrong with a run file is one line: file, line, key, what was expected, the nearest valid key."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.config.run_files import PHASES, complaint, complaints, resolve_text, write


@pytest.mark.parametrize(
    ("text", "message"),
    [
        # unknown keys
        ("model:\n  hiden_size: 64", "run.yaml:8: model.hiden_size: unknown key; did you mean `hidden_size`?"),
        ("modle:\n  layers: 2", "run.yaml:7: modle: unknown key; did you mean `model`?"),
        ("extend: zaya1-tiny", "run.yaml:7: extend: unknown key; did you mean `extends`?"),
        ("init: first-hf", "run.yaml:7: init: expected hf:DIR (a folder in transformers' format) or ckpt:DIR ("),
        ("init: 'hf:'", "run.yaml:7: init: expected hf:DIR (a folder in transformers' format) or ckpt:DIR (a "),
        ("init: 5", "run.yaml:7: init: expected a valid string, got 5"),
        (
            "checkpoint:\n  start_from: x",
            "run.yaml:8: checkpoint.start_from: unknown key; did you mean `resume_from`?",
        ),
        ("run:\n  nodes: 2", "run.yaml:8: run.nodes: unknown key; did you mean `slurm.nodes`?"),
        ("lr: 1e-3", "run.yaml:7: lr: unknown key; did you mean `phases[0].lr`?"),
        (
            "data:\n  zzz: 1",
            "run.yaml:8: data.zzz: unknown key; known here: path",
        ),
        ('"two\\nlines": 1', 'run.yaml:7: "two\\nlines": unknown key; '),
        ("<<: {layers: 2}", 'run.yaml:7: "<<": unknown key; '),
        # wrong types
        ("model:\n  layers: two", 'run.yaml:8: model.layers: expected a number, got "two"'),
        ("model:\n  layers: '2'", 'run.yaml:8: model.layers: expected a number, got "2"'),
        ("model:\n  layers: true", "run.yaml:8: model.layers: expected a number, got true"),
        ("model:\n  layers: 2.5", "run.yaml:8: model.layers: expected a valid integer, got 2.5"),
        ("model:\n  layers: null", "run.yaml:8: model.layers: expected a valid integer, got null"),
        ("model:\n  layers: [2]", "run.yaml:8: model.layers: expected a valid integer, got [2]"),
        ("model:\n  layers: .inf", "run.yaml:8: model.layers: expected a finite number, got Infinity"),
        ("model: 5", "run.yaml:7: model: expected a mapping of keys to values, got 5"),
        ("model: [1]", "run.yaml:7: model: expected a mapping of keys to values, got [1]"),
        ("phases: 5", "run.yaml:7: phases: expected a list, got 5"),
        ("phases: [5]", "run.yaml:7: phases[0]: expected a mapping of keys to values, got 5"),
        ("model:\n  conv_widths: [2]", "run.yaml:8: model.conv_widths[1]: required, but not given"),
        ("model:\n  skip_expert: maybe", 'run.yaml:8: model.skip_expert: expected a valid boolean, got "maybe"'),
        (
            "parallel:\n  recompute: some",
            'run.yaml:8: parallel.recompute: expected true, false, a number of layers or auto, got "some"',
        ),
        ("parallel:\n  dtype: fp8", "run.yaml:8: parallel.dtype: expected 'fp32', 'bf16' or 'fp64', got \"fp8\""),
        (
            "slurm:\n  time: soon",
            "run.yaml:8: slurm.time: must be a Slurm time such as 24:00:00, 2-12 or minutes, ",
        ),
        (
            "slurm:\n  time: 1.5",
            "run.yaml:8: slurm.time: must be a Slurm time such as 24:00:00, 2-12 or minutes, ",
        ),
        (
            f"slurm:\n  time: '{'9' * 5000}'",
            f'run.yaml:8: slurm.time: must be a Slurm time such as 24:00:00, 2-12 or minutes, got "{"9" * 57}..."',
        ),
        ("slurm:\n  time: 24855-01", "run.yaml:8: slurm.time: must be at most 24855 days, the longest time that "),
        ("slurm:\n  time: 99999999", "run.yaml:8: slurm.time: must be at most 24855 days, the longest time that "),
        ("slurm:\n  partition: [a]", 'run.yaml:8: slurm.partition: expected a valid string, got ["a"]'),
        ("slurm:\n  flags:\n    x: {a: b}", 'run.yaml:9: slurm.flags.x: expected a valid string, got {"a": "b"}'),
        ("slurm:\n  flags:\n    x: [1]", "run.yaml:9: slurm.flags.x: expected a valid string, got [1]"),
        (
            "aegis:\n  notify:\n    url: ftp://host/x",
            "run.yaml:9: aegis.notify.url: must be http:// or https://, a host (no user or password ",
        ),
        (
            "aegis:\n  notify:\n    url: file:///etc/passwd",
            "run.yaml:9: aegis.notify.url: must be http:// or https://, a host (no user or password ",
        ),
        (
            "aegis:\n  notify:\n    url: host/hook",
            "run.yaml:9: aegis.notify.url: must be http:// or https://, a host (no user or password ",
        ),
        (
            "aegis:\n  notify:\n    url: https:///hook",
            "run.yaml:9: aegis.notify.url: must be http:// or https://, a host (no user or password ",
        ),
        (
            "aegis:\n  notify:\n    url: https://ada:pw7@host/x",
            "run.yaml:9: aegis.notify.url: must be http:// or https://, a host (no user or password ",
        ),
        (
            "aegis:\n  notify:\n    url: https://host:port/x",
            "run.yaml:9: aegis.notify.url: must be http:// or https://, a host (no user or password ",
        ),
        (
            "aegis:\n  notify:\n    url: 'https://host/a b'",
            "run.yaml:9: aegis.notify.url: must be http:// or https://, a host (no user or password ",
        ),
        (
            "aegis:\n  notify:\n    url: https://host/$1",
            "run.yaml:9: aegis.notify.url: `$` begins the name of a variable; write `$$` for one that ",
        ),
        ("slurm:\n  save_margin_s: x", 'run.yaml:8: slurm.save_margin_s: expected a valid integer, got "x"'),
        ("cluster:\n  launcher: pbs", "run.yaml:8: cluster.launcher: expected 'slurm' or 'local', got \"pbs\""),
        ("cluster:\n  setup: module load x", 'run.yaml:8: cluster.setup: expected a list, got "module load x"'),
        ("run:\n  name: a7\n  seed: x", 'run.yaml:9: run.seed: expected a number, got "x"'),
        # values out of range
        ("model:\n  hidden_size: 0", "run.yaml:8: model.hidden_size: expected greater than 0, got 0"),
        ("model:\n  hidden_size: -64", "run.yaml:8: model.hidden_size: expected greater than 0, got -64"),
        ("slurm:\n  nodes: 0", "run.yaml:8: slurm.nodes: expected greater than 0, got 0"),
        (f"phases:\n  - tokens: 1{'0' * 300}", "run.yaml:8: phases[0].tokens: expected less than or equal to "),
        ("optim:\n  betas: [0.9, 1.0]", "run.yaml:8: optim.betas[1]: expected less than 1, got 1.0"),
        ("optim:\n  eps: .nan", "run.yaml:8: optim.eps: expected a finite number, got NaN"),
        ("checkpoint:\n  every_steps: 0", "run.yaml:8: checkpoint.every_steps: expected greater than 0, got 0"),
        ("phases: []", "run.yaml:7: phases: expected at least one item, got []"),
        # names that become something else
        (
            "run:\n  name: 4711",
            "run.yaml:8: run.name: must not be a job id, which commands would take it for: 4711",
        ),
        (
            "run:\n  name: local-3",
            "run.yaml:8: run.name: must not be a job id, which commands would take it for: lo",
        ),
        (
            "run:\n  name: " + "x" * 101,
            "run.yaml:8: run.name: must have at most 100 characters, this has 101: xxx",
        ),
        ("run:\n  name: a/b", "run.yaml:8: run.name: must be letters, digits, '.', '_' and '-', and begin with "),
        ("run:\n  name: ..", "run.yaml:8: run.name: must be letters, digits, '.', '_' and '-', and begin with "),
        (
            "cluster:\n  env:\n    A-B: 1",
            "run.yaml:9: cluster.env.A-B: must be the name of an environment variable, got ",
        ),
        ("slurm:\n  flags:\n    --x: 1", "run.yaml:8: slurm: flags.--x: not a long option of sbatch (write it "),
        ("slurm:\n  flags:\n    nodes: 1", "run.yaml:9: slurm: flags.nodes: zslurm sets --nodes itself; use the "),
        # what needs several keys
        (
            "model:\n  query_heads: 3",
            "run.yaml:8: model: query_heads (3) must be a multiple of kv_heads (2)",
        ),
        (
            "model:\n  query_heads: 4\n  kv_heads: 3",
            "run.yaml:8: model: query_heads (4) must be a multiple of kv_heads (3)",
        ),
        ("model:\n  kv_heads: 1\n  head_dim: 3", "run.yaml:8: model: kv_heads * head_dim (1 * 3) must be even"),
        (
            "model:\n  rotary_share: 0.3",
            "run.yaml:8: model: head_dim * rotary_share (128 * 0.3 = 38.4) must be an ",
        ),
        ("model:\n  experts_per_token: 18", "run.yaml:8: model: experts_per_token (18) exceeds the 17 classes"),
    ],
)
def test_a_bad_value_is_one_line_with_its_place(tmp_path: Path, text: str, message: str) -> None:
    base = "" if text.startswith("phases: ") else PHASES
    base = base or "\n" * 6
    if text.startswith("phases:\n"):
        base = "\n" * 6
        text += "\n    context: 16\n    global_batch: 2\n    micro_batch: 1\n    lr: 1.0"
    line = complaint(tmp_path, f"{base}{text}\n")
    assert line.startswith(message)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("global_batch: 7", "run.yaml:4: phases[0]: global_batch (7) must be a multiple of micro_batch (2)"),
        ("final_lr: 1.0", "run.yaml:7: phases[0]: final_lr (1) must not exceed lr (0.001)"),
        ("warmup_steps: 11", "run.yaml:7: phases[0]: warmup_steps (11) exceeds the phase's 10 steps"),
        ("context: 1", "run.yaml:3: phases[0].context: expected greater than or equal to 2, got 1"),
        ("lr: 0", "run.yaml:6: phases[0].lr: expected greater than 0, got 0"),
        (
            "schedule: step",
            "run.yaml:7: phases[0].schedule: expected 'cosine', 'wsd', 'linear' or 'constant', got \"step\"",
        ),
        (
            "schedule: wsd",
            "run.yaml:7: phases[0]: decay_steps: required by schedule wsd: the steps in which the rate falls "
            "to final_lr",
        ),
        ("decay_steps: 2", "run.yaml:7: phases[0]: decay_steps (2) belongs to schedule wsd, not cosine"),
        ("warmup_from: 1e-4", "run.yaml:7: phases[0]: warmup_from (0.0001) needs warmup_steps"),
        (
            "batch_ramp: [{until_tokens: 100, global_batch: 3}]",
            "run.yaml:7: phases[0]: batch_ramp[0].global_batch (3) must be a multiple of micro_batch (2)",
        ),
        (
            "batch_ramp: [{until_tokens: 960, global_batch: 2}]",
            "run.yaml:7: phases[0]: batch_ramp[0].until_tokens (960) must be below the phase's tokens (960)",
        ),
        (
            "batch_ramp: [{until_tokens: 0, global_batch: 2}]",
            "run.yaml:7: phases[0].batch_ramp[0].until_tokens: expected greater than 0, got 0",
        ),
    ],
)
def test_a_bad_phase_names_the_key_that_broke_it(tmp_path: Path, change: str, message: str) -> None:
    key = change.split(":")[0]
    lines = PHASES.splitlines()
    place = next((i for i, line in enumerate(lines) if f" {key}:" in line), None)
    if place is None:
        lines.append(f"    {change}")
    else:
        lines[place] = f"    {change}"
    assert complaint(tmp_path, "\n".join(lines)) == message


def test_every_problem_has_its_own_line(tmp_path: Path) -> None:
    text = "model:\n  layers: 0\n  hiden_size: 1\nslurm:\n  nodes: x\nphases:\n  - lr: 1\n"
    assert complaints(tmp_path, text) == [
        "run.yaml:2: model.layers: expected greater than 0, got 0",
        "run.yaml:3: model.hiden_size: unknown key; did you mean `hidden_size`?",
        "run.yaml:7: phases[0].tokens: required, but not given (tokens to train on in this phase)",
        "run.yaml:7: phases[0].context: required, but not given (tokens in one sequence)",
        "run.yaml:7: phases[0].global_batch: required, but not given "
        "(sequences in one optimizer step, over all ranks)",
        "run.yaml:7: phases[0].micro_batch: required, but not given "
        "(sequences in one forward pass: the unit of distribution)",
        'run.yaml:5: slurm.nodes: expected a number, got "x"',
    ]


def test_a_missing_section_is_missed_in_the_run_file(tmp_path: Path) -> None:
    """Not in the profile, where the first key of all happens to stand."""
    assert complaint(tmp_path, "run: {name: x}\n", profile="slurm: {partition: gpu}\n") == (
        "run.yaml: phases: required, but not given"
    )


def test_a_file_that_is_no_mapping_says_what_it_should_be(tmp_path: Path) -> None:
    for text in ("- 1\n", "word\n", "5\n"):
        assert complaint(tmp_path, text) == (
            "run.yaml:1: expected sections such as `model:` and `phases:`, not a single value"
        )


def test_problems_are_placed_in_the_layer_that_made_them(tmp_path: Path) -> None:
    write(tmp_path / "base.yaml", f"{PHASES}model:\n  query_heads: 4\n  kv_heads: 2\n")
    assert complaint(tmp_path, "extends: base.yaml\nmodel:\n  kv_heads: 3\n").startswith(
        "run.yaml:3: model: query_"
    )
    assert complaint(tmp_path, "extends: base.yaml\n", "model.kv_heads=3").startswith(
        "--set model.kv_heads: model: "
    )
    assert complaint(tmp_path, PHASES, profile="slurm:\n  nodes: 0\n") == (
        "lab.yaml:2: slurm.nodes: expected greater than 0, got 0"
    )


@pytest.mark.parametrize(
    "character", ["\\n", "\\r", "\\t", "\\0", "\\x1b", "\\x7f", "\\x85", "\\u2028", "\\ud800"]
)
@pytest.mark.parametrize(
    "key",
    ["slurm.job_name", "slurm.account", "slurm.flags.comment", "cluster.env.A", "run.name", "cluster.interface"],
)
def test_no_value_smuggles_a_control_character_into_a_script(tmp_path: Path, key: str, character: str) -> None:
    line = complaint(tmp_path, PHASES, f'{key}="a{character}b"')
    assert line.startswith(f"--set {key}: {key}: must be ")
    assert line.isprintable()


def test_numbers_that_are_names_stay_as_they_were_typed(tmp_path: Path) -> None:
    text = "run: {name: 7a}\nslurm: {account: 123, time: 90, flags: {nice: 100}}\ncluster: {env: {A: 1}}\n"
    spec = resolve_text(tmp_path, text + PHASES).spec
    assert (spec.run.name, spec.slurm.account, spec.slurm.time) == ("7a", "123", "90")
    assert spec.slurm.flags == {"nice": "100"}
    assert spec.cluster.env == {"A": "1"}
