"""Write the tables of the documents that come from the program: `python docs/tables.py`, or `make docs`.

A document has a pair of comments where a table belongs, and this script writes everything between them:

    <!-- table: aegis-settings -->
    ...
    <!-- end of table -->

With `--check` nothing is written: it names every table that differs from what the program gives, and exits with 1.
`make lint` runs that, so it holds in CI as well.
"""

from __future__ import annotations

import ast
import importlib
import json
import re
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator
from importlib import resources
from pathlib import Path
from types import ModuleType
from typing import Any

from pydantic import BaseModel

from zslurm.aegis.fault_kinds import FAULT_KINDS, FaultKind, fault_kind
from zslurm.aegis.policy.policy import MOST_REFUSALS
from zslurm.checkpoint_tools.format.partition import partition
from zslurm.checkpoint_tools.quantities import show_bytes
from zslurm.cluster.rccl.rules import When, rules
from zslurm.config import yaml12
from zslurm.config.aegis import AegisSection
from zslurm.config.load import recipes
from zslurm.config.spec import RunSpec
from zslurm.submit.phase_plan import Communication, PhasePlan, phase_plans
from zslurm.submit.size import card_of, run_size
from zslurm.train.config import ModelConfig, OptimConfig, TrainConfig
from zslurm.train.context.bytes import context_bytes
from zslurm.train.plan.communication import Group, step_traffic
from zslurm.train.plan.memory import LEFT_FREE, plan_memory
from zslurm.train.plan.rates import Rates
from zslurm.train.shapes import owned_table, parameter_counts

ROOT = Path(__file__).parents[1]
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
_TABLE = re.compile(
    r"(?P<begin><!-- table: (?P<name>[\w-]+) -->\n)(?P<text>.*?)(?P<end><!-- end of table -->)", re.S
)


def table(head: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """Return a Markdown table."""
    head = list(head)
    rule = f"|{'---|' * len(head)}"
    lines = [" | ".join(str(cell).replace("|", "\\|") for cell in row) for row in (head, *rows)]
    first, *others = (f"| {line} |" for line in lines)
    return "\n".join([first, rule, *others, ""])


# --- Aegis -----------------------------------------------------------------------------------------------------


def aegis_settings() -> str:
    """Return every setting below `aegis`, with its default."""
    return table(("setting", "default", "what"), _settings(AegisSection()))


def _settings(section: BaseModel, prefix: str = "") -> Iterator[tuple[str, str, str | None]]:
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, BaseModel):
            yield from _settings(value, f"{prefix}{name}.")
        else:
            yield f"`{prefix}{name}`", _default(value), field.description


def _default(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, tuple):
        return ", ".join(f"`{item}`" for item in value)
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f"`{value:g}`" if isinstance(value, float) and value < 1e6 else f"`{value}`"


_WHILE_RUNNING = {"give up": "ends it", "tolerate": "ends it if it lasts", "record": "continues"}
_EXCLUDES = {1: "at once", 2: "the 2nd time", 3: "the 3rd time", None: "never"}
_THEN = {
    "retry": "start again",
    "wait": "wait, then start again",
    "ask again": f"wait, try up to {MOST_REFUSALS} times, then stop",
    "test": "start again; test the GPU",
    "stop": "stop",
    "gpu_oom": "`aegis.gpu_oom`",
    "requeue": "requeue",
    "time limit": "requeue",
    "slurm": "leave it to Slurm",
}


def responses() -> str:
    """Return how each kind of fault is answered."""
    head = ("fault", "meaning", "while it runs", "excludes its node", "afterwards")
    return table(head, (_response(kind) for kind in FAULT_KINDS.values() if not kind.advisory))


def _response(kind: FaultKind) -> tuple[str, ...]:
    excludes = _EXCLUDES[kind.exclude_after]
    if kind.lasting:
        excludes += ", or if it lasts"
    if kind.must_leave:
        excludes += ", or stops"
    return f"`{kind}`", kind.message, _WHILE_RUNNING[kind.while_running], excludes, _THEN[kind.then]


def advisory_kinds() -> str:
    """Return the kinds of fault that are never a root cause."""
    advisory = [kind for kind in FAULT_KINDS.values() if kind.advisory]
    advisory = [kind for kind in FAULT_KINDS.values() if kind.advisory]
    return table(("kind", "meaning"), ((f"`{kind}`", kind.message) for kind in advisory))


