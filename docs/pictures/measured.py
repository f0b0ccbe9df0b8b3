"""Pictures of what was measured: each from files in benchmarks/results."""

from __future__ import annotations

import json
from typing import Any

from docs.pictures.charts import Bar, bars, curves
from docs.tables.markdown import RESULTS
from zslurm.checkpoint_tools.quantities import show_bytes

_PARTS = ("until Python runs", "import", "load", "first step")


def _result(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return found


def _where(result: dict[str, Any]) -> str:
    machine = result["machine"]
    return f"{machine['cores']} cores of {machine['cpu']}, {result['date']}; `{result['command']}`"


def recovery() -> str:
    """From a dead node to the first new step, by part: this tool, and what others do."""
    result = _result("goodput")
    rows = []
    for contender in result["contenders"]:
        found = next((each for each in contender["faults"] if each["fault"] == "node dies"), None)
        if found is None or "parts_s" not in found:
            continue
        parts = [(found["parts_s"][part], number) for number, part in enumerate(_PARTS)]
        rows.append(Bar(contender["name"], parts, f"{found['to_first_new_step_s']:.0f} s"))
    key = [("until the ranks start", 0), ("import torch", 1), ("load the checkpoint", 2), ("first step", 3)]
    return bars("A node dies: seconds to the first new step", "two nodes of a real Slurm, one fault, one job each",
                rows, key=key, note=_where(result))  # fmt: skip


def recovery_in_memory() -> str:
    """From a killed rank to the first new step: in memory, by a restart in place, and with torchrun."""
    result = _result("recovery")
    rows = [
        Bar(each["name"], [(each["seconds_median"], 0 if index == 0 else 4)], f"{each['seconds_median']:.2f} s")
        for index, each in enumerate(result["contenders"])
    ]
    return bars("A rank is killed: seconds to the first new step", result["what"], rows, note=_where(result))


def checkpoint_stall() -> str:
    """How long training stands still for a checkpoint, next to its peers."""
    result = _result("checkpoint")
    names = {"ours": "zslurm", "dcp_async": "DCP, async_save", "dcp": "DCP, save", "gather": "gather to rank 0"}
    stalls = result["disk"]["stall_s"]
    rows = [
        Bar(text, [(stalls[name], 0 if name == "ours" else 4)], f"{stalls[name]:.3g} s")
        for name, text in names.items()
    ]
    about = f"{show_bytes(result['disk']['bytes'])} of state on {result['ranks']} ranks, to disk"
    return bars("Training stands still for a checkpoint", about, rows, note=_where(result))


def elastic_loss() -> str:
    """The loss across a change of the number of ranks, next to a run without it."""
    result = _result("elastic_loss")
    series = [("4 ranks to the end", result["losses"]["whole"]), ("4 ranks, then 3", result["losses"]["elastic"])]
    after = result["largest_relative_difference"]["after"]
    about = f"largest relative difference after the change: {after:.1e}; {_where(result)}"
    mark = (result["changed_after_step"], "4 ranks become 3")
    return curves("The loss across an elastic change", about, series, mark=mark, unit="loss in nats")


def ratios() -> str:
    """How many times as fast as its peer each measured part is."""
    checkpoint, goodput = _result("checkpoint"), _result("goodput")
    recovered = {each["name"]: each["seconds_median"] for each in _result("recovery")["contenders"]}
    disk, (ours, *others) = checkpoint["disk"], goodput["contenders"]
    best = max(others, key=lambda each: each["goodput"])
    measured = [
        ("checkpoint: stall", "DCP async_save", disk["stall_s"]["dcp_async"], disk["stall_s"]["ours"]),
        ("checkpoint: load", "DCP", disk["load_s"]["dcp"], disk["load_s"]["ours"]),
        ("from a killed rank", "torchrun", recovered["torchrun"], recovered["in memory"]),
        ("goodput, three faults", best["name"], ours["goodput"], best["goodput"]),
    ]
    rows = [
        Bar(name, [(slower / faster, 0)], f"{slower / faster:.3g} x {peer}")
        for name, peer, slower, faster in sorted(measured, key=lambda each: each[2] / each[3])
    ]
    machine = _where(checkpoint)
    return bars("Times as fast as", "medians on the same machine in the same run", rows, note=machine)


PICTURES = (recovery, recovery_in_memory, checkpoint_stall, elastic_loss, ratios)
