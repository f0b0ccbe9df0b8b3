"""`zslurm checkpoint show|verify|diff|reshape` from the command line, on small saves."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.checkpoint_tools.saves import BUFFERS, TENSORS, save
from tests.checkpoint_tools.test_damage import flip
from tests.cli.commands import Zslurm
from zslurm.checkpoint_tools import Checkpoint, acquire, partition, verify


@pytest.fixture
def zslurm(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Zslurm:
    monkeypatch.chdir(tmp_path)
    return Zslurm(monkeypatch, capsys)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return save(tmp_path / "a", 400, world_size=4)


def test_show_lists_every_tensor_with_its_owners(zslurm: Zslurm, checkpoint: Path) -> None:
    found = zslurm.ok("checkpoint", "show", checkpoint, "--json").json
    assert (found["step"], found["ranks"], found["parameters"]) == (400, 4, sum(t.numel for t in TENSORS))
    assert [row["name"] for row in found["tensors"]] == [tensor.name for tensor in TENSORS]
    owners = {
        tensor.name: [rank for rank in range(4) if tensor.name in {e.tensor for e in layout.extents(rank)}]
        for layout in [partition(TENSORS, 4)]
        for tensor in TENSORS
    }
    assert {row["name"]: row["ranks"] for row in found["tensors"]} == owners
    assert {row["name"] for row in found["buffers"]} == set(BUFFERS)
    lines = zslurm.ok("checkpoint", "show", "a").stdout.splitlines()
    assert lines[0] == "tensor\tshape\tstates\tranks"
    ranks = " ".join(map(str, owners["layers.0.experts.up"]))
    assert lines[2] == f"layers.0.experts.up\t3 x 11 x 5\tmaster F32 momentum F64\t{ranks}"


def test_show_of_a_tensor_gives_statistics_of_each_of_its_states(zslurm: Zslurm, checkpoint: Path) -> None:
    rows = zslurm.ok("checkpoint", "show", checkpoint, "--tensor", "layers.0.experts.up", "--json").json
    assert [(row["state"], row["elements"]) for row in rows] == [("master", 165), ("momentum", 165)]
    assert rows[0]["minimum"] < rows[0]["mean"] < rows[0]["maximum"]
    refused = zslurm("checkpoint", "show", checkpoint, "--tensor", "embed.weigth")
    assert (refused.code, refused.stdout) == (2, "")
    assert "did you mean embed.weight?" in refused.stderr


def test_show_works_where_a_shard_is_lost(zslurm: Zslurm, checkpoint: Path) -> None:
    next(checkpoint.glob("shard-*")).unlink()
    assert "embed.weight" in zslurm.ok("checkpoint", "show", checkpoint).stdout


def test_verify_says_sound_or_names_the_place_and_exits_with_5(zslurm: Zslurm, checkpoint: Path) -> None:
    assert "sound" in zslurm.ok("checkpoint", "verify", "a").stderr
    shard = checkpoint / "shard-00001-of-00004.safetensors"
    flip(shard, 8 * 1400)
    damaged = zslurm("checkpoint", "verify", "a")
    assert damaged.code == 5
    (line,) = damaged.stdout.splitlines()
    assert line.startswith(f"{shard.name} block 5: bytes 1280 to ")
    assert "do not match their checksum (in " in line
    assert damaged.stderr.count("\n") == 1
    found = zslurm("checkpoint", "verify", "a", "--json")
    assert (found.code, found.json["sound"], found.json["damages"][0]["block"]) == (5, False, 5)
    assert zslurm("checkpoint", "verify", "no-such-run").code == 3


def test_verify_looks_at_the_newest_even_where_it_is_not_whole(zslurm: Zslurm, tmp_path: Path) -> None:
    save(tmp_path / "a", 1)
    (save(tmp_path / "a", 2) / "shard-00000-of-00002.safetensors").unlink()
    missing = zslurm("checkpoint", "verify", "a")
    assert (missing.code, missing.stdout) == (5, "shard-00000-of-00002.safetensors: the file is missing\n")


def test_diff_of_equals_is_silent_about_values(zslurm: Zslurm, checkpoint: Path, tmp_path: Path) -> None:
    save(tmp_path / "b", 400, world_size=3)
    same = zslurm.ok("checkpoint", "diff", "a", "b")
    assert same.stdout == "world_size: 4 and 3\n"
    assert re.search(r"the same values in \d+ states and buffers", same.stderr)


def test_diff_names_what_differs_and_exits_with_5(zslurm: Zslurm, checkpoint: Path, tmp_path: Path) -> None:
    save(tmp_path / "b", 800, TENSORS[:2])
    differs = zslurm("checkpoint", "diff", "a", "b")
    assert differs.code == 5
    assert "step: 400 and 800" in differs.stdout
    assert "only in the first: layers.0.norm.scale:master F32 [7]" in differs.stdout
    assert "embed.weight\tmaster\t91\t91" in differs.stdout
    document = zslurm("checkpoint", "diff", "a", "b", "--json").json
    assert document["same_values"] is False
    assert document["facts"]["step"] == [400, 800]
    assert {row["tensor"] for row in document["differences"]} == {"embed.weight", "layers.0.experts.up"}


def test_reshape_writes_beside_the_checkpoint_or_where_it_is_asked_to(
    zslurm: Zslurm, checkpoint: Path, tmp_path: Path
) -> None:
    plan = zslurm.ok("checkpoint", "reshape", "a", "--dp", "6", "--dry-run", "--json").json
    assert (plan["written"], plan["files"], plan["ranks"], plan["from_ranks"]) == (False, 6, 6, 4)
    assert not Path(plan["path"]).exists()
    done = zslurm.ok("checkpoint", "reshape", "a", "--dp", "6")
    assert done.stdout == "a/step-00000400-dp6\n"
    assert verify(tmp_path / "a" / "step-00000400-dp6").sound
    assert sum(f.stat().st_size for f in Path(plan["path"]).glob("shard-*")) == plan["bytes"]
    zslurm.ok("checkpoint", "reshape", "a", tmp_path / "c" / "step-00000400", "--dp", "2", "--max-memory", "1MiB")
    with Checkpoint.open(tmp_path / "c" / "step-00000400") as reshaped:
        assert reshaped.manifest.world_size == 2
    zslurm.ok("checkpoint", "diff", "a", "c")


@pytest.mark.parametrize(
    ("arguments", "code", "problem"),
    [
        (["a", "--dp", "0"], 2, "over 0 ranks"),
        (["a", "--dp", "1000"], 2, "264 elements over 1000 ranks"),
        (["a", "a/step-00000400", "--dp", "2"], 2, "exists"),
        (["a", "a/step-00000400/x", "--dp", "2"], 2, "inside"),
        (["a", "new", "--dp", "2", "--max-memory", "1"], 2, "one worker needs"),
        (["a", "new", "--dp", "2", "--max-memory", "much"], 2, "not a size"),
        (["nothing", "new", "--dp", "2"], 3, "nothing"),
        (["a", "new"], 2, "--dp"),
    ],
)
def test_reshape_refuses_in_one_line(
    zslurm: Zslurm, checkpoint: Path, tmp_path: Path, arguments: list[str], code: int, problem: str
) -> None:
    refused = zslurm("checkpoint", "reshape", *arguments)
    assert (refused.code, refused.stdout) == (code, "")
    assert problem in refused.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert len(list((tmp_path / "a").iterdir())) == 1


def test_reshape_of_a_damaged_checkpoint_fails_and_names_it(zslurm: Zslurm, checkpoint: Path) -> None:
    shard = checkpoint / "shard-00001-of-00004.safetensors"
    flip(shard, 8 * 1400)
    failed = zslurm("checkpoint", "reshape", "a", "new", "--dp", "2")
    assert failed.code == 1
    assert shard.name in failed.stderr
    assert not Path("new").exists()


def test_export_to_dcp_and_import_give_the_same_checkpoint(
    zslurm: Zslurm, checkpoint: Path, tmp_path: Path
) -> None:
    assert zslurm.ok("checkpoint", "export", "a", "--to", "dcp", "dcp").stdout == "dcp\n"
    assert zslurm.ok("checkpoint", "import", "dcp", "b").stdout == "b/step-00000400\n"
    zslurm.ok("checkpoint", "diff", "a", "b")
    again = zslurm("checkpoint", "export", "a", "--to", "dcp", "dcp")
    assert (again.code, again.stdout) == (2, "")
    assert zslurm("checkpoint", "import", "dcp", "b").code == 2


def test_prune_removes_what_nothing_keeps(zslurm: Zslurm, tmp_path: Path) -> None:
    for step in (100, 200, 250, 300, 400):
        save(tmp_path / "a", step)
    options = ("--keep-last", "1", "--keep-every", "200")
    plan = zslurm.ok("checkpoint", "prune", "a", *options, "--dry-run", "--json").json
    going = [f"a/step-00000{step}" for step in (100, 250, 300)]
    assert (plan["removed"], plan["paths"]) == (False, going)
    assert len(list((tmp_path / "a").iterdir())) == 5
    assert zslurm.ok("checkpoint", "prune", "a", *options).stdout.splitlines() == going
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == ["step-00000200", "step-00000400"]
    assert zslurm.ok("checkpoint", "prune", "a", *options).stdout == ""
    assert zslurm("checkpoint", "prune", "a", "--keep-last", "0").code == 2


def test_prune_leaves_a_run_alone_that_is_being_trained(zslurm: Zslurm, tmp_path: Path) -> None:
    save(tmp_path / "a", 1)
    save(tmp_path / "a", 2)
    lock = acquire(tmp_path / "a")
    refused = zslurm("checkpoint", "prune", "a", "--keep-last", "1")
    assert refused.code == 1
    assert "is in use by process" in refused.stderr
    assert len(zslurm.ok("checkpoint", "ls", "a", "--json").json) == 2
    lock.release()
    zslurm.ok("checkpoint", "prune", "a", "--keep-last", "1")
