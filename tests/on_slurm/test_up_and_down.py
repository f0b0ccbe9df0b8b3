"""`make slurm-down` stops what `make slurm-up` of the same checkout started, and no cluster of another one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from tests.checkout import ROOT
from tests.on_slurm import __main__ as program
from tests.on_slurm.cluster.layout import Instance, started_at_tick, this_process

OURS = Instance(Path("/tmp/ours"), 8, 8, False, None, None, str(ROOT))
THEIRS = Instance(Path("/tmp/theirs"), 8, 8, False, None, None, "/another/checkout")
OLDER = Instance(Path("/tmp/older"), 8, 8, False, None, None)
OF_TESTS = Instance(Path("/tmp/tests"), 8, 8, False, this_process(), started_at_tick(this_process()), str(ROOT))
ABANDONED = Instance(Path("/tmp/abandoned"), 8, 8, False, this_process(), 0, "/another/checkout")


@pytest.mark.parametrize(
    ("arguments", "stopped"),
    [
        ([], [OURS, ABANDONED]),
        (["/tmp/theirs"], [THEIRS]),
        (["--all"], [OURS, THEIRS, OLDER, OF_TESTS, ABANDONED]),
    ],
)
def test_down_stops(
    arguments: list[str],
    stopped: list[Instance],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def dismantle(is_chosen: Callable[[Instance], bool]) -> Iterable[Instance]:
        return list(filter(is_chosen, [OURS, THEIRS, OLDER, OF_TESTS, ABANDONED]))

    monkeypatch.setattr(program, "dismantle", dismantle)
    monkeypatch.setattr(program, "why_impossible", lambda: None)
    monkeypatch.setattr("sys.argv", ["on_slurm", "down", *arguments])
    assert program.main() == 0
    assert capsys.readouterr().out.splitlines() == [f"stopped {each.directory}" for each in stopped]
