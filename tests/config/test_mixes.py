"""Mixtures of sources in run files: what is wrong with them is one line with its place."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.config.run_files import complaint, resolve_text

SOURCES = "data:\n  sources:\n    web: data/web\n    code: /elsewhere/code.h5\n"
PHASE = "phases:\n  - {tokens: 960, context: 16, global_batch: 6, micro_batch: 2, lr: 1e-3"
WITHOUT_A_MIX = f"{PHASE}}}\n"


def mixed(mix: str) -> str:
    """A run file with sources and one phase; the mix is on line 7."""
    return f"{SOURCES}{PHASE},\n     mix: {mix}}}\n"


def test_paths_of_sources_belong_to_the_file_that_gives_them(tmp_path: Path) -> None:
    spec = resolve_text(tmp_path, mixed("{web: 3, code: 1}")).spec
    assert spec.data.sources == {"web": str(tmp_path / "data" / "web"), "code": "/elsewhere/code.h5"}
    assert spec.phases[0].mix == {"web": 3.0, "code": 1.0}
    assert resolve_text(tmp_path, SOURCES + WITHOUT_A_MIX).spec.phases[0].mix == {}


@pytest.mark.parametrize(
    ("mix", "message"),
    [
        ("{web: 3, cdoe: 1}", "phases[0].mix.cdoe: is not in data.sources; did you mean `code`?"),
        ("{news: 1}", "phases[0].mix.news: is not in data.sources; there are: web, code"),
        ("{web: 0, code: 0.0}", "phases[0].mix: every share is 0; give at least one source more"),
        ("{web: -1}", "phases[0].mix.web: expected greater than or equal to 0, got -1"),
        ("{web: a lot}", 'phases[0].mix.web: expected a number, got "a lot"'),
    ],
)
def test_a_bad_mix_is_one_line_with_its_place(tmp_path: Path, mix: str, message: str) -> None:
    assert complaint(tmp_path, mixed(mix)) == f"run.yaml:7: {message}"


def test_a_mix_needs_sources_and_sources_exclude_a_path(tmp_path: Path) -> None:
    text = f"data: {{path: a.h5}}\n{PHASE},\n     mix: {{web: 1}}}}\n"
    assert complaint(tmp_path, text) == (
        "run.yaml:4: phases[0].mix: needs data.sources, the names and paths of what is mixed"
    )
    assert complaint(tmp_path, f"{SOURCES}  path: a.h5\n{WITHOUT_A_MIX}").endswith(
        "data: give path or sources, not both"
    )


def test_names_of_sources_are_words(tmp_path: Path) -> None:
    text = f'data: {{sources: {{"a b": x.h5}}}}\n{WITHOUT_A_MIX}'
    assert complaint(tmp_path, text).startswith('run.yaml:1: data.sources."a b": ')
