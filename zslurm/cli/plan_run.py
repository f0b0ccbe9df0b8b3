"""`zslurm plan run`: goodput, cost and end date of a run, faults included."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Annotated, Any

import typer

from zslurm.aegis.core.policy.policy import most_excluded
from zslurm.checkpoint_tools.quantities import counted, show_count, show_duration
from zslurm.cli.errors import as_user_errors
from zslurm.cli.help import MORE
from zslurm.cli.options import Cluster, Json, RunFile, Set
from zslurm.cli.planned_run import planned_runs
from zslurm.cli.terminal.table import Column, print_table
from zslurm.config.layers import Override
from zslurm.config.spec import RunSpec
from zslurm.core.console import print_json, say
from zslurm.core.errors import ConfigError
from zslurm.plan.failures import KINDS, PRESETS, FailureRates, by_mean_time
from zslurm.plan.inputs import Given, Input, Inputs, inputs_of
from zslurm.plan.measured import Measured, measure
from zslurm.plan.plot import NoPlot, draw
from zslurm.plan.simulate import Scenario
from zslurm.plan.study import Prediction, Study
from zslurm.plan.young_daly import daly_wall_s
from zslurm.run.find import find
from zslurm.submit.calibrated_rates import calibrated_rates
from zslurm.submit.size import card_of, run_size
from zslurm.train.plan.rates import Rates

_SEARCHED = 24
"""Simulated runs for each interval and number of spares that is tried; what is shown at last has `--runs`."""
_MATTERS = 1e-3
"""Share of all nodes' time by which another way to replace a lost node must be better to be named in a note."""
_GPU_NODE = 8
_LONGEST_S, _MOST_NODES = 1e9, 10**6


def _seconds(text: str) -> Any:
    return typer.Option(metavar="SECONDS", min=0, max=_LONGEST_S, help=text, rich_help_panel=MORE)


