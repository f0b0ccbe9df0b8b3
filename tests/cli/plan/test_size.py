"""`zslurm plan size`: tables, rules, and what is wrong with what was asked for."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.commands import Shell
from zslurm.core.errors import Exit
from zslurm.train.config import ModelConfig
from zslurm.train.telemetry.flops import token_flops


@pytest.fixture
def zaya1(shell: Shell) -> Path:
    """ZAYA1-8B on 16 nodes of eight MI300X."""
    path = shell.directory / "zaya1.yaml"
    body = {
        "extends": "zaya1-8b",
        "data": {"path": "tokens.h5"},
        "parallel": {"device": "cuda", "collectives": "two_level"},
        "slurm": {"nodes": 16, "ranks_per_node": 8},
        "cluster": {"name": "local", "gpus_per_node": 8, "gpu_type": "mi300x"},
    }
    path.write_text(json.dumps(body))
    return path


def test_the_table_of_zaya1(shell: Shell, zaya1: Path) -> None:
    done = shell.zslurm.ok("plan", "size", zaya1)
    products, steps, _ = done.stdout.split("\n\n")
    columns, *rows = (line.split("\t") for line in products.splitlines())
    table = {(row[0], row[1], row[2]): dict(zip(columns, row, strict=True)) for row in rows}
    assert {name for name, _, _ in table} == {"pretrain-1, pretrain-2", "mid-train"}
    assert table["pretrain-1, pretrain-2", "experts.gate_up", "forward"] == {
        "phase": "pretrain-1, pretrain-2",
        "product": "experts.gate_up",
        "pass": "forward",
        "M": "1,024",
        "N": "4,096",
        "K": "2,048",
        "batch": "16",
        "calls": "40",
        "GFLOP": "274.9",
        "share": "7.67 %",
        "TFLOPS": "not measured",
    }
    header, pretrain, _, mid_train = (line.split("\t") for line in steps.splitlines())
    assert header[:5] == ["phase", "tokens of a microbatch", "sequences of a rank", "step", "MFU"]
    assert pretrain[:3] == ["pretrain-1", "16,384", "32"]
    assert mid_train[:3] == ["mid-train", "16,384", "8"]
    rules = [line.split(":")[0] for line in done.stderr.splitlines()]
    assert rules.count("rule small_product") == 3
    assert rules.count("rule xgmi") == 1
    assert "note: not measured, assumed: every product makes 250 TFLOPS" in done.stderr


def test_json_has_shares_that_sum_to_one_and_an_mfu_that_follows(shell: Shell, zaya1: Path) -> None:
    found = shell.zslurm.ok("plan", "size", zaya1, "--json").json
    assert found["device"] == "gpu"
    assert found["peak_flops"] == 1307.4e12
    for phase in found["phases"]:
        assert sum(product["share"] for product in phase["products"]) == pytest.approx(1)
        assert sum(phase["parts_s"].values()) == pytest.approx(phase["step_s"])
    pretrain = found["phases"][0]
    flops = 32 * 4096 * token_flops(ModelConfig(), 4096, 0.0)
    assert pretrain["flops_per_microbatch"] * 8 == pytest.approx(flops)
    assert pretrain["mfu"] == pytest.approx(flops / (pretrain["step_s"] * 1307.4e12))
    assert {finding["rule"] for finding in found["findings"]} == {"small_product", "xgmi"}


def test_strict_is_an_exit_code_behind_the_same_output(shell: Shell, zaya1: Path) -> None:
    advice, strict = shell.zslurm("plan", "size", zaya1), shell.zslurm("plan", "size", zaya1, "--strict")
    assert (advice.code, strict.code) == (Exit.DONE, Exit.CHECK_FAILED)
    assert (advice.stdout, advice.stderr) == (strict.stdout, strict.stderr)


def test_measured_rates_are_shown_and_used(shell: Shell, zaya1: Path) -> None:
    about = {"product": "", "pass": "forward", "kind": "dense", "batch": 1, "dtype": "bf16", "tflops": 512.5}
    rows = [about | {"m": 16384, "n": 1536, "k": 2048}, about | {"m": 8, "n": 8, "k": 8}]
    rates = shell.directory / "rates.json"
    machine = {"gpu": "AMD Instinct MI300X", "cpu": "a CPU"}
    rates.write_text(json.dumps({"benchmark": "gemm", "machine": machine, "rows": rows}))
    done = shell.zslurm.ok("plan", "size", zaya1, "--rates", rates)
    cells = {
        tuple(line.split("\t")[1:3]): line.split("\t")[-1] for line in done.stdout.splitlines() if "\t" in line
    }
    assert cells["attention.projection", "forward"] == "512.5"
    assert cells["attention.output", "forward"] == "~512.5"
    assert cells["head.logits", "forward"] == "not measured"
    assert "the table's median, 512 TFLOPS" in done.stderr
    assert re.search(r"note: Newton-Schulz steps of \d+ shapes of matrices in bf16 were not measured", done.stderr)
    measured = shell.zslurm.ok("plan", "size", zaya1, "--rates", rates, "--json").json["phases"][0]["parts_s"]
    assumed = shell.zslurm.ok("plan", "size", zaya1, "--json").json["phases"][0]["parts_s"]
    assert measured["products"] == pytest.approx(assumed["products"] * 250 / 512.5)


def test_memory_is_checked_against_the_card_that_is_given(shell: Shell, zaya1: Path) -> None:
    found = shell.zslurm.ok("plan", "size", zaya1, "--gpu-memory", "80", "--json").json["findings"]
    (line,) = (finding["line"] for finding in found if finding["rule"] == "memory")
    assert "does not leave 10% of 80.0 GiB free" in line


def test_ranks_on_cpus_have_products_and_no_times(shell: Shell) -> None:
    done = shell.zslurm.ok("plan", "size", shell.write_run())
    assert "not measured\tnot measured" in done.stdout
    assert not [line for line in done.stderr.splitlines() if line.startswith("rule ")]
    assert "step times need --rates FILE" in done.stderr


def test_proposals(shell: Shell, zaya1: Path) -> None:
    found = shell.zslurm.ok("plan", "size", zaya1, "--search", "3e9", "--json").json["shapes"]
    assert found
    assert all(abs(shape["parameters"] / 3e9 - 1) <= 0.1 for shape in found)
    columns, *rows = shell.zslurm.ok("plan", "size", zaya1, "--search", "3e9").stdout.splitlines()
    assert columns.split("\t")[2:5] == ["hidden_size", "layers", "experts"]
    assert len(rows) == len(found)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--search", "0"], "--search 0: must be a number of parameters"),
        (["--search", "nan"], "--search nan: must be a number of parameters"),
        (["--search", "many"], "--search"),
        (["--search", "2e5"], "no shape within 10 % breaks no rule"),
        (["--rates", "none.json"], "--rates: none.json: cannot be read: No such file"),
        (["--gpu-memory", "0"], "--gpu-memory"),
        (["--set", "model.vocab=3"], "model.vocab"),
        (["--set", "phases[2].context=3", "--set", "phases[2].tokens=1e6"], "phases[2]"),
    ],
)
def test_what_is_wrong_is_one_line(shell: Shell, zaya1: Path, arguments: list[str], why: str) -> None:
    done = shell.zslurm("plan", "size", zaya1, *arguments)
    assert done.code == Exit.USAGE
    assert not done.stdout
    assert why in done.stderr
    assert done.stderr.count("\n") == 1


def test_it_does_not_import_torch(shell: Shell, zaya1: Path) -> None:
    code = (
        "import sys\nfrom zslurm.cli.main import main\n"
        f"sys.argv = ['zslurm', 'plan', 'size', {str(zaya1)!r}]\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code\nassert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL, timeout=300)


def test_the_parts_of_a_microbatch_what_limits_them_and_the_largest_gains(shell: Shell, zaya1: Path) -> None:
    done = shell.zslurm.ok("plan", "size", zaya1)
    header, *rows = (line.split("\t") for line in done.stdout.split("\n\n")[2].splitlines())
    assert header == ["part of the first phase's microbatch", "time", "share", "limited by", "rates"]
    parts = {row[0]: row[1:] for row in rows}
    assert parts["head: products"][2:] == ["matrix units", "stated"]
    assert parts["experts: products"][2] == "LDS"
    assert parts["element by element"][2] == "memory"
    lines = done.stderr.splitlines()
    assert any("each good to a quarter; most of it in `head: products`" in line for line in lines)
    assert len([line for line in lines if line.startswith("gain: ")]) == 3
    found = shell.zslurm.ok("plan", "size", zaya1, "--json").json
    assert [part["name"] for part in found["parts"]] == list(parts)
    assert len(found["gains"]) == 3


def test_gpus_of_which_nothing_was_stated_have_no_parts(shell: Shell, zaya1: Path) -> None:
    found = shell.zslurm.ok("plan", "size", zaya1, "--set", "cluster.gpu_type=h100", "--json").json
    assert (found["parts"], found["gains"]) == ([], [])
