"""A sweep is a run for each combination, each with a readable name; a member that fails costs no other."""

from __future__ import annotations

from pathlib import Path

import pytest

from zslurm.config.layers import Override
from zslurm.core.errors import ConfigError
from zslurm.submit.sweep import SweepMember, member_name, members, split_values


def names(*sweeps: str, file: Path | None = None) -> list[str]:
    return [member_name("run", member) for member in members(sweeps, file)]


def test_one_key_gives_a_run_for_each_value() -> None:
    assert members(["optim.adam_lr=1e-3,3e-4"], None) == [
        SweepMember("-adam_lr1e-3", (Override.of("optim.adam_lr", 1e-3),), {"optim.adam_lr": "1e-3"}),
        SweepMember("-adam_lr3e-4", (Override.of("optim.adam_lr", 3e-4),), {"optim.adam_lr": "3e-4"}),
    ]


def test_several_keys_give_every_combination_the_last_running_fastest() -> None:
    assert names("phases[0].lr=1e-3,3e-4", "run.seed=1,2") == [
        *("run-lr1e-3-seed1", "run-lr1e-3-seed2"),
        *("run-lr3e-4-seed1", "run-lr3e-4-seed2"),
    ]


def test_keys_that_end_in_the_same_word_are_distinguished() -> None:
    assert names("phases[0].lr=1", "phases[1].lr=2") == ["run-phases_0_.lr1-phases_1_.lr2".replace("_.", "_.")]


def test_values_become_words_that_a_directory_may_have() -> None:
    assert names('data.path="a b/c.h5",/x', "optim.betas=[0.9,0.95]") == [
        "run-path-a_b_c.h5-betas0.9_0.95",
        "run-path-x-betas0.9_0.95",
    ]


def test_where_words_do_not_tell_members_apart_numbers_do() -> None:
    assert names("data.path=/a/b,a/b") == ["run-001", "run-002"]
    assert names(f"data.path={'x' * 60},y") == ["run-001", "run-002"]


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("1,2", ["1", "2"]),
        ("[1,2],[3,4]", ["[1,2]", "[3,4]"]),
        ("{a: 1, b: [2,3]},x", ["{a: 1, b: [2,3]}", "x"]),
        ("'a,b',\"c,d\"", ["'a,b'", '"c,d"']),
        ("one", ["one"]),
    ],
)
def test_commas_inside_brackets_and_quotes_divide_nothing(text: str, parts: list[str]) -> None:
    assert split_values(text) == parts


def test_a_file_has_a_member_in_each_line(tmp_path: Path) -> None:
    file = tmp_path / "sweep.txt"
    file.write_text("# comment\nphases[0].lr=1e-3 run.seed=1\n\nphases[0].lr=3e-4 'data.path=a b' # why\n")
    found = members([], file)
    assert [member.overrides for member in found] == [
        (Override.of("phases[0].lr", 1e-3), Override.of("run.seed", 1)),
        (Override.of("phases[0].lr", 3e-4), Override.of("data.path", "a b")),
    ]
    assert len(members(["model.layers=2,4"], file)) == 4


@pytest.mark.parametrize("sweep", ["lr", "=1", "a..b=1", "lr=", "lr=1,,2"])
def test_a_sweep_that_is_none_is_refused(sweep: str) -> None:
    with pytest.raises(ConfigError, match=r"expected KEY=VALUE,VALUE"):
        members([sweep], None)


def test_a_file_that_is_none_is_refused_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "sweep.txt"
    for text, message in [
        ("a=1\nb\n", r"sweep\.txt:2: expected KEY=VALUE KEY=VALUE \.\.\., got `b`"),
        ("a='1\n", r"sweep\.txt:1: No closing quotation"),
        ("# nothing\n", r"sweep\.txt: no members"),
    ]:
        file.write_text(text)
        with pytest.raises(ConfigError, match=message):
            members([], file)
    with pytest.raises(ConfigError, match="cannot be read"):
        members([], tmp_path / "nonesuch")


def test_the_same_member_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"the sweep has run\.seed=1 twice"):
        members(["run.seed=1,1"], None)


def test_a_name_that_grows_too_long_is_refused() -> None:
    with pytest.raises(ConfigError, match="has 101 characters, 100 are permitted"):
        member_name("x" * 95, SweepMember("-seed1", (), {}))
