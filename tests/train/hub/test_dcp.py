"""Checkpoints as torch.distributed.checkpoint and back: every value, and what is wrong said at once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.checkpoint_tools.saves import TENSORS, save
from tests.checkpoint_tools.test_damage import flip
from tests.cli.plain_words import PYTHONS_WORDS
from zslurm.checkpoint_tools import Checkpoint, Damaged, compare
from zslurm.train.errors import HubError

# Every process of the tests collects this file; it costs two seconds to import torch.distributed.checkpoint.
if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    from zslurm.train.hub.dcp import Converted

MANIFEST_KEY = "zslurm.manifest"


def exported(path: Path, out: Path, **options: Any) -> Converted:
    from zslurm.train.hub.dcp import export_dcp

    with Checkpoint.open(path) as checkpoint:
        return export_dcp(checkpoint, out, **options)


def imported(folder: Path, root: Path, **options: Any) -> Converted:
    from zslurm.train.hub.dcp import import_dcp

    return import_dcp(folder, root, **options)


def stored(out: Path) -> dict[str, TensorStorageMetadata]:
    import torch.distributed.checkpoint as dcp

    metadata = dcp.FileSystemReader(out).read_metadata().state_dict_metadata
    return {key: value for key, value in metadata.items() if isinstance(value, dcp.metadata.TensorStorageMetadata)}


def load(out: Path, keys: list[str]) -> dict[str, torch.Tensor]:
    import torch.distributed.checkpoint as dcp

    known = stored(out)
    state = {key: torch.empty(known[key].size, dtype=known[key].properties.dtype) for key in keys}
    dcp.load(state, checkpoint_id=out, no_dist=True)
    return state


def test_there_and_back_is_the_same_checkpoint(tmp_path: Path) -> None:
    start = save(tmp_path / "a", 400, world_size=3)
    seen: list[tuple[int, int]] = []
    done = exported(start, tmp_path / "dcp", report=lambda *pair: seen.append(pair))
    assert seen[-1] == (done.bytes, done.bytes)
    back = imported(tmp_path / "dcp", tmp_path / "b")
    assert back.path.name == "step-00000400"
    with Checkpoint.open(start) as one, Checkpoint.open(back.path) as other:
        found = compare(one, other)
        assert found.same_values
        assert found.facts == {"world_size": (3, 1)}
        assert one.manifest.tensors == other.manifest.tensors
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "dcp"]


def test_torch_itself_reads_the_export_by_the_documented_names(tmp_path: Path) -> None:
    start = save(tmp_path / "a", 400, world_size=3)
    exported(start, tmp_path / "dcp")
    assert set(stored(tmp_path / "dcp")) >= {
        "model.embed.weight",
        "optimizer.state.embed.weight.exp_avg",
        "optimizer.state.layers.0.experts.up.momentum",
        "buffers.tokens_per_expert",
        MANIFEST_KEY,
    }
    found = load(tmp_path / "dcp", ["model.embed.weight", "optimizer.state.embed.weight.exp_avg"])
    assert found["model.embed.weight"].shape == (13, 7)
    assert found["optimizer.state.embed.weight.exp_avg"].dtype == torch.bfloat16
    with Checkpoint.open(start) as checkpoint:
        out = torch.empty(91).numpy()
        checkpoint.read("embed.weight", "master", 0, 91, out)
    assert found["model.embed.weight"].numpy().tobytes() == out.tobytes()


def without(out: Path, target: Path, *dropped: str) -> Path:
    """What another trainer might write: the same tensors, but for some."""
    import torch.distributed.checkpoint as dcp

    state = load(out, [key for key in stored(out) if key not in dropped])
    dcp.save(state, checkpoint_id=target, no_dist=True)
    return target


def test_another_trainer_s_checkpoint_needs_one_of_ours_beside_it(tmp_path: Path) -> None:
    start = save(tmp_path / "a", 400)
    exported(start, tmp_path / "dcp")
    theirs = without(tmp_path / "dcp", tmp_path / "theirs", MANIFEST_KEY)
    with pytest.raises(HubError, match="--like"):
        imported(theirs, tmp_path / "b")
    with Checkpoint.open(start) as checkpoint:
        back = imported(theirs, tmp_path / "b", like=checkpoint.manifest)
        with Checkpoint.open(back.path) as other:
            assert compare(checkpoint, other).same_values


def test_everything_that_does_not_fit_is_named_at_once_and_nothing_is_written(tmp_path: Path) -> None:
    start = save(tmp_path / "a", 400)
    exported(start, tmp_path / "dcp")
    broken = without(
        tmp_path / "dcp", tmp_path / "broken", "model.embed.weight", "buffers.tokens_per_expert", MANIFEST_KEY
    )
    other = [TENSORS[0], TENSORS[1].__class__("layers.0.experts.up", (3, 11, 6), TENSORS[1].states), *TENSORS[2:]]
    with Checkpoint.open(save(tmp_path / "other", 1, other)) as like, pytest.raises(HubError) as caught:
        imported(broken, tmp_path / "b", like=like.manifest)
    for problem in (
        "4 tensors do not fit",
        "model.embed.weight is missing",
        "model.layers.0.experts.up is [3, 11, 5] instead of [3, 11, 6]",
        "buffers.tokens_per_expert is missing",
    ):
        assert problem in str(caught.value)
    assert not (tmp_path / "b").exists()


def test_what_is_no_dcp_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(HubError, match="no DCP checkpoint"):
        imported(tmp_path, tmp_path / "b")
    (tmp_path / ".metadata").write_bytes(b"nonsense")
    with pytest.raises(HubError, match="cannot be read"):
        imported(tmp_path, tmp_path / "b")


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda path: path.write_bytes(b""), ""),
        (lambda path: path.write_bytes(path.read_bytes()[:100]), ""),
        (lambda path: path.write_bytes(bytes(path.stat().st_size)), ""),
        (lambda path: path.write_bytes(b"\x80\x02}q\x00." * 20_000), ""),
        (lambda path: path.write_bytes(b"half" + path.read_bytes()[4:]), ""),
        (Path.unlink, "{path}: No such file or directory"),
        (lambda path: (path.unlink(), path.mkdir()), "{path}: Is a directory"),
    ],
)
def test_a_damaged_part_is_refused_in_one_plain_line(
    tmp_path: Path, damage: Callable[[Path], object], reason: str
) -> None:
    exported(save(tmp_path / "a", 400), tmp_path / "dcp")
    (part,) = (tmp_path / "dcp").glob("*.distcp")
    damage(part)
    with pytest.raises(HubError) as caught:
        imported(tmp_path / "dcp", tmp_path / "root")
    message = str(caught.value)
    assert message.startswith(f"{tmp_path}/dcp: ")
    assert f" cannot be read: {reason.format(path=part)}" in message
    assert "\n" not in message
    assert not PYTHONS_WORDS.search(message)


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    start = save(tmp_path / "a", 400)
    exported(start, tmp_path / "dcp")
    with pytest.raises(HubError, match="exists"):
        exported(start, tmp_path / "dcp")
    with pytest.raises(HubError, match="holds a checkpoint of step 400"):
        imported(tmp_path / "dcp", tmp_path / "a")


def test_damage_is_found_on_the_way_out_and_leaves_nothing(tmp_path: Path) -> None:
    start = save(tmp_path / "a", 400)
    shard = start / "shard-00001-of-00002.safetensors"
    flip(shard, 8 * (shard.stat().st_size - 1))
    with pytest.raises(Damaged, match=shard.name):
        exported(start, tmp_path / "dcp")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
