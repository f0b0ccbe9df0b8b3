"""Every name on disk, in one place.

    checkpoints/                              the root: one run's checkpoints
      step-00000400/                          a committed checkpoint
        manifest.json                         what it holds, and the checksums of everything else
        shard-00003-of-00008.safetensors      what rank 3 wrote
      step-00000400.superseded/               counts as step-00000400 while that is absent (see commit.py)
      .step-00000800.<nonce>.tmp/             a save in progress, or a dead one
      .step-00000100.<nonce>.deleted/         a checkpoint being deleted

Names that start with a dot never count as checkpoints, whatever they hold. Numbers are padded with zeros, so
that names sort; they grow beyond the padding when they must. No file is touched here.
"""

from __future__ import annotations

import re

from zslurm.checkpoint_tools.errors import Mismatch

MANIFEST = "manifest.json"
MANIFEST_TEMPORARY = "manifest.json.tmp"
SUPERSEDED_SUFFIX = ".superseded"

_STEP = re.compile(r"step-(\d{8,})(\.superseded)?")
_HIDDEN = re.compile(r"\.step-(\d{8,})\.([A-Za-z0-9_-]+)\.(tmp|deleted)")
_NONCE = re.compile(r"[A-Za-z0-9_-]+")
_PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


def step_name(step: int) -> str:
    """Directory name of the committed checkpoint of `step`."""
    if step < 0:
        raise Mismatch(f"a step cannot be negative, got {step}")
    return f"step-{step:08d}"


def superseded_name(step: int) -> str:
    """Directory name under which the old checkpoint of `step` waits while a new one takes its name."""
    return step_name(step) + SUPERSEDED_SUFFIX


def temporary_name(step: int, nonce: str) -> str:
    """Directory name of a save in progress; `nonce` distinguishes attempts of the same step."""
    return _hidden_name(step, nonce, "tmp")


def deleted_name(step: int, nonce: str) -> str:
    """Directory name of a checkpoint that is being deleted."""
    return _hidden_name(step, nonce, "deleted")


def _hidden_name(step: int, nonce: str, kind: str) -> str:
    if not _NONCE.fullmatch(nonce):
        raise Mismatch(f"a nonce is letters, digits, '_' and '-', got {nonce!r}")
    return f".{step_name(step)}.{nonce}.{kind}"


def step_of(name: str) -> int | None:
    """Step of a committed or superseded checkpoint's directory name; None for any other name."""
    match = _STEP.fullmatch(name)
    if match is None or name.removesuffix(SUPERSEDED_SUFFIX) != step_name(int(match[1])):
        return None
    return int(match[1])


def is_superseded(name: str) -> bool:
    """Return whether `name` belongs to a superseded checkpoint."""
    return name.endswith(SUPERSEDED_SUFFIX) and step_of(name) is not None


def step_of_temporary(name: str) -> int | None:
    """Step of the directory name of a save in progress; None for any other name."""
    match = _HIDDEN.fullmatch(name)
    return int(match[1]) if match is not None and match[3] == "tmp" else None


def is_leftover(name: str) -> bool:
    """Return whether `name` belongs to a dead save or an unfinished deletion, once no save is in progress."""
    return _HIDDEN.fullmatch(name) is not None


def is_plain(name: str) -> bool:
    """Return whether `name`, read from a manifest, is a file of the checkpoint's own directory."""
    return _PLAIN.fullmatch(name) is not None


def shard_name(rank: int, world_size: int) -> str:
    """File name of what `rank` of `world_size` writes."""
    if not 0 <= rank < world_size:
        raise Mismatch(f"rank must be in [0, {world_size}), got {rank}")
    return f"shard-{rank:05d}-of-{world_size:05d}.safetensors"


def copy_name(step: int, shard: str) -> str:
    """File name of a node's own copy of a shard of `step` (local_tier.py)."""
    return f"{step_name(step)}.{shard}"


def extent_key(tensor: str, state: str, start: int, stop: int) -> str:
    """Key of an extent inside its safetensors file: `embed.weight:master[128:256]`.

    For people and other readers; ours finds keys through the manifest.
    """
    return f"{tensor}:{state}[{start}:{stop}]"
