"""The manifest: nothing missing, nothing twice, the same in and out."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint_tools.saves import BUFFERS, TENSORS, manifest_of, write_all_ranks
from zslurm.checkpoint_tools import (
    BLOCK_SIZE,
    Damaged,
    Incomplete,
    Mismatch,
    ShardReport,
    StoredExtent,
    Tensor,
    assemble,
    fingerprint,
    partition,
)
from zslurm.checkpoint_tools.format import manifest_json
from zslurm.checkpoint_tools.format.layout import shard_name

MANIFEST = Path("manifest.json")
CONTENT: dict[str, Any] = {"step": 1, "tokens": 2, "model": {}, "cursor": {}, "state": {}}


@pytest.fixture
def reports(tmp_path: Path) -> list[ShardReport]:
    return write_all_ranks(tmp_path, TENSORS, 3)


def test_a_manifest_comes_back_the_same(reports: list[ShardReport]) -> None:
    manifest = manifest_of(reports, TENSORS, 400)
    data = manifest_json.encode(manifest)
    assert manifest_json.decode(data, MANIFEST) == manifest
    assert manifest_json.encode(manifest_json.decode(data, MANIFEST)) == data


def test_any_json_reader_can_read_a_manifest(reports: list[ShardReport]) -> None:
    document = json.loads(manifest_json.encode(manifest_of(reports, TENSORS, 400)))
    assert list(document)[:3] == ["format", "version", "step"]
    assert document["model"] == {"layers": 1, "hidden": 7, "rope_base": 1e6}
    assert document["model_fingerprint"] == fingerprint({"rope_base": 1e6, "hidden": 7, "layers": 1})
    assert document["tensors"][3] == {
        "name": "layers.0.temperature",
        "shape": [],
        "states": {"master": "F32", "exp_avg": "BF16", "exp_avg_sq": "F32"},
    }
    assert document["tensors"][1]["whole"] == 3


def test_a_size_that_no_file_can_have_is_damage(reports: list[ShardReport]) -> None:
    """With a checksum that fits, as a program that edits manifests would write."""
    manifest = manifest_of(reports, TENSORS, 400)
    buffer = dataclasses.replace(manifest.buffers[0], shape=(1 << 63,))
    data = manifest_json.encode(dataclasses.replace(manifest, buffers=(buffer, *manifest.buffers[1:])))
    with pytest.raises(Damaged, match="expected a whole number, got 9223372036854775808"):
        manifest_json.decode(data, MANIFEST)


def test_ownership_can_be_told_from_a_manifest_alone(reports: list[ShardReport]) -> None:
    """What `partition` gives for the manifest's own table is what the ranks wrote."""
    manifest = manifest_json.decode(manifest_json.encode(manifest_of(reports, TENSORS, 400)), MANIFEST)
    layout = partition(manifest.tensors, manifest.world_size)
    for rank in range(manifest.world_size):
        file = shard_name(rank, manifest.world_size)
        stored = {(e.tensor, e.start, e.stop) for e in manifest.extents if e.file == file}
        assert {(e.tensor, e.start, e.stop) for e in layout.extents(rank)} == stored


def test_a_manifest_of_before_whole_matrices_has_flat_tensors_only(tmp_path: Path) -> None:
    """Its rows have no such key; nor have ours, if a tensor is flat."""
    flat = [dataclasses.replace(tensor, whole=0) for tensor in TENSORS]
    data = manifest_json.encode(manifest_of(write_all_ranks(tmp_path, flat, 2), flat, 1))
    assert b"whole" not in data
    assert [tensor.whole for tensor in manifest_json.decode(data, MANIFEST).tensors] == [0] * len(flat)


def test_reports_may_come_in_any_order(reports: list[ShardReport]) -> None:
    assert manifest_of(reversed(reports), TENSORS, 1) == manifest_of(reports, TENSORS, 1)


@pytest.mark.parametrize("content", [{"loss": float("nan")}, {"when": object()}, {"best": float("inf")}])
def test_content_that_is_not_json_is_refused(reports: list[ShardReport], content: dict[str, Any]) -> None:
    manifest = dataclasses.replace(manifest_of(reports, TENSORS, 1), state=content)
    with pytest.raises(Mismatch, match="plain JSON"):
        manifest_json.encode(manifest)


