"""All trials, one after the other: contenders take turns, so that a slow minute hits all of them."""

from __future__ import annotations

import datetime
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

from .contenders import CONTENDERS, Contender
from .plans import FAULTS, Plan
from .score import score, summary
from .site import Site
from .trial import play

_FIRST_PORT = 20_000


def measure(
    site: Site, contenders: Sequence[Contender], plans: Sequence[Plan], turns: int, minutes: float, note: str
) -> dict[str, Any]:
    """Play every plan with every contender, `turns` times, until the time is over; returns the table.

    After Ctrl-C, or if the site cannot be brought back to its state before a trial, the table has what was tried.

    Raises:
        RuntimeError: Slurm does not answer.
    """
    site.jobs()
    began = time.strftime("%y%m%d-%H%M%S")  # a run of zslurm has the name of its trial: no two are alike
    end, stopped = time.monotonic() + minutes * 60, ""
    not_tried, able = [], []
    for contender in contenders:
        if why := contender.why_not(site):
            not_tried.append({"what": contender.name, "why": why})
        else:
            able.append(contender)
    possible = []
    for plan in plans:
        reasons = {fault.fault: why for fault in plan.faults if (why := site.why_not(fault.fault))}
        if reasons:
            not_tried.append({"what": plan.name, "why": "; ".join(reasons.values())})
        else:
            possible.append(plan)
    figures: list[dict[str, Any]] = []
    count = 0
    for turn in range(turns):
        for plan in possible:
            for contender in able:
                if stopped or time.monotonic() > end:
                    why = stopped or "the time was over"
                    not_tried.append({"what": f"{plan.name}, {contender.name}", "why": why})
                    continue
                count += 1
                load = round(os.getloadavg()[0], 1)
                directory = site.directory / f"trial-{began}-{count:04d}"
                try:
                    trial = play(site, contender, plan, directory, _FIRST_PORT + 4 * count)
                except (KeyboardInterrupt, RuntimeError) as error:
                    stopped = f"stopped: {str(error) or 'Ctrl-C'}"
                    not_tried.append({"what": f"{plan.name}, {contender.name}", "why": stopped})
                    print(stopped, file=sys.stderr, flush=True)
                    continue
                figures.append(score(trial) | {"turn": turn, "load": load})
                print(_line(figures[-1]), file=sys.stderr, flush=True)
    return {
        "version": 1,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "site": _about(site) | {"note": note},
        "contenders": [
            {"name": each.name, "source": each.source, "note": each.note, "nodes": each.nodes}
            | {"version": _version(site, each.needs)}
            for each in able
        ],
        "faults": FAULTS,
        "not_tried": not_tried,
        "trials": figures,
        "summary": summary(figures),
    }


def contender_named(name: str) -> Contender:
    """Return a contender.

    Raises:
        KeyError: there is no such contender.
    """
    return {each.name: each for each in CONTENDERS}[name]


def _line(row: dict[str, Any]) -> str:
    seconds = "" if row.get("first_new_step_s") is None else f", first new step after {row['first_new_step_s']} s"
    error = f": {row['error'] or row['not_injected']}" if row["error"] or row["not_injected"] else ""
    return f"{row['plan']:32} {row['contender']:24} {row['outcome']}{error}{seconds}, {row['took_s']} s"


def _about(site: Site) -> dict[str, Any]:
    version = site.run(["sinfo", "--version"]).stdout.removeprefix("slurm").strip()
    nodes = site.run(["sinfo", "--noheader", "--Node", "--format=%N"]).stdout.split()
    return {"slurm": version, "nodes": len(set(nodes)), "cores": os.cpu_count() or 0}


def _version(site: Site, module: str) -> str:
    """Return the version of the distribution that has a module."""
    code = (
        "import importlib.metadata as m, sys; name = sys.argv[1].split('.')[0];"
        "print(', '.join(sorted({m.version(d) for d in m.packages_distributions().get(name, [])})))"
    )
    return site.run([site.python, "-c", code, module]).stdout.strip()