_SCOPES = {
    "gpu": "a GPU",
    "nic": "a NIC",
    "node": "a node",
    "fabric": "the network",
    "storage": "storage",
    "scheduler": "Slurm",
    "user": "the program or its settings",
    "unknown": "unknown, or nothing",
}


def log_classes() -> str:
    """Return the classes of log lines, by what is broken and the role."""
    text = resources.files("zslurm.aegis.logs").joinpath("signatures.yaml").read_text(encoding="utf-8")
    found: dict[tuple[str, str], list[str]] = {}
    for kind in map(fault_kind, yaml12.parse(text, "signatures.yaml").data["kinds"]):
        found.setdefault((kind.scope, kind.role), []).append(f"`{kind}`")
    order = list(_SCOPES)
    rows = sorted(found.items(), key=lambda row: order.index(row[0][0]))
    return table(
        ("what is broken", "role", "classes"),
        ((_SCOPES[scope], role, ", ".join(kinds)) for (scope, role), kinds in rows),
    )


# --- clusters --------------------------------------------------------------------------------------------------


def conditions(when: When) -> str:
    """Return the conditions of a rule in words."""
    words = ["nodes with GPUs" if when.gpus else "nodes without GPUs"] if when.gpus is not None else []
    words += [{"amd": "AMD GPUs", "nvidia": "NVIDIA GPUs"}[when.vendor]] if when.vendor else []
    words += [", ".join(when.network)] if when.network else []
    words += ["rails only" if when.rails_only else "rails joined"] if when.rails_only is not None else []
    words += [f"RCCL {when.rccl}"] if when.rccl else []
    words += [f"transport {when.transport}"] if when.transport else []
    words += ["with peermem" if when.peermem else "without peermem"] if when.peermem is not None else []
    return "; ".join(words) or "always"


def rccl_rules() -> str:
    """Return the rules for the variables of RCCL and NCCL."""
    return table(
        ("variable", "value", "where", "why", "source"),
        (
            (f"`{rule.variable}`", f"`{rule.value}`", conditions(rule.when), rule.reason, rule.source)
            for rule in rules().rules
        ),
    )


# --- training --------------------------------------------------------------------------------------------------


def recipe_sizes() -> str:
    """Return the sizes of the shipped recipes, smallest first."""
    head = ("recipe", "query heads", "layers", "hidden", "parameters", "without the embedding", "active")
    models = {
        name: ModelConfig.model_validate(yaml12.parse(text, name).data["model"])
        for name, text in recipes().items()
    }
    rows = []
    for name, model in sorted(models.items(), key=lambda recipe: parameter_counts(recipe[1]).total):
        counts = parameter_counts(model)
        sizes = (counts.total, counts.without_embedding, counts.active)
        rows.append(
            (f"`{name}`", model.query_heads, model.layers, model.hidden_size, *(f"{size:,}" for size in sizes))
        )
    return table(head, rows)


def packing() -> str:
    """Return how evenly ZAYA1-base's matrices are packed onto ranks."""
    owned = owned_table(ModelConfig(), OptimConfig())
    rows = []
    for ranks in (8, 64, 768, 1024):
        balance = partition(owned, ranks).balance()
        shares = (
            balance.cost / balance.cost_mean,
            balance.cost_bound / balance.cost_mean,
            balance.elements / balance.elements_mean,
            balance.elements_bound / balance.elements_mean,
        )
        rows.append((f"{ranks:,}", *(f"{share:.3f}" for share in shares)))
    head = (
        "ranks",
        "fullest rank by cost, over the mean",
        "no packing of whole matrices is below",
        "by elements",
        "no packing is below",
    )
    return table(head, rows)


