"""`zslurm generate`: from a run, a checkpoint, a published folder; the same text from each."""

from __future__ import annotations

import io
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.cli.commands import Zslurm
from tests.cli.trained import CONTEXT, MODEL
from zslurm.checkpoint_tools.quantities import show_bytes
from zslurm.train.checkpointing.load_weights import load_model
from zslurm.train.data.build.tokenizer import load_tokenizer
from zslurm.train.hub import open_weights

PROMPT = "The quick brown"


@torch.no_grad()
def by_full_forward(checkpoint: Path, tokens: list[int], count: int) -> list[int]:
    """The likeliest continuation, computed again from the whole text for every token."""
    with open_weights(checkpoint) as weights:
        model = load_model(weights, dtype=torch.float32)
    made = list(tokens)
    for _ in range(count):
        logits, _ = model(torch.tensor([made]), rope_base=5000.0)
        made.append(int(logits[0, -1].argmax()))
    return made[len(tokens) :]


def test_a_model_is_loaded_as_it_was_saved(run: Path) -> None:
    with open_weights(run / "checkpoints" / "step-00000080") as weights:
        model = load_model(weights, dtype=torch.float32)
        rounded = load_model(weights, dtype=torch.bfloat16)
        for name, parameter in model.named_parameters():
            values = np.empty(parameter.numel(), np.float32)
            weights.read(name, 0, values)
            assert parameter.detach().numpy().tobytes() == values.tobytes(), name
    assert rounded.balancing_bias.dtype == torch.float32
    for ours, exact in zip(rounded.parameters(), model.parameters(), strict=True):
        assert torch.equal(ours, exact.to(torch.bfloat16))


def test_greedy_text_is_that_of_the_full_forward(zslurm: Zslurm, run: Path) -> None:
    said = zslurm.ok("generate", "first", "--prompt", PROMPT, "--max-tokens", "8", "--json").json
    tokenizer = load_tokenizer(run.parent.parent / "data" / "tokenizer.json")
    tokens = tokenizer.encode(PROMPT, add_special_tokens=False).ids
    assert said["prompt_tokens"] == len(tokens)
    assert said["tokens"] == by_full_forward(run / "checkpoints" / "step-00000080", tokens, 8)
    assert said["text"] == tokenizer.decode(said["tokens"])


def test_the_text_is_on_stdout_and_the_facts_are_on_stderr(zslurm: Zslurm) -> None:
    text = zslurm.ok("generate", "first", "--prompt", PROMPT, "-n", "8", "--json").json["text"]
    done = zslurm.ok("generate", "first", "--prompt", PROMPT, "-n", "8")
    assert done.stdout == text + "\n"
    per_token = MODEL["layers"] * 2 * MODEL["kv_heads"] * MODEL["head_dim"] * 4
    assert f"cache {show_bytes(per_token)} per token" in done.stderr


def test_runs_checkpoints_exports_and_imports_say_the_same(zslurm: Zslurm, run: Path, tmp_path: Path) -> None:
    zslurm.ok("checkpoint", "export", "first", tmp_path / "hf", "--dtype", "fp32")
    zslurm.ok("checkpoint", "import", tmp_path / "hf", tmp_path / "imported")
    texts = [
        zslurm.ok("generate", place, "--prompt", PROMPT, "-n", "10").stdout
        for place in ("first", run, run / "checkpoints", tmp_path / "hf", tmp_path / "imported")
    ]
    assert texts == texts[:1] * 5
    newest = zslurm.ok("generate", "first", "--prompt", PROMPT, "-n", "1", "--json").json["weights"]
    assert newest == str(run / "checkpoints" / "step-00000080")


def test_a_prompt_from_stdin_is_the_same_prompt(zslurm: Zslurm, monkeypatch: pytest.MonkeyPatch) -> None:
    given = zslurm.ok("generate", "first", "--prompt", PROMPT, "-n", "5").stdout
    monkeypatch.setattr(sys, "stdin", io.StringIO(PROMPT))
    assert zslurm.ok("generate", "first", "--prompt", "-", "-n", "5").stdout == given


def test_ranks_that_divide_the_cache_make_the_same_text(zslurm: Zslurm) -> None:
    arguments = ["generate", "first", "--prompt", PROMPT, "-n", "8", "--temperature", "0.8", "--json"]
    alone, shared = (zslurm.ok(*arguments, "--ranks", ranks).json for ranks in "12")
    assert shared["tokens"] == alone["tokens"]


