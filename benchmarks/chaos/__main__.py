"""`slurm-chaos run`: play faults and write a table; `slurm-chaos page`: a page of a table; `slurm-chaos list`."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from .contenders import CONTENDERS
from .plans import FAULTS, named, pairs
from .report import BadTable, page, read
from .site import BadSite, Site
from .table import contender_named, measure


def main(arguments: list[str] | None = None) -> int:
    """Run a command; returns its exit code: 0, or 2 if what was asked for cannot be done."""
    text = "Compare ways to run a training program on Slurm under the same faults."
    parser = argparse.ArgumentParser(prog="slurm-chaos", description=text)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="play faults and write a table")
    run.add_argument("site", type=Path, help="JSON file that describes the cluster, see the README")
    run.add_argument("--plan", action="append", default=[], help="a plan (repeat it; default: each fault, once)")
    run.add_argument("--contender", action="append", default=[], help="a contender (repeat it; default: all)")
    run.add_argument("--turns", type=int, default=1, help="how often each plan is played (default: 1)")
    run.add_argument("--minutes", type=float, default=120.0, help="start no trial after that (default: 120)")
    run.add_argument("--note", default="", help="a sentence about the machines, for the page")
    run.add_argument("--out", type=Path, default=Path("chaos.json"), help="the table (default: chaos.json)")
    show = commands.add_parser("page", help="write the page of a table")
    show.add_argument("table", type=Path, help="the JSON file that `run` wrote")
    show.add_argument("--out", type=Path, default=Path("chaos.html"), help="the page (default: chaos.html)")
    commands.add_parser("list", help="show the plans and the contenders")
    asked = parser.parse_args(arguments)
    try:
        match asked.command:
            case "list":
                _list()
            case "page":
                asked.out.write_text(page(read(asked.table)))
            case _:
                return _run(asked)
    except (BadSite, BadTable, OSError, RuntimeError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def _run(asked: argparse.Namespace) -> int:
    contenders = [each.name for each in CONTENDERS]
    if unknown := [name for name in asked.contender if name not in contenders]:
        print(f"no contender is called {', '.join(unknown)}; there are {', '.join(contenders)}", file=sys.stderr)
        return 2
    plans = []
    for name in asked.plan or FAULTS:
        try:
            plans.append(named(name))
        except KeyError:
            print(f"no plan is called {name}; `slurm-chaos list` shows them", file=sys.stderr)
            return 2
    if asked.turns < 1 or not asked.out.parent.is_dir():  # before hours of trials
        print("--turns is at least 1, and --out is in a directory that exists", file=sys.stderr)
        return 2
    chosen = [contender_named(name) for name in asked.contender or contenders]
    table = measure(Site.read(asked.site), chosen, plans, asked.turns, asked.minutes, asked.note)
    asked.out.write_text(json.dumps(table, indent=1) + "\n")
    print(f"{asked.out}: {len(table['trials'])} trials; `slurm-chaos page {asked.out}` draws them")
    return 0


def _list() -> None:
    for name, text in FAULTS.items():
        print(f"{name:32} {text}")
    for plan in pairs():
        print(f"{plan.name:32} one after the other")
    print(f"{'random-SEED':32} at published rates, about one in each 60 steps")
    for contender in CONTENDERS:
        print(f"{contender.name:32} {contender.source}")


if __name__ == "__main__":
    sys.exit(main())