def memory_plan() -> str:
    """Return what ZAYA1-base takes on each GPU at 4,096 tokens a microbatch, by the number of ranks."""
    config = TrainConfig.model_validate(
        {
            "model": {},
            "phases": [{"tokens": 10**9, "context": 4096, "global_batch": 4096, "micro_batch": 1, "lr": 1e-3}],
            "parallel": {"dtype": "bf16"},
        }
    )
    rows = []
    for ranks in (8, 64, 768, 1024, 2048):
        plan = plan_memory(config, ranks, on_cpu=False)
        owned = sum(plan.resident[name] for name in ("master weights", "reduced gradients", "optimizer state"))
        shown = (show_bytes(size) for size in (plan.peak, plan.microbatch.peak, owned))
        rows.append((f"{ranks:,}", *shown, plan.balance.idle_ranks, f"{100 * plan.idle_share:.1f} %"))
    head = (
        "ranks",
        "peak",
        "of it, activations",
        "a rank owns",
        "ranks without a matrix",
        "idle in Newton-Schulz",
    )
    return table(head, rows)


_CARDS_GB = (80, 139, 192)
"""Memory of an H100, an H200 and an MI300X as their drivers count it, in GiB."""


def one_card() -> str:
    """Return the largest microbatch of each recipe, in tokens, that fits on one card of each size."""
    head = ("recipe", *(f"{size} GiB{how}" for size in _CARDS_GB for how in ("", ", recompute")))
    rows = []
    for name in recipes():
        body = yaml12.parse(recipes()[name], name).data
        found = [
            _largest(body, size * 2**30 * (1 - LEFT_FREE), recompute=recompute)
            for size in _CARDS_GB
            for recompute in (False, True)
        ]
        rows.append((f"`{name}`", *found))
    return table(head, rows)


def _largest(body: dict[str, Any], room: float, *, recompute: bool) -> str:
    """Return how many sequences of 4,096 tokens of a recipe's model fit at once, and their tokens."""
    best = 0
    for sequences in (1, 2, 4, 8, 16, 32, 64):
        phase = {"tokens": 10**9, "context": 4096, "global_batch": 64, "micro_batch": sequences, "lr": 1e-3}
        sections = {key: body[key] for key in ("model", "optim") if key in body}
        parallel = {"dtype": "bf16", "recompute": recompute}
        config = TrainConfig.model_validate({**sections, "phases": [phase], "parallel": parallel})
        if plan_memory(config, 1, on_cpu=False).peak > room:
            break
        best = sequences
    return f"{best}{' or more' if best == 64 else ''} x 4,096" if best else "-"


def _flagship(nodes: int, **phase: Any) -> RunSpec:
    """Return the published model on nodes of eight MI300X; `phase` changes its last phase."""
    body = yaml12.parse(recipes()["zaya1-8b"], "zaya1-8b").data
    phases = [*body["phases"][:-1], body["phases"][-1] | phase]
    sections = {
        "phases": phases,
        "parallel": body["parallel"] | {"collectives": "two_level"},
        "cluster": {"gpus_per_node": 8, "gpu_type": "mi300x"},
        "slurm": {"nodes": nodes},
    }
    return RunSpec.model_validate(body | sections)


def _phases_of(spec: RunSpec) -> tuple[Communication, list[PhasePlan]]:
    sent = Communication.of(spec)
    memory = plan_memory(spec, spec.world_size, on_cpu=False, local=spec.ranks_per_node)
    return sent, phase_plans(spec, memory, sent.traffic, on_cpu=False)


def size_products() -> str:
    """Return the forward products of zaya1-8b's first phase."""
    spec = _flagship(128)
    first = run_size(spec, card_of(spec, None, ""), Rates(None, on_cpu=False), on_cpu=False).phases[0]
    rows = [
        (
            f"`{product.name}`",
            *(f"{size:,}" for size in (product.m, product.n, product.k, product.batch, product.calls)),
            f"{product.flops / 1e9:,.3g}",
            f"{100 * product.total_flops / first.all_flops:.1f} %",
        )
        for product in first.products
        if product.pass_name == "forward"
    ]
    return table(("product", "M", "N", "K", "batch", "calls", "GFLOP", "of the FLOPs"), rows)


def size_steps() -> str:
    """Return where the time of zaya1-8b's steps goes, as assumed."""
    rows = []
    for nodes in (16, 128):
        spec = _flagship(nodes)
        for size in run_size(spec, card_of(spec, None, ""), Rates(None, on_cpu=False), on_cpu=False).phases[::2]:
            time = size.time
            assert time is not None
            assert size.mfu is not None
            parts = (time.products, time.attention, time.communication, time.rest)
            shares = (f"{100 * part / time.seconds:.0f} %" for part in parts)
            mfu = f"{100 * size.mfu:.0f} %"
            rows.append((nodes, f"`{size.phase.name}`", f"{time.seconds:.2f} s", mfu, *shares))
    head = ("nodes", "phase", "step", "MFU", "products", "attention", "exposed communication", "rest")
    return table(head, rows)