def run(
    run_file: RunFile,
    cluster: Cluster = None,
    nodes: Annotated[
        list[int] | None,
        typer.Option(metavar="N", min=1, max=_MOST_NODES, help="Nodes (repeatable); default: the run's own."),
    ] = None,
    step_time: Annotated[
        list[float] | None,
        typer.Option(
            metavar="SECONDS",
            min=1e-6,
            max=_LONGEST_S,
            help="Time of a step, one for each --nodes; default: --measured, or as `zslurm plan size` expects it.",
        ),
    ] = None,
    failures: Annotated[
        str, typer.Option(metavar="PRESET", help=f"Published rates of faults: {', '.join(PRESETS)}.")
    ] = "llama3",
    node_mtbf: Annotated[
        float | None,
        typer.Option(
            metavar="HOURS",
            min=1e-3,
            max=1e9,
            help="Mean time between the faults of one node, instead of a preset.",
        ),
    ] = None,
    measured: Annotated[
        str | None,
        typer.Option(metavar="RUN", help="Take times of steps, saves and restarts from a run that has trained."),
    ] = None,
    stall: Annotated[float | None, _seconds("Time that training stands still for a save.")] = None,
    write: Annotated[float | None, _seconds("Time from then until the checkpoint is committed.")] = None,
    detect: Annotated[float | None, _seconds("Time until a fault is noticed, other than a hang.")] = None,
    restart: Annotated[float | None, _seconds("Time to start all ranks again from a checkpoint.")] = None,
    regroup: Annotated[float | None, _seconds("Time to recover in memory (aegis.recovery: memory).")] = None,
    queue_wait: Annotated[float | None, _seconds("Time that a requeued job waits.")] = None,
    cluster_nodes: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            max=_MOST_NODES,
            help="Nodes that the run can get at all; default: as many as it needs.",
            rich_help_panel=MORE,
        ),
    ] = None,
    repair: Annotated[
        float | None,
        typer.Option(
            metavar="HOURS",
            min=0,
            max=1e6,
            help="Time until a lost node is back, with --cluster-nodes.",
            rich_help_panel=MORE,
        ),
    ] = None,
    price: Annotated[
        float | None, typer.Option(metavar="PRICE", min=0, max=1e6, help="Price of a GPU for an hour.")
    ] = None,
    start: Annotated[
        datetime | None,
        typer.Option(
            metavar="DATE",
            formats=["%Y-%m-%d", "%Y-%m-%dT%H:%M"],
            help="When it starts; default: now.",
            rich_help_panel=MORE,
        ),
    ] = None,
    runs: Annotated[
        int, typer.Option(metavar="N", min=2, max=10000, help="Simulated runs.", rich_help_panel=MORE)
    ] = 100,
    seed: Annotated[
        int, typer.Option(metavar="N", min=0, max=2**31, help="Of the first simulated run.", rich_help_panel=MORE)
    ] = 0,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw the figures into a PNG, SVG or PDF file.")
    ] = None,
    overrides: Set = None,
    json: Json = False,
) -> None:
    """Predict goodput, cost and end date with faults; recommend the checkpoint interval and spares.

    Example: zslurm plan run run.yaml --nodes 16 --nodes 32 --failures llama3 --price 2.5
    """
    rates = by_mean_time(node_mtbf, _GPU_NODE) if node_mtbf is not None else _preset(failures)
    took = measure(find(measured).path) if measured is not None else None
    specs = _specs(run_file, cluster, nodes, overrides or [])
    if step_time is not None and len(step_time) != len(specs):
        raise ConfigError(f"--step-time: give one for each --nodes: {len(specs)}, not {len(step_time)}")
    repair_s = None if repair is None else repair * 3600
    plans = []
    for index, spec in enumerate(specs):
        options = Given(
            None if step_time is None else step_time[index],
            *(stall, write, restart, regroup, detect, queue_wait, repair_s),
        )
        if cluster_nodes is not None and cluster_nodes < spec.slurm.nodes + spec.slurm.spares:
            needs = spec.slurm.nodes + spec.slurm.spares
            raise ConfigError(f"--cluster-nodes {cluster_nodes}: the run needs {needs}, its spares included")
        gpus = spec.cluster.gpus_per_node or _GPU_NODE
        per_node = rates if node_mtbf is None else by_mean_time(node_mtbf, gpus)
        inputs = _inputs(spec, options, took, cluster_nodes)
        plans.append(_plan(spec, inputs, Study(per_node, gpus, seed), runs))
    begins = start or datetime.now().replace(microsecond=0)
    if plot is not None:
        try:
            draw(plot, [(plan.shown, plan.intervals, plan.spares) for plan in plans], plans[0].rates.source)
        except NoPlot as error:
            say(str(error))
    if json:
        print_json({"failures": rates.source, "plans": [_facts(plan, begins, price) for plan in plans]})
        return
    _print(plans, begins, price)


@dataclass(frozen=True)
class _Planned:
    """The plan of a run on one number of nodes."""

    spec: RunSpec
    inputs: Inputs
    rates: FailureRates
    gpus: int
    between_s: float
    shown: Prediction
    advised: Prediction
    intervals: list[Prediction]
    spares: list[Prediction]
    heals: list[Prediction]
    daly: int | None
    at_other_rates: dict[str, Prediction]


def _preset(name: str) -> FailureRates:
    if name not in PRESETS:
        raise ConfigError(f"--failures {name}: there are {', '.join(PRESETS)}; or give --node-mtbf HOURS")
    return PRESETS[name]


def _specs(
    run_file: Path, cluster: str | None, nodes: Sequence[int] | None, overrides: list[Override]
) -> list[RunSpec]:
    if nodes is None:
        return planned_runs(run_file, cluster, [overrides])
    counts = dict.fromkeys(nodes)
    return planned_runs(
        run_file, cluster, [[*overrides, Override(("slurm", "nodes"), count, "--nodes")] for count in counts]
    )


