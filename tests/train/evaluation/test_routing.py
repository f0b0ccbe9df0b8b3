"""What is counted of the router is what it did, and its figures are their definitions."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.train.models import ROPE_BASE, scrambled, tiny_config
from zslurm.train.data.build.tokenizer import train_tokenizer
from zslurm.train.evaluation import routing
from zslurm.train.evaluation.routing import ROUTING_FILE, RoutingCounter, RoutingFigures, normalised_information
from zslurm.train.evaluation.token_classes import TOKEN_CLASSES, class_of, token_classes


def test_counts_are_the_routers_choices_without_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, group: None)
    model = scrambled(tiny_config(experts_per_token=2))
    tokens = torch.randint(0, 31, (3, 20), generator=torch.Generator().manual_seed(2))
    valid = torch.arange(20) < torch.tensor([[20], [11], [7]])
    class_of_v = torch.arange(31, dtype=torch.uint8) % 3
    counter = RoutingCounter(model, class_of_v)
    chosen: list[torch.Tensor] = []
    hooks = [
        layer.router.register_forward_hook(lambda m, i, out: chosen.append(out.classes_TK))
        for layer in model.layers
    ]
    with counter.counting(tokens, valid):
        _, counts_lc = model(tokens, rope_base=ROPE_BASE, valid_BS=valid)
    for hook in hooks:
        hook.remove()
    expected = np.zeros((2, len(TOKEN_CLASSES), 4))
    followed = np.zeros((4, 4))
    for place, (token, counts) in enumerate(zip(tokens.flatten().tolist(), valid.flatten().tolist(), strict=True)):
        if counts:
            for layer in range(2):
                for expert in chosen[layer][place].tolist():
                    expected[layer, token % 3, expert] += 1
            followed[chosen[0][place, 0], chosen[1][place, 0]] += 1
    assert np.array_equal(expected.sum(axis=1), counts_lc.numpy())
    found = counter.figures(None)
    assert found.tokens == 38 * 2
    assert found.classes == list(TOKEN_CLASSES[:3])
    assert found.specialisation == [normalised_information(each) for each in expected[:, :3]]
    assert found.followed == [normalised_information(followed)]
    shares = expected[:, :3] / expected[:, :3].sum(axis=2, keepdims=True)
    assert np.allclose(found.shares, shares, atol=1e-4)
    load = expected.sum(axis=1) / expected.sum(axis=(1, 2))[:, None]
    assert np.allclose(found.distance, np.abs(shares - load[:, None]).sum(axis=2) / 2, atol=1e-4)
    assert not any(layer.router._forward_hooks for layer in model.layers)


def test_a_compiled_model_is_looked_at_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, group: None)
    model, tokens = scrambled(tiny_config()), torch.randint(0, 31, (2, 20))
    figures = []
    for compiled in (False, True):
        if compiled:
            torch.compiler.reset()
            model.run_with(compile=True, backend="eager")
        counter = RoutingCounter(model, None)
        with counter.counting(tokens, None):
            model(tokens, rope_base=ROPE_BASE)
        figures.append(counter.figures(None))
    assert figures[0] == figures[1]
    assert figures[0].tokens == 40
    graphs = []
    monkeypatch.setattr(model.layers[0], "_compiled_call_impl", lambda *given: graphs.append(given))
    with pytest.raises(TypeError):
        model(tokens, rope_base=ROPE_BASE)
    assert len(graphs) == 1, "from then on layers run by their graphs again"


def test_information_is_none_half_and_all() -> None:
    assert normalised_information(np.array([[5.0, 5.0], [5.0, 5.0]])) == 0
    assert normalised_information(np.array([[5.0, 0.0], [0.0, 5.0]])) == 1
    assert normalised_information(np.array([[4.0, 0, 0], [0, 2, 2]])) == 1, "the class follows from the expert"
    assert 0 < (normalised_information(np.array([[4.0, 1], [1, 4]])) or 0) < 1
    assert normalised_information(np.array([[5.0, 0.0], [5.0, 0.0]])) is None, "one expert has all"
    assert normalised_information(np.zeros((2, 2))) is None


def test_overlap_is_the_share_of_types_in_common() -> None:
    """Experts 0 and 1 share half of their types, 2 has others, 3 has no token."""
    types = np.array([[4.0, 0, 0, 0], [4, 2, 0, 0], [0, 2, 0, 0], [0, 0, 9, 0]])
    found = RoutingFigures.of(
        np.array([[types.sum(axis=0)]]).reshape(1, 1, 4), types[None], np.zeros((0, 4, 4)), named=False
    )
    assert found.overlap == [
        [[1.0, 0.5, 0.0, None], [0.5, 1.0, 0.0, None], [0.0, 0.0, 1.0, None], [None, None, None, None]]
    ]
    assert (found.classes, found.specialisation, found.distance) == ([], [], [[]])
    assert found.summary() == {"tokens": 21, "specialisation": [], "overlap": [0.1667], "followed": []}


def test_the_file_is_replaced_whole(tmp_path: Path) -> None:
    figures = RoutingFigures(9, [], [], [[]], [[]], [[[1.0]]], [])
    for step in (3, 6):
        figures.write(tmp_path, step, "train")
    assert [path.name for path in tmp_path.iterdir()] == [ROUTING_FILE]
    found = json.loads((tmp_path / ROUTING_FILE).read_text())
    assert (found["step"], found["tokens"], found["overlap"]) == (6, 9, [[[1.0]]])
    assert routing.TYPES == 512


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("", "special"), ("\N{REPLACEMENT CHARACTER}", "bytes"), ("\n  ", "space"), (" 2024", "number"),
        (" +=", "punctuation"),
        ("привет", "other script"), (" the", "word start"), ("ing", "word part"), (" naïve2", "word start"),
    ],
)  # fmt: skip
def test_tokens_have_the_class_of_their_text(text: str, name: str) -> None:
    assert class_of(text) == name


def test_a_vocabulary_is_classified_whole(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(["the number 42 of the words, the words"] * 3, 280)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    found = token_classes(tmp_path / "tokenizer.json", 300)
    names = {text: TOKEN_CLASSES[found[token]] for text, token in tokenizer.get_vocab().items()}
    assert (names["<eos>"], names["Ġthe"], names["4"], names[","], names["Ġ"]) == (
        "special",
        "word start",
        "number",
        "punctuation",
        "space",
    )
    assert TOKEN_CLASSES[found[299]] == "special", "ids that the tokenizer does not have"
    assert np.bincount(found, minlength=8)[TOKEN_CLASSES.index("bytes")] > 100