def flagship_communication() -> str:
    """Return what zaya1-8b waits for communication, by the model of the network."""
    rows = []
    for nodes in (16, 64, 128):
        sent, phases = _phases_of(_flagship(nodes))
        total = sent.traffic.total
        for plan in (phases[0], phases[-1]):
            assert plan.compute_s is not None
            assert plan.exposed_s is not None
            assert plan.exposed_share is not None
            rows.append(
                (
                    nodes,
                    f"`{plan.phase.name}`",
                    f"{sent.traffic.buckets} of {show_bytes(sent.traffic.bucket_bytes)}",
                    f"{total.seconds:.2f} s",
                    f"{100 * total.latency_s / total.seconds:.1f} %",
                    f"{plan.context.seconds:.3f} s",
                    f"{plan.compute_s:.2f} s",
                    f"{plan.exposed_s:.3f} s",
                    f"{100 * plan.exposed_share:.1f} %",
                )
            )
    head = (
        "nodes",
        "phase",
        "buckets",
        "ZeRO-1's communication",
        "of it, latency",
        "context groups",
        "computation",
        "exposed",
        "of the step",
    )
    return table(head, rows)


def two_levels() -> str:
    """Return what a rank of 1,024 sends in a step of zaya1-8b, in two levels and flat."""
    spec = _flagship(128)
    sent, phases = _phases_of(spec)
    forward_s = (phases[0].compute_s or 0.0) / 3
    # As it was: flat, in buckets of 64 MiB.
    small = spec.model_copy(update={"parallel": spec.parallel.model_copy(update={"bucket_mb": 64.0})})
    before = step_traffic(small, Group(128, 8, two_level=False))
    rows = []
    for name, traffic in (("two levels", sent.traffic), ("flat", sent.flat), ("flat, buckets of 64 MiB", before)):
        total = traffic.total
        levels = (show_bytes(size) if size else "0" for size in (total.inside, total.rail, total.off_rail))
        latency = f"{100 * total.latency_s / total.seconds:.0f} %"
        exposed = f"{traffic.exposed_s(forward_s, 2 * forward_s):.2f} s"
        messages = f"{traffic.exchange.messages:,}"
        rows.append((name, *levels, messages, traffic.buckets, f"{total.seconds:.2f} s", latency, exposed))
    head = (
        "collectives",
        "inside the node",
        "along the rail",
        "off the rail",
        "messages of the exchange, at most",
        "buckets",
    )
    return table((*head, "predicted time", "of it, latency", "exposed in `pretrain-1`"), rows)