def _inputs(spec: RunSpec, given: Given, took: Measured | None, cluster_nodes: int | None) -> Inputs:
    is_known = given.step_s is not None or took is not None
    with as_user_errors():
        step_s = (0.0, "option") if is_known else _expected_step(spec)
    plan_inputs = inputs_of(spec, step_s, given, took, cluster_nodes)
    limit, starts = plan_inputs.scenario.limit_s, plan_inputs.scenario.restart_s + plan_inputs.scenario.step_s
    if limit is not None and limit <= starts:
        raise ConfigError(
            f"slurm.time: a job trains for {show_duration(max(0.0, limit))} before it saves for its time limit, "
            f"and takes {show_duration(starts)} to start and to take a step; ask for more time"
        )
    return plan_inputs


def _expected_step(spec: RunSpec) -> tuple[float, str]:
    """Return the mean time of a step by the model of `zslurm plan size`, and the origin of its rates."""
    if spec.parallel.device == "cpu" or (spec.parallel.device == "auto" and not spec.cluster.gpus_per_node):
        raise ConfigError("on CPUs no time of a step can be expected: give --step-time or --measured")
    table, origin = calibrated_rates(spec, on_cpu=False) or (None, "with assumed rates")
    size = run_size(
        spec, card_of(spec, None, table.device if table else ""), Rates(table, on_cpu=False), on_cpu=False
    )
    seconds = steps = 0.0
    for phase in size.phases:
        assert phase.time is not None
        count = sum(segment.steps for segment in phase.phase.segments)
        seconds, steps = seconds + count * phase.time.seconds, steps + count
    return seconds / steps, f"as `zslurm plan size` expects it, {origin}"


def _plan(spec: RunSpec, found: Inputs, study: Study, runs: int) -> _Planned:
    scenario = found.scenario
    every, intervals = study.best_interval(scenario, _SEARCHED)
    best = replace(scenario, every=every)
    spares, tried = study.best_spares(best, _SEARCHED)
    advised, heals = replace(best, spares=spares), list[Prediction]()
    if scenario.regroup_s is not None:
        with_spares = spares or scenario.spares or 1
        heals = study.by_heal(best, with_spares, helpers=not spec.why_no_helper, runs=runs)
    return _Planned(
        spec,
        found,
        study.rates,
        study.gpus_per_node,
        study.between_faults_s(scenario.nodes),
        study.predict(scenario, runs),
        study.predict(advised, runs),
        intervals,
        tried,
        heals,
        study.daly_interval(scenario),
        _at_other_rates(advised, study),
    )


def _at_other_rates(scenario: Scenario, study: Study) -> dict[str, Prediction]:
    """Return the run at the other published rates, by name; none if it is planned without faults."""
    if not study.rates.total:
        return {}
    others = {name: rates for name, rates in PRESETS.items() if rates.total and rates != study.rates}
    return {name: replace(study, rates=rates).predict(scenario, _SEARCHED) for name, rates in others.items()}


def _print(plans: list[_Planned], begins: datetime, price: float | None) -> None:
    columns: list[str | Column] = ["nodes", "spares", "save every", "goodput"]
    columns += [Column("of single runs", drop=2), "ends", Column("GPU-hours", drop=1)]
    rows = []
    for plan in plans:
        for name, prediction in (("", plan.shown), (" advised", plan.advised)):
            scenario, goodput = prediction.scenario, prediction.goodput
            rows.append(
                [
                    f"{scenario.nodes}{name}",
                    str(scenario.spares),
                    counted(scenario.every, "step"),
                    f"{100 * goodput.mean:.1f} % ± {100 * goodput.error:.1f}",
                    f"{100 * goodput.low:.1f} to {100 * goodput.high:.1f} %",
                    "-"
                    if prediction.unfinished
                    else f"{begins + timedelta(seconds=prediction.wall_s.mean):%Y-%m-%d %H:%M}",
                    show_count(prediction.node_hours.mean * plan.gpus),
                    *([show_count(prediction.node_hours.mean * plan.gpus * price)] if price is not None else []),
                ]
            )
    print_table([*columns, *(["cost"] if price is not None else [])], rows)
    for plan in plans:
        _print_one(plan, several=len(plans) > 1)


