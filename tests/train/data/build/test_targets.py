"""Fine-tuning data: prompts are read, completions are learned, and the mask is next to the targets."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.train.data.corpora import HEADER, write_bundle, write_rows, write_texts
from zslurm.train.data.build.build import build
from zslurm.train.data.build.bundle_writer import BundleWriter
from zslurm.train.data.build.inspect import previews
from zslurm.train.data.build.source_reader import Fields
from zslurm.train.data.build.tokenizer import encode, load_tokenizer
from zslurm.train.data.bundle import Bundle, Corpus
from zslurm.train.data.schema import bundle_name
from zslurm.train.errors import DataError

PAIRS = [("Say hello.", " Hello!"), ("", "No prompt at all."), ("And nothing:", ""), ("2 + 2 =", " 4")]
FIELDS = Fields(prompt_key="question", completion_key="answer")


def write_masked(path: Path, documents: list[tuple[list[int], list[int]]]) -> Path:
    with BundleWriter(path, HEADER, masked=True) as writer:
        for tokens, targets in documents:
            writer.append(np.array(tokens), np.array(targets))
    return path


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.zst", "a.parquet"])
def test_prompts_are_masked_and_completions_are_not(tmp_path: Path, name: str) -> None:
    rows = [{"question": prompt, "answer": completion} for prompt, completion in PAIRS]
    summary = build([write_rows(tmp_path / name, rows)], tmp_path / "out", vocab_size=300, fields=FIELDS)
    assert (summary.documents, summary.empty_documents) == (3, 1)
    corpus = Corpus.open(summary.path)
    (bundle,) = corpus.bundles
    tokenizer = load_tokenizer(corpus.tokenizer_path())
    expected_tokens, expected_targets = [], []
    for prompt, completion in [PAIRS[0], PAIRS[1], PAIRS[3]]:
        before, after = encode(tokenizer, [prompt, completion])
        expected_tokens += [*before.tolist(), *after.tolist(), corpus.header.end_token]
        expected_targets += [0] * len(before) + [1] * (len(after) + 1)
    assert bundle.tokens.tolist() == expected_tokens
    assert bundle.targets is not None
    assert bundle.targets.dtype == np.uint8
    assert bundle.targets.tolist() == expected_targets
    assert summary.targets == sum(expected_targets) < summary.tokens


def test_the_mask_lies_beside_the_targets(tmp_path: Path) -> None:
    path = write_masked(tmp_path / "a.h5", [([10, 11, 12, 13, 1], [0, 0, 1, 1, 1]), ([20, 21, 1], [0, 1, 1])])
    corpus = Corpus.open(path)
    windows, mask = corpus.windows([0, 1], 3), corpus.target_mask([0, 1], 3)
    assert windows.tolist() == [[10, 11, 12, 13], [13, 1, 20, 21]]
    assert mask is not None
    assert mask.dtype == np.uint8
    assert mask.tolist() == [[0, 1, 1], [1, 0, 1]]
    with pytest.raises(IndexError):
        corpus.target_mask([2], 3)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), context=st.integers(1, 9))
def test_a_mask_is_the_streams_whatever_the_bundling(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, context: int
) -> None:
    """Some bundles have none: their tokens count."""
    directory = tmp_path_factory.mktemp("corpus")
    parts = data.draw(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=12), min_size=1, max_size=4))
    masked = data.draw(st.lists(st.booleans(), min_size=len(parts), max_size=len(parts)))
    for part, (targets, with_mask) in enumerate(zip(parts, masked, strict=True)):
        path = directory / bundle_name(part, len(parts))
        if with_mask:
            write_masked(path, [([4] * len(targets), targets)])
        else:
            write_bundle(path, [[4] * len(targets)])
    corpus = Corpus.open(directory)
    stream = [t if with_mask else 1 for targets, with_mask in zip(parts, masked, strict=True) for t in targets]
    indices = list(range((len(stream) - 1) // context))
    if not indices:
        return
    mask = corpus.target_mask(indices, context)
    if not any(masked):
        assert mask is None
        return
    assert mask is not None
    assert mask.tolist() == [stream[i * context + 1 : (i + 1) * context + 1] for i in indices]


def test_without_masks_a_bundle_is_as_it_always_was(tmp_path: Path) -> None:
    """Readers of version 1 can read it; one with a mask would be misread by them, and has version 2."""
    plain = write_bundle(tmp_path / "plain.h5", [[4, 5, 1]])
    masked = write_masked(tmp_path / "masked.h5", [([4, 5, 1], [0, 1, 1])])
    with h5py.File(plain) as file:
        assert (file.attrs["version"], sorted(file)) == (1, ["checksums", "documents", "tokens"])
    with h5py.File(masked) as file:
        assert file.attrs["version"] == 2
    assert Bundle.open(plain).targets is None
    assert Corpus.open(plain).target_mask([0], 2) is None
    with h5py.File(masked, "r+") as file:
        del file["targets"]
    with pytest.raises(DataError, match="targets"):
        Bundle.open(masked)


def test_the_mask_belongs_to_the_fingerprint(tmp_path: Path) -> None:
    paths = [
        write_masked(tmp_path / f"{name}.h5", [([4, 5, 1], targets)])
        for name, targets in {"a": [0, 1, 1], "b": [0, 0, 1], "c": [1, 1, 1]}.items()
    ]
    paths.append(write_bundle(tmp_path / "d.h5", [[4, 5, 1]]))
    assert len({Corpus.open(path).fingerprint for path in paths}) == 4


def test_a_damaged_mask_is_refused(tmp_path: Path) -> None:
    path = write_masked(tmp_path / "a.h5", [([4, 5, 6, 1], [0, 1, 1, 1])])
    with h5py.File(path, "r+") as file:
        file["targets"][2] = 3
    with pytest.raises(DataError, match=r"a\.h5: the mask of token 2 is 3, not 0 or 1: the file is damaged"):
        Corpus.open(path).target_mask([0], 3)


def test_a_writer_wants_a_mask_that_fits(tmp_path: Path) -> None:
    for targets in ([0, 1], [0, 2, 1], [-1, 1, 1]):
        with pytest.raises(ValueError, match="0 or 1 for each of 3 tokens"):
            write_masked(tmp_path / "a.h5", [([4, 5, 1], targets)])
    with BundleWriter(tmp_path / "a.h5", HEADER, masked=True) as writer:
        writer.append(np.array([4, 1]))
    assert np.asarray(Bundle.open(tmp_path / "a.h5").targets).tolist() == [1, 1]


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ({"question": "x"}, r"a\.jsonl:1: has no 'answer'; its keys: 'question' \(set --prompt-key and"),
        ({"question": "x", "answer": None}, r"a\.jsonl:1: 'answer' is null, not a string"),
    ],
)
def test_bad_pairs_are_named(tmp_path: Path, row: dict[str, str | None], complaint: str) -> None:
    source = write_rows(tmp_path / "a.jsonl", [row])
    with pytest.raises(DataError, match=complaint):
        build([source], tmp_path / "out", vocab_size=300, fields=FIELDS)


def test_text_files_have_no_prompts(tmp_path: Path) -> None:
    write_texts(tmp_path / "in", a="text")
    with pytest.raises(DataError, match=r"a\.txt: is a text file, which has no 'question'; .* --glob"):
        build([tmp_path / "in"], tmp_path / "out", vocab_size=300, fields=FIELDS)


def test_previews_show_what_is_learned(tmp_path: Path) -> None:
    rows = [{"question": prompt, "answer": completion} for prompt, completion in PAIRS]
    summary = build([write_rows(tmp_path / "a.jsonl", rows)], tmp_path / "out", vocab_size=300, fields=FIELDS)
    corpus = Corpus.open(summary.path)
    shown = previews(corpus, 3)
    assert [preview.parts for preview in shown] == [
        ((False, "Say hello."), (True, " Hello!")),
        ((True, "No prompt at all."),),
        ((False, "2 + 2 ="), (True, " 4")),
    ]
    assert all(preview.complete for preview in shown)
    (first,) = previews(corpus, 1, tokens=3)
    assert (first.document, first.complete, first.text) == (0, False, "Say")
    assert [preview.document for preview in previews(corpus, 2)] == [0, 1]
    assert len(previews(corpus, 100)) == 3


def test_previews_need_the_tokenizer(tmp_path: Path) -> None:
    write_bundle(tmp_path / bundle_name(0, 1), [[4, 1]], replace(HEADER, tokenizer_sha256="cd" * 32))
    with pytest.raises(DataError, match=r"tokenizer\.json: cannot be read"):
        previews(Corpus.open(tmp_path), 1)