def context_groups() -> str:
    """Return memory and bytes of zaya1-8b's sequences of 32k on 128 nodes, by the ranks that share each."""
    rows = []
    for size in (1, 2, 4, 8):
        spec = _flagship(128, context_parallel=size)
        phase = _phases_of(spec)[1][-1]
        sent = context_bytes(spec.model, 32768, 1, size, "all_gather", 2)
        fewer = -(-phase.phase.global_batch // (127 * 8 // size))
        fits = phase.data_parallel <= phase.phase.global_batch
        step = (
            (
                f"{phase.data_parallel} x {phase.sequences}",
                f"{fewer / phase.sequences:g} times",
                f"{phase.context.seconds:.3f} s",
            )
            if fits
            else ("refused: 512 sequences for 1,024 ranks", "-", "-")
        )
        moved = (sent.attention_forward, sent.compression * sent.attention_forward, sent.halos_forward)
        rows.append((size, show_bytes(phase.activation_bytes), *map(show_bytes, moved), *step))
    head = ("ranks", "a microbatch", "keys and values", "multi-head attention's", "halos")
    return table((*head, "data-parallel ranks x sequences", "step with a node less", "time in a step"), rows)


def code_objects() -> str:
    """Return what the compilers make of each kernel for gfx942: benchmarks/results/code_objects.json."""
    figures = json.loads((ROOT / "benchmarks" / "results" / "code_objects.json").read_text(encoding="utf-8"))
    rows = [
        (
            f"`{folder}`",
            f"`{row['kernel']}`",
            row["operands"] or "-",
            *(row[key] for key in ("waves", "registers")),
            f"{row['lds_bytes']:,}",
            *(row[key] for key in ("occupancy", "spills", "wide_accesses", "matrix_instructions")),
        )
        for language in ("triton", "hip")
        for folder, kernels in figures[language].items()
        for row in kernels
    ]
    head = (
        "source",
        "kernel",
        "operands",
        "waves",
        "registers",
        "LDS, bytes",
        "occupancy",
        "spills",
        "16 bytes",
        "MFMA",
    )
    return table(head, rows)


# --- results of `make gpu` -------------------------------------------------------------------------------------

GPU_RESULTS = ROOT / "benchmarks" / "results"
_NOT_YET = "not yet measured"


def _gpus() -> dict[str, dict[str, Any]]:
    """Return the result of each card, by its name."""
    files = sorted(GPU_RESULTS.glob("gpu-*.json"))
    bodies = [json.loads(file.read_text(encoding="utf-8")) for file in files if "rehearsal" not in file.name]
    return {body["card"]: body for body in bodies}


def _summary() -> ModuleType:
    """Return the module that reads results; this script runs without the checkout in its path."""
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    return importlib.import_module("benchmarks.gpu.summary")


def gpu_figures() -> str:
    """Return the figures that `make gpu` is for, with a column for each card that was measured."""
    cards, aims = _gpus(), _summary().AIMS
    rows = (
        (each.what, each.peer, each.aim or "-", *_of_cards(cards, lambda body, each=each: each.found(body)))
        for each in aims
    )
    return table(("figure", "peer", "aim", *(cards or ("measured",))), rows)


def gpu_parts() -> str:
    """Return the share of each part in a training step of zaya1-1b, with a column for each card."""
    cards, shares = _gpus(), _summary().shares
    parts = dict.fromkeys(part for body in cards.values() for part in shares(body)) or _PARTS

    def share(body: dict[str, Any], part: str) -> str | None:
        return f"{shares(body)[part]['share']:.1%}" if part in shares(body) else None

    rows = ((part, *_of_cards(cards, lambda body, part=part: share(body, part))) for part in parts)
    return table(("part of a step", *(cards or ("share",))), rows)


_PARTS = (
    *("attention", "convolutions", "router", "experts", "head", "norms", "embedding", "optimizer"),
    *("communication", "sums of gradients", "other", "host gaps"),
)


def gpu_memory() -> str:
    """Return the peak memory of a step of each recipe beside the plan's, for each card."""
    rows = [(card, *row) for card, body in _gpus().items() for row in _summary().memory_rows(body)]
    head = ("card", "recipe", "microbatch", "planned", "measured", "measured / planned")
    return table(head, rows or [(_NOT_YET, *["-"] * 5)])


def gpu_checks() -> str:
    """Return what came of the builds, checks and tests on each card."""
    cards, statuses = _gpus(), _summary().statuses
    rows = (
        (
            card,
            *(body[key] or "-" for key in ("date", "driver")),
            *(statuses(body).get(part, "-") for part in _CHECKS),
        )
        for card, body in cards.items()
    )
    head = ("card", "date", "driver", "kernels built", "results beside the references", "tests marked `gpu`")
    return table(head, rows if cards else [(_NOT_YET, *["-"] * 5)])


_CHECKS = ("build", "check", "tests")


def _of_cards(cards: dict[str, dict[str, Any]], found: Callable[[dict[str, Any]], str | None]) -> Iterator[str]:
    """Yield a cell for each card, or the one that nothing was measured."""
    if not cards:
        yield _NOT_YET
    for body in cards.values():
        yield found(body) or "-"


# --- the source ------------------------------------------------------------------------------------------------


def contracts() -> dict[str, list[list[str]]]:
    """Return the floors of each package, top floor first, as the import contracts in pyproject.toml have them."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
    return {
        contract["containers"][0]: [[name.strip() for name in floor.split("|")] for floor in contract["layers"]]
        for contract in settings["contracts"]
        if contract["type"] == "layers"
    }


def about(module: str) -> str:
    """Return the first sentence of the docstring of a module or package."""
    place = ROOT / module.replace(".", "/")
    file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
    docstring = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    return re.split(r"\.(?:\s|$)", docstring.partition("\n\n")[0].replace("\n", " "))[0]


def drawing() -> str:
    """Return the drawing of the floors, for GitHub's Mermaid: one box for each floor."""
    lines = ["```mermaid", "flowchart TB"]
    for package, floors in contracts().items():
        boxes = [", ".join(name for name in floor if name != "__main__") for floor in floors]
        names = {f"{package.replace('.', '_')}_{number}": box for number, box in enumerate(boxes) if box}
        lines.append(f'  subgraph {package.replace(".", "_")}["{package}"]')
        lines += [f'    {name}["{box}"]' for name, box in names.items()]
        lines += [f"    {' --> '.join(names)}", "  end"]
    return "\n".join([*lines, "```", ""])


def rooms() -> str:
    """Return every room, top floor first."""
    rows = [
        (f"`{package}.{name}`", about(f"{package}.{name}"))
        for package, floors in contracts().items()
        for floor in floors
        for name in floor
        if name != "__main__"
    ]
    return table(("room", "what is in it"), rows)


def source_figures() -> str:
    """Return the figures of benchmarks/results/source_figures.json."""
    text = (ROOT / "benchmarks" / "results" / "source_figures.json").read_text(encoding="utf-8")
    figures = json.loads(text)
    before, after = figures["before"], figures["after"]
    head = ("figure", f"before ({before['commit']})", "after")
    return table(
        head, ((name.replace("_", " "), _shown(before, name), _shown(after, name)) for name in after["figures"])
    )


def _shown(side: dict[str, dict[str, float]], name: str) -> str:
    value = side["figures"].get(name)
    return "-" if value is None else f"{value:,}"


_READ_BEFORE = {
    "a submission": 37,
    "a tensor to a checkpoint and back": 17,
    "a fault from a log line to an action": 28,
}
"""Files of each walk before the move, as a reader counted them; of a checkpoint only those that save."""


def walk_figures() -> str:
    """Return the files of each walk, before and after the move."""
    results = ROOT / "benchmarks" / "results" / "source_figures.json"
    walks = json.loads(results.read_text(encoding="utf-8"))["walks"]
    head = ("walk", "before", "now")
    return table(head, ((name, _READ_BEFORE.get(name, "-"), files) for name, files in walks.items()))


TABLES: dict[str, Callable[[], str]] = {
    function.__name__.replace("_", "-"): function
    for function in (
        aegis_settings,
        responses,
        advisory_kinds,
        log_classes,
        rccl_rules,
        recipe_sizes,
        packing,
        memory_plan,
        one_card,
        context_groups,
        flagship_communication,
        two_levels,
        size_products,
        size_steps,
        code_objects,
        gpu_figures,
        gpu_parts,
        gpu_memory,
        gpu_checks,
        drawing,
        rooms,
        source_figures,
        walk_figures,
    )
}
"""By the name in the documents."""


def rewritten(text: str) -> str:
    """Return a document with its tables as the program gives them.

    Raises:
        SystemExit: the document names a table that does not exist.
    """

    def write(found: re.Match[str]) -> str:
        name = found["name"]
        if name not in TABLES:
            raise SystemExit(f"there is no table called {name}; there are: {', '.join(TABLES)}")
        return found["begin"] + TABLES[name]() + found["end"]

    return _TABLE.sub(write, text)


def outdated() -> dict[Path, str]:
    """Return the documents that `main` would change, with their new text."""
    texts = {path: path.read_text(encoding="utf-8") for path in DOCUMENTS}
    return {path: new for path, text in texts.items() if (new := rewritten(text)) != text}


def main(arguments: list[str]) -> int:
    """Write the tables, or with `--check` name the documents whose tables are outdated; return the exit code."""
    changes = outdated()
    for path, text in changes.items():
        if arguments == ["--check"]:
            print(
                f"{path.relative_to(ROOT)}: a table is not what the program gives; run `make docs`",
                file=sys.stderr,
            )
        else:
            path.write_text(text, encoding="utf-8")
            print(f"wrote {path.relative_to(ROOT)}")
    return 1 if changes and arguments == ["--check"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