def _print_one(plan: _Planned, *, several: bool) -> None:
    shown, advised, scenario = plan.shown, plan.advised, plan.inputs.scenario
    head = f"{counted(scenario.nodes, 'node')}: " if several else ""
    if not several:
        print_table(["where the time goes", "share", "advised"], _part_rows(shown, advised))
        print_table(
            ["steps between saves", "goodput", "±"],
            [_tried(prediction, prediction.scenario.every) for prediction in plan.intervals],
        )
        columns = ["spares", "goodput", "±", "of all nodes' time"]
        print_table(
            columns,
            [[*_tried(prediction, prediction.scenario.spares), _held(prediction)] for prediction in plan.spares],
        )
        if plan.heals:
            print_table(
                ["a lost node is replaced by", "aegis.heal", *columns[1:]],
                [
                    [_way(way), way.scenario.aegis.heal, *_tried(way, way.scenario.spares)[1:], _held(way)]
                    for way in plan.heals
                ],
            )
        print_table(
            ["input", "value", "from"],
            [[prediction.name, _value(prediction), prediction.origin] for prediction in plan.inputs.rows],
        )
    between = "never" if math.isinf(plan.between_s) else f"every {show_duration(plan.between_s)}"
    say(f"{head}faults come {between} on average, {shown.faults:.4g} in a run: {plan.rates.source}")
    say(
        f"{head}advised: checkpoint.every_steps {advised.scenario.every} "
        f"({show_duration(advised.scenario.every * scenario.step_s)}) and slurm.spares {advised.scenario.spares}: "
        f"{_held(advised)} of all nodes' time, spares and waits included, becomes kept steps; as configured "
        f"{_held(shown)}"
    )
    if plan.at_other_rates:
        others = ", ".join(
            f"{100 * other.goodput.mean:.1f} % at {name}" for name, other in plan.at_other_rates.items()
        )
        say(f"{head}published rates differ a hundredfold: as advised, goodput {others} (--failures)")
    for note in _notes(plan):
        say(f"note: {head}{note}")


def _way(way: Prediction) -> str:
    """Return what replaces a lost node."""
    if way.scenario.spares:
        return f"{counted(way.scenario.spares, 'spare')}, then a requeue"
    return {"helper": "a helper job", "shrink": "nothing: fewer nodes"}.get(way.scenario.aegis.heal, "a requeue")


def _part_rows(shown: Prediction, advised: Prediction) -> list[list[str]]:
    return [
        [name, f"{100 * share:.2f} %", f"{100 * advised.parts[name]:.2f} %"]
        for name, share in shown.parts.items()
        if share > 5e-5 or advised.parts[name] > 5e-5
    ]


def _tried(each: Prediction, value: int) -> list[str]:
    return [str(value), f"{100 * each.goodput.mean:.2f} %", f"{100 * each.goodput.error:.2f}"]


def _held(each: Prediction) -> str:
    return f"{100 * each.of_held_nodes:.2f} %"


def _value(each: Input) -> str:
    if each.text:
        return each.text
    return f"{each.value:.3g} s" if each.value < 60 else show_duration(each.value)