def test_a_rank_that_fails_is_reported_and_the_others_are_ended(zslurm: Zslurm, run: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "checkpoint"
    shutil.copytree(run / "checkpoints" / "step-00000080", damaged)
    for shard in damaged.glob("*.safetensors"):
        os.truncate(shard, shard.stat().st_size - 8)
    files = run.parent.parent / "data" / "tokenizer.json"
    of_a_run = ["--tokenizer", str(files), "--rope-base", "5000", "--context", "64"]
    done = zslurm("generate", damaged, "--prompt", PROMPT, "--ranks", "2", *of_a_run)
    assert done.code != 0
    assert "Traceback" not in done.stderr
    assert "shard" in done.stderr


def test_draws_depend_on_the_seed_alone(zslurm: Zslurm) -> None:
    def drawn(seed: int, **options: float) -> str:
        given = [f"--{key.replace('_', '-')}={value}" for key, value in options.items()]
        return zslurm.ok("generate", "first", "--prompt", PROMPT, "-n", "12", f"--seed={seed}", *given).stdout

    assert drawn(1, temperature=1.5) == drawn(1, temperature=1.5)
    assert len({drawn(seed, temperature=1.5) for seed in range(4)}) > 1
    assert drawn(1, temperature=1.5, top_p=1e-6) == drawn(2), "only the likeliest token is left"


def test_it_ends_with_the_context(zslurm: Zslurm) -> None:
    done = zslurm.ok("generate", "first", "--prompt", PROMPT, "-n", "500", "--json")
    said = done.json
    assert said["prompt_tokens"] + said["new_tokens"] <= CONTEXT
    assert "context" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "reported"),
    [
        (["first", "--prompt", ""], 2, "empty"),
        (["first", "--prompt", "東京 " * 40], 2, f"context of {CONTEXT}"),
        (["first", "--prompt", "a\udcffb"], 2, "the prompt: it is not UTF-8 text (character 1)\n"),
        (["first", "--prompt", "a", "--temperature", "-1"], 2, "temperature"),
        (["first", "--prompt", "a", "--temperature", "nan"], 2, "temperature"),
        (["first", "--prompt", "a", "--top-p", "1.5"], 2, "top-p"),
        (["first", "--prompt", "a", "--ranks", "0"], 2, "--ranks"),
        (["first", "--prompt", "a", "--ranks", "2", "--device", "cuda"], 2, "for --ranks 2"),
        (["first", "--prompt", "a", "--top-p", "0"], 2, "top-p"),
        (["first", "--prompt", "a", "--tokenizer", "/dev/null"], 2, "tokenizer"),
        (["nobody", "--prompt", "a"], 3, "nobody"),
        (["first"], 2, "prompt"),
    ],
    ids=str,
)
def test_bad_input_is_one_line(zslurm: Zslurm, arguments: list[str], code: int, reported: str) -> None:
    done = zslurm("generate", *arguments)
    assert done.code == code
    assert reported in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_weights_without_a_tokenizer_ask_for_one(zslurm: Zslurm, run: Path, tmp_path: Path) -> None:
    zslurm.ok("checkpoint", "export", "first", tmp_path / "hf", "--no-tokenizer")
    reported = zslurm("generate", tmp_path / "hf", "--prompt", PROMPT)
    assert reported.code == 2
    assert "--tokenizer" in reported.stderr
    tokenizer = run.parent.parent / "data" / "tokenizer.json"
    zslurm.ok("generate", tmp_path / "hf", "--prompt", PROMPT, "--tokenizer", tokenizer, "-n", "3")


def test_a_tokenizer_with_tokens_that_the_model_lacks_is_refused(
    zslurm: Zslurm, run: Path, tmp_path: Path
) -> None:
    larger = load_tokenizer(run.parent.parent / "data" / "tokenizer.json")
    larger.add_tokens([f"word{number}" for number in range(300)])
    larger.save(str(tmp_path / "tokenizer.json"))
    reported = zslurm("generate", "first", "--prompt", "word299", "--tokenizer", tmp_path / "tokenizer.json")
    assert reported.code == 2
    assert "another model's" in reported.stderr


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


PROMPTS: list[dict[str, Any]] = [
    {"id": "a", "prompt": PROMPT},
    {"id": "b", "prompt": "jumps over", "max_tokens": 3},
    {"id": "c", "prompt": "für 12", "stop": ["東京"]},
    {"id": "d", "prompt": "The", "temperature": 1.5, "seed": 7, "max_tokens": 9},
    {"id": "e", "prompt": "lazy dog", "max_tokens": 100},
]