Change = Callable[[list[ShardReport]], list[ShardReport]]


def with_extents(report: ShardReport, *extents: StoredExtent) -> ShardReport:
    return dataclasses.replace(report, extents=extents)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: [], "no rank reported"),
        (lambda r: r[:2], "rank 2 did not report"),
        (lambda r: r[1:], "rank 0 did not report exactly one"),
        (lambda r: [*r, r[1]], "rank 1 did not report exactly one"),
        (lambda r: [r[0], dataclasses.replace(r[1], block_size=1), r[2]], "another world size or block size"),
        (lambda r: [r[0], dataclasses.replace(r[1], file=r[0].file), r[2]], "not its own shard"),
        (lambda r: [r[0], dataclasses.replace(r[1], crcs=(1,)), r[2]], "1 checksum; they do not fit"),
        (lambda r: [r[0], with_extents(r[1]), r[2]], r"elements .* in no shard|hold .* elements"),
        (lambda r: [r[0], with_extents(r[1], *r[1].extents, *r[0].extents), r[2]], "in another shard"),
        (lambda r: [with_extents(r[0], *r[0].extents[1:]), *r[1:]], "'embed.weight', state 'master'"),
        (
            lambda r: [with_extents(r[0], dataclasses.replace(r[0].extents[0], dtype="F16")), *r[1:]],
            "written as F16, the tensor table says F32",
        ),
        (
            lambda r: [
                with_extents(r[0], *r[0].extents, StoredExtent.of("head", "master", 0, 1, "F32", r[0].file)),
                *r[1:],
            ],
            "'head', state 'master' was written, but is not in the tensor table",
        ),
        (lambda r: [dataclasses.replace(r[0], buffers=()), *r[1:]], r"buffer .* was written by no rank"),
        (
            lambda r: [r[0], dataclasses.replace(r[1], buffers=r[0].buffers), r[2]],
            "buffer 'layers.0.balancing_bias' comes twice",
        ),
    ],
)
def test_reports_that_do_not_add_up_are_refused(reports: list[ShardReport], change: Change, message: str) -> None:
    with pytest.raises(Incomplete, match=message):
        manifest_of(change(reports), TENSORS, 1)


def test_a_state_that_every_rank_forgot_is_found(reports: list[ShardReport]) -> None:
    wanted = [Tensor(t.name, t.shape, {**t.states, "variance": "F32"}) for t in TENSORS]
    with pytest.raises(Incomplete, match=r"'embed\.weight', state 'variance': the shards hold 0 elements"):
        manifest_of(reports, wanted, 1)


def test_a_buffer_that_should_not_be_there_is_found(reports: list[ShardReport]) -> None:
    with pytest.raises(Incomplete, match=r"buffer 'rng\.rank-0' was written, but should not be"):
        assemble(reports, **CONTENT, tensors=TENSORS, buffers=BUFFERS.keys() - {"rng.rank-0"})


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"rank": 0}', '{"extents": [[1]], "buffers": []}'])
def test_text_that_is_no_report_is_refused(text: str) -> None:
    with pytest.raises(Mismatch, match="not the report of a shard"):
        ShardReport.from_json(text)


def test_a_thousand_ranks_assemble() -> None:
    """As large as it gets: 4,000 tensors of an 8-billion-parameter model, three states, 1,024 ranks."""
    world_size, states = 1024, {"master": "F32", "exp_avg": "F32", "exp_avg_sq": "F32"}
    tensors = [Tensor(f"layers.{i}.weight", (1024, 2048), states) for i in range(4000)]
    layout = partition(tensors, world_size)
    reports = []
    for rank in range(world_size):
        name = shard_name(rank, world_size)
        extents = tuple(
            StoredExtent.of(e.tensor, state, e.start, e.stop, "F32", name)
            for e in layout.extents(rank)
            for state in states
        )
        size = sum(extent.stop - extent.start for extent in extents) * 4
        blocks = tuple(range(-(-size // BLOCK_SIZE)))
        reports.append(ShardReport(rank, world_size, name, size, BLOCK_SIZE, blocks, extents, ()))
    manifest = assemble(reports, **CONTENT, tensors=tensors)
    assert manifest_json.decode(manifest_json.encode(manifest), MANIFEST) == manifest
