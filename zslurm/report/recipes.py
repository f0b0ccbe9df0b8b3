"""The shipped recipes: what a run file can extend."""

from __future__ import annotations

import difflib
import sys
from pathlib import Path
from typing import Any

from checkpoint_tools.quantities import show_count
from train.shapes import parameter_counts
from zslurm.config import yaml12
from zslurm.config.load import recipes, resolve
from zslurm.config.spec import RunSpec
from zslurm.core.console import print_json, print_table
from zslurm.core.errors import NotFound


def list_recipes(*, as_json: bool) -> None:
    """`zslurm config recipes`."""
    facts = sorted((_facts(name, _spec_of(name)) for name in recipes()), key=lambda fact: fact["parameters"])
    if as_json:
        print_json(facts)
        return
    print_table(
        "recipe parameters without-embedding active layers hidden experts contexts tokens".split(),
        [
            [
                fact["name"],
                *(show_count(fact[key]) for key in ("parameters", "without_embedding", "active")),
                *(str(fact[key]) for key in ("layers", "hidden_size", "experts")),
                ", ".join(map(str, fact["contexts"])),
                show_count(fact["tokens"]),
            ]
            for fact in facts
        ],
    )


def show_recipe(name: str, *, as_json: bool) -> None:
    """`zslurm config recipes NAME`.

    Raises:
        NotFound: there is no such recipe.
    """
    known = recipes()
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean `{near[0]}`?" if near else f"there are: {', '.join(known)}"
        raise NotFound(f"no recipe is called `{name}`; {hint}")
    if as_json:
        print_json(_facts(name, _spec_of(name)) | {"text": known[name]})
    else:
        sys.stdout.write(known[name])


def _spec_of(name: str) -> RunSpec:
    return resolve(Path("-"), document=yaml12.parse(f"extends: {name}\n", "recipe")).spec


def _facts(name: str, spec: RunSpec) -> dict[str, Any]:
    """Sizes in parameters; `active` is what one token passes through, without the embedding."""
    counts = parameter_counts(spec.model)
    return {
        "name": name,
        "parameters": counts.total,
        "without_embedding": counts.without_embedding,
        "active": counts.active,
        "layers": spec.model.layers,
        "hidden_size": spec.model.hidden_size,
        "experts": spec.model.experts,
        "vocab_size": spec.model.vocab_size,
        "contexts": [phase.context for phase in spec.phases],
        "tokens": sum(phase.tokens for phase in spec.phases),
    }