@pytest.mark.parametrize("batch", [1, 3])
def test_many_prompts_get_what_each_gets_alone_in_their_order(zslurm: Zslurm, tmp_path: Path, batch: int) -> None:
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(each) + "\n" for each in PROMPTS))
    given = ["--prompts", tmp_path / "in.jsonl", "--out", tmp_path / "out.jsonl", "-n", "6", "--batch", batch]
    done = zslurm.ok("generate", "first", *given)
    found = lines_of(tmp_path / "out.jsonl")
    assert [each["id"] for each in found] == ["a", "b", "c", "d", "e"]
    assert "note: the context ends before --max-tokens in 1 prompt" in done.stderr
    for each, asked in zip(found, PROMPTS, strict=True):
        options = [
            f"--{key.replace('_', '-')}={value}"
            for key, value in asked.items()
            if key not in ("id", "prompt", "stop")
        ]
        alone = zslurm.ok("generate", "first", "--prompt", asked["prompt"], "-n", "6", *options, "--json").json
        if "stop" not in asked:
            assert each["tokens"] == alone["tokens"]
            assert (each["text"], each["ended"]) == (alone["text"], "length")
        else:
            assert each["text"] == alone["text"].split("東京")[0]


def test_a_stop_string_ends_the_text_and_is_no_part_of_it(zslurm: Zslurm) -> None:
    whole = zslurm.ok("generate", "first", "--prompt", PROMPT, "-n", "10").stdout
    assert "jumps" in whole
    done = zslurm.ok("generate", "first", "--prompt", PROMPT, "-n", "10", "--stop", "jumps", "--stop", "xyz")
    assert done.stdout == whole.split("jumps")[0] + "\n"


def test_prompts_come_from_stdin_and_results_go_to_stdout(zslurm: Zslurm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(PROMPTS[1]) + "\n\n" + json.dumps(PROMPTS[0]) + "\n"))
    done = zslurm.ok("generate", "first", "--prompts", "-", "-n", "2")
    assert [json.loads(line)["id"] for line in done.stdout.splitlines()] == ["b", "a"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "holds no prompt"),
        ('{"prompt": "a"}\n{', "line 2: is not JSON"),
        ('{"text": "a"}', "line 1: prompt: Field required"),
        ('{"prompt": ""}', "prompt 1: is empty"),
        ('{"prompt": "a", "top_p": 2}', "line 1: top_p: "),
        ('{"prompt": "a", "seed": -1}', "line 1: seed: "),
        ("[]", "line 1: the line: "),
        (json.dumps({"prompt": "東京 " * 40}), f"the context {CONTEXT}"),
    ],
)
def test_a_wrong_prompt_is_refused_before_any_text_is_made(
    zslurm: Zslurm, tmp_path: Path, content: str, message: str
) -> None:
    (tmp_path / "in.jsonl").write_text(content + "\n")
    done = zslurm("generate", "first", "--prompts", tmp_path / "in.jsonl", "--out", tmp_path / "out.jsonl")
    assert done.code == 2
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "out.jsonl").exists()


def test_results_replace_no_file(zslurm: Zslurm, tmp_path: Path) -> None:
    for name, content in (("in.jsonl", '{"prompt": "a"}\n'), ("out.jsonl", "mine")):
        (tmp_path / name).write_text(content)
    done = zslurm("generate", "first", "--prompts", tmp_path / "in.jsonl", "--out", tmp_path / "out.jsonl")
    assert done.code == 2
    assert "is there already" in done.stderr
    assert (tmp_path / "out.jsonl").read_text() == "mine"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "\\ud800"}', "line 1: prompt: holds half of a surrogate pair, which is no text"),
        ('{"prompt": "a", "stop": ["\\udc00"]}', "line 1: stop: holds half of a surrogate pair"),
        ('{"prompt": "a", "temperature": NaN}', "line 1: temperature: Input should be a finite number"),
    ],
)
def test_a_line_that_is_no_text_or_number_is_named(
    zslurm: Zslurm, tmp_path: Path, line: str, message: str
) -> None:
    (tmp_path / "prompts.jsonl").write_text(line + "\n")
    done = zslurm("generate", "first", "--prompts", tmp_path / "prompts.jsonl")
    assert (done.code, done.stdout) == (2, "")
    assert message in done.stderr


def test_a_temperature_next_to_nothing_takes_the_likeliest_tokens(zslurm: Zslurm, tmp_path: Path) -> None:
    asked = [{"prompt": PROMPT, "temperature": each, "stop": "never said"} for each in (0, 1e-320, 1e-7)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(each) + "\n" for each in asked))
    done = zslurm.ok("generate", "first", "--prompts", tmp_path / "prompts.jsonl", "-n", "5")
    made = [json.loads(line)["tokens"] for line in done.stdout.splitlines()]
    assert made[0] == made[1] == made[2]
