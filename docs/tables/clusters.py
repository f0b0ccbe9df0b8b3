"""The rules for the variables of RCCL and NCCL, and the keys of a profile's fabric."""

from __future__ import annotations

from docs.tables.markdown import table
from zslurm.cluster.rccl.rules import When, rules
from zslurm.config.fabric import FabricSection, SliceSection


def conditions(when: When) -> str:
    """Return the conditions of a rule in words."""
    words = ["nodes with GPUs" if when.gpus else "nodes without GPUs"] if when.gpus is not None else []
    words += [{"amd": "AMD GPUs", "nvidia": "NVIDIA GPUs"}[when.vendor]] if when.vendor else []
    words += [", ".join(when.network)] if when.network else []
    words += ["rails only" if when.rails_only else "rails joined"] if when.rails_only is not None else []
    words += [f"RCCL {when.rccl}"] if when.rccl else []
    words += [f"transport {when.transport}"] if when.transport else []
    words += ["with peermem" if when.peermem else "without peermem"] if when.peermem is not None else []
    if when.copy_engines is not None:
        words.append("with copy_engines" if when.copy_engines else "without copy_engines")
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


def fabric_settings() -> str:
    """Return the keys of `cluster.fabric` and of its slices."""
    keys = [(name, field.description) for name, field in FabricSection.model_fields.items()]
    keys += [(f"slices[].{name}", field.description) for name, field in SliceSection.model_fields.items()]
    return table(("key", "what"), ((f"`{name}`", what) for name, what in keys))


TABLES = (rccl_rules, fabric_settings)
