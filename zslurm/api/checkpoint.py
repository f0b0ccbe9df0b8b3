"""A checkpoint, from Python: opened by the name of a run too, verified, rewritten for other ranks."""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import Self

from zslurm import checkpoint_tools
from zslurm.checkpoint_tools.offline.verify import Verification
from zslurm.checkpoint_tools.plain import StrPath
from zslurm.run.checkpoints import find_checkpoint

_SHOWN = 30
"""Tensors that a notebook shows."""


class Checkpoint(checkpoint_tools.Checkpoint):
    """An open checkpoint: `names()`, `numpy(name)`, `state_dict()`, `manifest`, `verify()`, `reshape(ranks)`.

    Use it as a context manager, or leave it to Python to close; not for use from two threads at once.
    """

    @classmethod
    def open(cls, path: StrPath, *, check_files: bool = True, local: StrPath | None = None) -> Self:
        """Open a checkpoint.

        Args:
            path: its directory; or a run, by name or path, or a directory of checkpoints: the newest complete one.
            check_files: check the size of each file too.
            local: a directory of copies of shards, see checkpoint_tools/local_tier.py.

        Raises:
            NotFound: there is no such run, or no complete checkpoint.
            CheckpointError: it is damaged, written by a newer zslurm, or cannot be read.
        """
        return super().open(find_checkpoint(str(path)), check_files=check_files, local=local)

    def verify(self, *, threads: int = 2) -> Verification:
        """Read all of it, and return what is damaged: `sound` if nothing is, else `damages`.

        Raises:
            CheckpointError: it cannot be read.
        """
        return checkpoint_tools.verify(self.path, threads=threads)

    def reshape(self, ranks: int, destination: StrPath | None = None, *, workers: int = 4) -> Checkpoint:
        """Write it for another number of ranks, and open that; a run needs no such thing to resume.

        Args:
            ranks: data-parallel ranks.
            destination: the directory to make; default: next to this one, as `zslurm checkpoint reshape` names it.
            workers: shards that are written at once.

        Raises:
            CheckpointError: the destination is there or has too little room, or a byte is damaged.
        """
        to = Path(destination) if destination is not None else reshaped_path(self.path, ranks)
        checkpoint_tools.reshape(self.path, to, ranks, workers=workers)
        return type(self).open(to)

    def __del__(self) -> None:
        """Close it: a notebook opens without a context manager."""
        if hasattr(self, "_directory"):
            self.close()

    def _repr_html_(self) -> str:
        """Show what it holds as a table in a notebook."""
        rows = []
        for name in list(self.tensors)[:_SHOWN]:
            tensor = self._tensor(name)
            shape, states = " x ".join(map(str, tensor.shape)), ", ".join(tensor.states)
            rows.append(f"<tr><td>{escape(name)}</td><td>{shape}</td><td>{escape(states)}</td></tr>")
        if (more := len(self.tensors) - _SHOWN) > 0:
            rows.append(f"<tr><td>and {more} more</td><td></td><td></td></tr>")
        head = "<tr><th>tensor</th><th>shape</th><th>states</th></tr>"
        return f"<p>{escape(repr(self))}</p><table>{head}{''.join(rows)}</table>"


def reshaped_path(source: Path, ranks: int) -> Path:
    """Return the default path of a checkpoint for other ranks."""
    return source.parent / f"{source.name}-dp{ranks}"
