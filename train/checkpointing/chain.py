"""The chain of a run's checkpoints: each has a link that names the one before it, and what made it.

A link is in the cursor of its checkpoint, and a line of chain.jsonl in the run directory, which stays if the
checkpoint is deleted. Its name is the SHA-256 of its content, so a chain cannot be changed without a gap:

    step, previous        where it is: the number of steps, and the name of the link before; null in the first
    weights, data         what it is: digests of the weights, and of which sequences were trained on
    config, code, kernels what made it: digests of the settings that decide numbers, of the trainer's source, and
                          of the choices of kernels
    software, device      versions, and the kind of processor
    ranks, local, threads how many ranks there were, of each node, and the threads of each

Equal links in all but the first two lines mean that the same program computed the next steps in the same way. No
torch here.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from zslurm import __version__
from zslurm.checkpoint_tools import Checkpoint, CheckpointError, list_checkpoints
from zslurm.train.config import TrainConfig
from zslurm.train.jsonl import JsonLinesWriter, read_jsonl

CHAIN = "chain"
"""Key of a checkpoint's cursor."""
UNLINKED = "unlinked"
"""Name of the link before, if that checkpoint has none: it was made by an earlier version, or elsewhere."""
_FILE = "chain.jsonl"
_CODE = ("train", "kernels", "checkpoint_tools")
_MADE_BY = {
    "config": "other settings",
    "corpus": "other data",
    "code": "other code",
    "software": "other versions",
    "device": "another kind of processor",
    "kernels": "other kernels",
    "ranks": "other ranks",
    "local": "other ranks of a node",
    "threads": "other threads",
}


def name_of(link: Mapping[str, Any]) -> str:
    """Return the name of a link."""
    return digest_of(link)


def digest_of(content: Any) -> str:
    """Return the digest of plain JSON."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def settings_of(config: TrainConfig) -> str:
    """Return the digest of the settings that decide the numbers of a run."""
    sections = config.model_dump(mode="json", include={"model", "optim", "phases", "parallel", "init"})
    for name in ("threads", "timeout_s", "device"):
        del sections["parallel"][name]
    return digest_of([sections, config.run.seed, config.data.packing, config.data.isolate_documents])


@cache
def code_digest() -> str:
    """Return the digest of the trainer's source."""
    digest, package = hashlib.sha256(), Path(__file__).parents[2]
    for folder in _CODE:
        for path in sorted((package / folder).rglob("*.py")):
            digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:32]


def software(torch_version: str) -> str:
    """Return the versions that a link records."""
    return f"zslurm {__version__}, torch {torch_version}"


def newest_before(root: Path, step: int) -> str | None:
    """Return the name of the link of the newest complete checkpoint before `step`; None if there is none."""
    for listing in list_checkpoints(root):
        if listing.complete and listing.step < step:
            link = _link_of(listing.path)
            return UNLINKED if link is None else name_of(link)
    return None


def append(root: Path, link: Mapping[str, Any]) -> None:
    """Add a line to the chain of a run.

    Raises:
        OSError: it cannot be written.
    """
    with JsonLinesWriter(root.parent / _FILE) as writer:
        writer.append(dict(link))


def repair(root: Path, link: Mapping[str, Any]) -> None:
    """Add the line of a checkpoint whose run ended before it was added."""
    if name_of(link) not in {name_of(row) for row in _recorded(root)}:
        with suppress(OSError):  # the link is in the checkpoint as well
            append(root, link)


@dataclass(frozen=True)
class ChainEntry:
    """A link of a chain, as it was found.

    Attributes:
        link: its content.
        path: the checkpoint, if it is still there.
        gaps: why the chain is not proved at this link.
        changes: what is other than it was at the link before.
    """

    link: Mapping[str, Any]
    path: Path | None
    gaps: tuple[str, ...] = ()
    changes: tuple[str, ...] = ()

    @property
    def step(self) -> int:
        """Return the steps that were done."""
        return int(self.link["step"])


def chain_of(root: Path) -> list[ChainEntry]:
    """Return the chain that ends in the newest complete checkpoint of a run, first link first.

    Raises:
        CheckpointError: there is no complete checkpoint, or the newest one has no link.
    """
    paths = {listing.step: listing.path for listing in list_checkpoints(root) if listing.complete}
    if not paths:
        raise CheckpointError(f"{root}: there is no complete checkpoint")
    links = {name_of(link): link for link in _recorded(root)}
    stored = {step: link for step, path in paths.items() if (link := _link_of(path)) is not None}
    newest = max(paths)
    if newest not in stored:
        raise CheckpointError(f"{paths[newest]}: it has no link; an earlier version saved it")
    recorded = set(links)
    links |= {name_of(link): link for link in stored.values()}
    entries, link = [], stored[newest]
    while True:
        before, gaps = links.get(link["previous"] or ""), []
        name, path = name_of(link), paths.get(link["step"])
        if recorded and name not in recorded:
            gaps.append(f"its link is not in {_FILE}: the line was never written, or one of both was changed")
        if path is not None and name_of(stored.get(link["step"], {})) != name:
            gaps.append(f"{path.name} is of another chain")
            path = None
        if link["previous"] == UNLINKED:
            gaps.append("the checkpoint before it has no link")
        elif link["previous"] is not None and before is None:
            gaps.append(f"the link before it, {link['previous']}, is not recorded")
        entries.append(ChainEntry(link, path, tuple(gaps), tuple(_changes(before, link)) if before else ()))
        if before is None:
            return entries[::-1]
        link = before


def _changes(before: Mapping[str, Any], link: Mapping[str, Any]) -> Iterator[str]:
    for key, words in _MADE_BY.items():
        was, now = before.get(key), link.get(key)
        if was != now:
            is_digest = isinstance(now, str) and len(now) == 32
            yield words if is_digest else f"{words} ({was}, then {now})"


def _recorded(root: Path) -> list[dict[str, Any]]:
    return [row for row in read_jsonl(root.parent / _FILE) if {"step", "previous"} <= set(row)]


def _link_of(path: Path) -> dict[str, Any] | None:
    with Checkpoint.open(path, check_files=False) as checkpoint:
        link = checkpoint.manifest.cursor.get(CHAIN)
    return dict(link) if link is not None else None