def _notes(plan: _Planned) -> list[str]:
    """Return what a reader of the figures must know."""
    shown, scenario = plan.shown, plan.inputs.scenario
    notes = []
    assumed = [row.name for row in plan.inputs.rows if row.origin == "assumed"]
    if assumed:
        remedy = (
            "the measured run has not shown them"
            if any(row.origin == "measured" for row in plan.inputs.rows)
            else "--measured RUN takes what a run of yours has shown from it"
        )
        notes.append(f"assumed, not measured: {', '.join(assumed)}; {remedy}")
    best = max(plan.heals, key=lambda way: way.of_held_nodes, default=plan.advised)
    if best.of_held_nodes > plan.advised.of_held_nodes + _MATTERS:
        notes.append(
            f"aegis.heal {best.scenario.aegis.heal} with slurm.spares {best.scenario.spares} is better than what "
            f"is advised: {_held(best)} of all nodes' time becomes kept steps, instead of {_held(plan.advised)}"
        )
    aegis = plan.spec.aegis
    excluded = plan.rates.per_gpu_hour[0] * plan.gpus * scenario.nodes * aegis.exclude_for_s / 3600
    most = most_excluded(aegis, scenario.nodes)
    if excluded > most:
        notes.append(
            f"about {counted(round(excluded), 'node')} will be excluded at a time: above {most} "
            "(aegis.max_excluded) Aegis stops the run at the next node that has to be excluded and lives"
        )
    if scenario.period > scenario.every:
        notes.append(
            f"writing a checkpoint takes {show_duration(scenario.write_s)}: saves every "
            f"{counted(scenario.every, 'step')} wait for it and are {counted(scenario.period, 'step')} apart"
        )
    if plan.daly is not None:
        steps, work = plan.advised.scenario.every, scenario.ideal_s
        daly_s = daly_wall_s(
            work, plan.daly * scenario.step_s, scenario.stall_s, scenario.restart_s, plan.between_s
        )
        interval = "the same interval" if plan.daly == steps else f"an interval of {plan.daly} instead of {steps}"
        notes.append(
            f"Daly's formula, which knows neither the time of writing nor the queue: {interval}, "
            f"goodput {100 * work / daly_s:.1f} %"
        )
    stopped = len(shown.stopped) / shown.runs
    if shown.stopped:
        ((reason, _),) = Counter(shown.stopped).most_common(1)
        notes.append(
            f"{100 * stopped:.0f} % of the simulated runs stop before their last step, most of them for: {reason}"
        )
    if shown.unfinished > stopped:
        share = 100 * (shown.unfinished - stopped)
        notes.append(f"{share:.0f} % of the simulated runs never end: faults come faster than progress")
    return notes


def _facts(plan: _Planned, begins: datetime, price: float | None) -> dict[str, Any]:
    hours = math.inf if math.isinf(plan.between_s) else plan.between_s / 3600
    return {
        "nodes": plan.shown.scenario.nodes,
        "gpus_per_node": plan.gpus,
        "hours_between_faults": None if math.isinf(hours) else hours,
        "failures_per_gpu_hour": dict(zip(KINDS, plan.rates.per_gpu_hour, strict=True)),
        "inputs": {row.name: {"value": row.value, "from": row.origin} for row in plan.inputs.rows},
        "run": _prediction(plan.shown, plan.gpus, begins, price),
        "advised": _prediction(plan.advised, plan.gpus, begins, price),
        "daly_every_steps": plan.daly,
        "intervals": [_short(row) for row in plan.intervals],
        "spares": [_short(row) for row in plan.spares],
        "heals": [{"heal": row.scenario.aegis.heal, **_short(row)} for row in plan.heals],
        "goodput_at_other_rates": {name: other.goodput.mean for name, other in plan.at_other_rates.items()},
        "notes": _notes(plan),
    }


def _prediction(each: Prediction, gpus: int, begins: datetime, price: float | None) -> dict[str, Any]:
    hours = each.node_hours.mean * gpus
    return {
        "every_steps": each.scenario.every,
        "spares": each.scenario.spares,
        "simulated_runs": each.runs,
        "goodput": asdict(each.goodput),
        "wall_s": asdict(each.wall_s),
        "ends": None if each.unfinished else (begins + timedelta(seconds=each.wall_s.mean)).isoformat(),
        "gpu_hours": hours,
        "cost": None if price is None else hours * price,
        "parts": each.parts,
        "faults": each.faults,
        "actions": each.actions,
        "unfinished": each.unfinished,
    }


def _short(each: Prediction) -> dict[str, Any]:
    scenario = each.scenario
    return {
        "every_steps": scenario.every,
        "spares": scenario.spares,
        "goodput": asdict(each.goodput),
        "of_held_nodes": each.of_held_nodes,
    }
