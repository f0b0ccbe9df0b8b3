"""Every example of CONTRIBUTING.md works: it is put where the text says, found there, and does what it should."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tests.aegis.contexts import context
from tests.checkout import ROOT
from tests.config.run_files import resolve_text
from zslurm import kernels
from zslurm.aegis import fault_kinds
from zslurm.aegis.agent import sensors
from zslurm.aegis.agent.sensor import all_sensors
from zslurm.aegis.logs.signatures import Signatures
from zslurm.bench.kernels import measure
from zslurm.cluster.rccl.rules import RcclRule, variables
from zslurm.config import yaml12
from zslurm.config.spec import ClusterSection
from zslurm.doctor import checks
from zslurm.doctor.check import Status, all_checks
from zslurm.hardware.node_sources import Sources
from zslurm.kernels.case import benchmarks_of
from zslurm.kernels.dispatch import operations
from zslurm.kernels.harness.comparison import check_all
from zslurm.train.shapes import parameter_counts

TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
Placed = Callable[[ModuleType, str], ModuleType]


def block(heading: str, kind: str) -> str:
    """The only block of a kind below a heading."""
    section = re.split(r"^## ", TEXT.partition(f"## {heading}\n")[2], maxsplit=1, flags=re.MULTILINE)[0]
    (text,) = re.findall(rf"^```{kind}\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    return str(text)


@pytest.fixture
def placed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Placed:
    """Puts an example into a package, as if its file were there, for one test."""

    def put(package: ModuleType, text: str) -> ModuleType:
        named = re.match(r"# ([\w/]+)\.py\n", text)
        assert named, "the first line of an example names its file"
        path = Path(named[1])
        folder = tmp_path / "added"
        folder.mkdir()
        (folder / f"{path.name}.py").write_text(text)
        assert package.__name__.endswith(".".join(path.parent.parts))
        monkeypatch.setattr(package, "__path__", [*package.__path__, str(folder)])
        name = f"{package.__name__}.{path.name}"
        monkeypatch.delitem(sys.modules, name, raising=False)
        return importlib.import_module(name)

    return put


def test_the_sensor_is_found_and_reports(placed: Placed, tmp_path: Path) -> None:
    placed(sensors, block("A sensor", "python"))
    root = tmp_path / "root"
    file = root / "proc" / "sys" / "kernel" / "random" / "entropy_avail"
    file.parent.mkdir(parents=True)
    sensor = all_sensors()["entropy"](context(root))
    assert sensor is not None
    assert not sensor.read().ok
    file.write_text("256\n")
    assert sensor.read().values == {"bits": 256}
    file.write_text("12\n")
    (fault,) = sensor.read().faults
    assert (fault.kind, fault.role, fault.line) == ("host_advisory", "advisory", "12 bits of entropy are left")


def test_the_check_is_found_passes_and_warns(placed: Placed, tmp_path: Path) -> None:
    placed(checks, block("A doctor check", "python"))
    (check,) = [check for check in all_checks() if check.name == "swap"]
    (tmp_path / "proc").mkdir()
    sources = Sources(root=tmp_path)
    seen = []
    for text in (
        None,
        "Filename Type Size Used Priority\n",
        "Filename Type Size Used Priority\n/dev/sda2 x 1 0 -2\n",
    ):
        if text is not None:
            (tmp_path / "proc" / "swaps").write_text(text)
        outcome = check.run(sources)
        assert outcome is not None
        seen.append(outcome.status)
    assert seen == [Status.UNAVAILABLE, Status.PASS, Status.WARN]


def test_the_fault_kind_has_a_response_and_is_found_in_a_log(monkeypatch: pytest.MonkeyPatch) -> None:
    scope: dict[str, fault_kinds.FaultKind] = {}
    monkeypatch.setitem(fault_kinds.FAULT_RULES, fault_kinds.FaultKind("gpu_fan_failed"), fault_kinds.rule_of(""))
    exec(block("A fault kind", "python"), scope)  # whose row goes with the one above
    assert fault_kinds.rule_of(scope["GPU_FAN_FAILED"]).exclude_after == 1
    table = (ROOT / "zslurm" / "aegis" / "logs" / "signatures.yaml").read_text(encoding="utf-8")
    example = "".join(f"  {line}\n" for line in block("A fault kind", "yaml").splitlines())
    signatures = Signatures.of(table.replace("\nkinds:\n", f"\nkinds:\n{example}", 1))
    (rule,) = [rule for rule in signatures.rules if rule.match.kind == "gpu_fan_failed"]
    found = signatures.match(rule.matches)
    assert found is not None
    assert (found.kind, found.gpu) == ("gpu_fan_failed", "0000:68:00.0")
    other = signatures.match(rule.rejects)
    assert other is None or other.kind != "gpu_fan_failed"


def test_the_rule_applies_where_it_should() -> None:
    rule = RcclRule.model_validate(yaml12.parse(block("A rule", "yaml"), "rule").data)
    assert rule.variable in variables().names
    given = {"launcher": "slurm", "gpus_per_node": 8}
    there = ClusterSection.model_validate({**given, "gpu_type": "mi300x", "network": "pollara"})
    elsewhere = ClusterSection.model_validate({**given, "gpu_type": "h100", "network": "infiniband"})
    assert rule.when.holds(there)
    assert rule.value_on(there) == "PHB"
    assert not rule.when.holds(elsewhere)


def test_the_kernel_is_found_checked_and_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    section = TEXT.partition("## A kernel\n")[2].partition("\n## ")[0]
    for text in re.findall(r"^```python\n(.*?)^```$", section, re.MULTILINE | re.DOTALL):
        named = re.match(r"# kernels/([\w/]+\.py)\n", text)
        assert named, "the first line of an example names its file"
        file = tmp_path / named[1]
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    monkeypatch.setattr(kernels, "__path__", [*kernels.__path__, str(tmp_path)])
    try:
        operation = operations()["squared_relu"]
        x = torch.randn((2, 5), dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        out, expected = torch.empty_like(x), torch.empty_like(x)
        assert operation.choose(x, out).name == "cpu"
        operation(x, out)
        operation.reference(x, expected)
        assert torch.equal(out, expected)
        with pytest.raises(ValueError, match="squared_relu: "):
            operation(x, out.float())
        cpu = torch.device("cpu")
        assert [each.status for each in check_all(cpu, only=["squared_relu"])] == ["ok"]
        timed = [measure(operation, case, cpu) for case in benchmarks_of("squared_relu", small=True)]
        assert [row["seconds_of"].keys() for row in timed] == [{"reference", "cpu"}] * 2
    finally:
        for name in [name for name in sys.modules if name.startswith("zslurm.kernels.squared_relu")]:
            del sys.modules[name]
        if hasattr(kernels, "squared_relu"):
            del kernels.squared_relu


def test_the_recipe_is_a_run(tmp_path: Path) -> None:
    (tmp_path / "nano.yaml").write_text(block("A recipe", "yaml"))
    spec = resolve_text(tmp_path, "extends: nano.yaml\n").spec
    assert spec.model.layers == 2
    assert parameter_counts(spec.model).total < 10**6
