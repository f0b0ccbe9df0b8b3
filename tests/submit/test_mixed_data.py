"""Runs of several sources are checked when they are submitted."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.submit.specs import run_spec, saved
from tests.train.runs import make_corpus
from zslurm.config.spec import RunSpec
from zslurm.core.errors import ConfigError
from zslurm.submit.checks.run import check_data, check_steps
from zslurm.submit.submit import run_dir_of


def mixed_spec(directory: Path, *, mix: dict[str, float] | None = None, **paths: Path) -> RunSpec:
    """Two phases of 960 tokens in contexts of 16: the first with `mix`, the second with web alone."""
    spec = run_spec(directory, data={"path": None, "sources": {name: str(path) for name, path in paths.items()}})
    body = spec.model_dump(mode="json")
    first, second = ({**body["phases"][0], "name": name} for name in ("first", "second"))
    body["phases"] = [first | {"mix": mix or {}}, second | {"mix": {"web": 1}}]
    return RunSpec.model_validate(body)


@pytest.fixture
def web(tmp_path: Path) -> Path:
    return make_corpus(tmp_path / "web.h5", 4001)


@pytest.fixture
def code(tmp_path: Path) -> Path:
    return make_corpus(tmp_path / "code.h5", 801)


def test_every_source_is_opened_and_wrong_ones_are_named(tmp_path: Path, web: Path, code: Path) -> None:
    assert check_data(mixed_spec(tmp_path, web=web, code=code)).data.names == ("code", "web")
    with pytest.raises(ConfigError, match=r"^data\.sources\.code: .*nowhere\.h5: no such file"):
        check_data(mixed_spec(tmp_path, web=web, code=tmp_path / "nowhere.h5"))
    other = make_corpus(tmp_path / "other.h5", tokenizer="b" * 64)
    with pytest.raises(
        ConfigError, match=r"^data\.sources\.web: made with another tokenizer than data\.sources\.code"
    ):
        check_data(mixed_spec(tmp_path, web=web, code=other))
    tiny = make_corpus(tmp_path / "tiny.h5", 10)
    with pytest.raises(
        ConfigError, match=r"^data\.sources\.code: .* holds 10 tokens, but one sequence of context"
    ):
        check_data(mixed_spec(tmp_path, web=web, code=tiny))
    with pytest.raises(ConfigError, match=r"^phases\[0\]\.mix: code has less than one sequence in 1,048,576"):
        check_data(mixed_spec(tmp_path, mix={"web": 1, "code": 1e-8}, web=web, code=code))


def test_a_run_that_continues_on_changed_data_or_mixes_is_reported_when_it_is_submitted(
    tmp_path: Path, web: Path, code: Path
) -> None:
    before = mixed_spec(tmp_path, mix={"web": 1, "code": 1}, web=web, code=code)
    order, run = check_data(before), run_dir_of(before)
    saved(run, 10, {"plan": order.plan.record(), **order.record(10)})
    assert check_steps(before, order, continues=run) == []
    other = make_corpus(tmp_path / "other.h5", 900)
    changed = mixed_spec(tmp_path, mix={"web": 1, "code": 1}, web=web, code=other)
    assert check_steps(changed, check_data(changed), continues=run) == [
        f"{other} is not the data that the checkpoint was trained on"
    ]
    remixed = mixed_spec(tmp_path, mix={"web": 1}, web=web, code=code)
    with pytest.raises(
        ConfigError, match=r"^phases\[\]\.mix or packing: the 10 steps that are done took .* take 60 of web; set"
    ):
        check_steps(remixed, check_data(remixed), continues=run)
