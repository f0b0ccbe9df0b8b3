"""A program of your own continues after a lost rank: the other ranks keep their processes, and no step is lost.

    import zslurm

    def train():
        dist.init_process_group("gloo")
        model, optimizer = ...
        state = {"model": model.module, "optimizer": optimizer}
        step = zslurm.restore(state) or load_my_checkpoint(state)
        while step < steps:
            ...
            step += 1
            zslurm.keep(step, state)

    zslurm.recover(train)

`recover` calls the function. If a rank is killed, its program is started again, and in all others the function is
left by an exception, its process group is aborted, and it is called again: it makes its groups and its model
again. `keep` and `restore` (keeping.py) copy the state to host memory and back. Outside of a run of zslurm
`recover` calls the function once, and nothing else happens.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from zslurm.keeping import switch_on
from zslurm.progress import GENERATION_VARIABLE, RECOVERY_VARIABLE

T = TypeVar("T")

_LOOK_S = 0.03
_WAIT_S = 60.0
_LOST_PEER = ("gloo", "NCCL", "RCCL", "Connection", "Broken pipe", "Socket")
"""Words by which an error of a collective or of the store is known."""


class _Generations:
    """Watches the file of the ranks' generations in a thread, and aborts this process's groups for a new one."""

    def __init__(self, files: Path, abort: Callable[[], None]) -> None:
        self._file, self._joined = (
            files.with_name(f"{files.name}.generation"),
            files.with_name(f"{files.name}.joined"),
        )
        self._abort = abort
        self.number = int(os.environ.get(GENERATION_VARIABLE, "0"))
        threading.Thread(target=self._watch, name="zslurm-generations", daemon=True).start()

    def newest(self) -> dict[str, Any]:
        """Return the newest generation in the file; an empty one if there is none yet."""
        try:
            content: dict[str, Any] = json.loads(self._file.read_text())
        except (OSError, ValueError):
            return {}
        return content

    def _watch(self) -> None:
        aborted = self.number
        while True:
            number = self.newest().get("generation", 0)
            if number > max(aborted, self.number):
                aborted = number
                self._abort()
            time.sleep(_LOOK_S)

    def join(self) -> None:
        """Show the rank that this process takes part in the generation."""
        draft = self._joined.with_name(f"{self._joined.name}.{os.getpid()}")
        draft.write_text(str(self.number))
        draft.replace(self._joined)

    def leave(self) -> None:
        """Show the rank that this process takes part in no further one."""
        self._joined.unlink(missing_ok=True)

    def wait_for_next(self) -> bool:
        """Wait for the next generation and take its address; returns whether one came."""
        deadline = time.monotonic() + _WAIT_S
        while time.monotonic() < deadline:
            newest = self.newest()
            if newest.get("generation", 0) > self.number:
                self.number = int(newest["generation"])
                os.environ.update(
                    {"MASTER_ADDR": str(newest["host"]), "MASTER_PORT": str(newest["port"]),
                     GENERATION_VARIABLE: str(self.number)}
                )  # fmt: skip
                return True
            time.sleep(_LOOK_S)
        return False


def recover(train: Callable[[], T]) -> T:
    """Call a function, and again each time that a rank is killed; returns what it returns.

    The function has to make its process groups by itself, and everything that belongs to them.

    Raises:
        Exception: what the function raises, if no rank was killed; the supervisor then starts all ranks again.
    """
    files = os.environ.get(RECOVERY_VARIABLE)
    if not files or int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return train()
    import torch

    from zslurm.train.recovery.abort import NCCL_VARIABLES, Abort, leave_groups, why_not

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    on_amd = device.type == "cuda" and torch.version.hip is not None
    if why := "it has not been tried on AMD GPUs yet" if on_amd else why_not(device, untried=True):
        if os.environ.get("RANK") == "0":
            print(f"zslurm.recover: off, a lost rank restarts all of them: {why}", file=sys.stderr, flush=True)
        return train()
    switch_on()
    os.environ.update(NCCL_VARIABLES)
    abort = Abort(device, other_ports=set())
    generations = _Generations(Path(files), abort)
    _note_groups(abort)
    try:
        while True:
            generations.join()
            try:
                return train()
            except RuntimeError as error:
                is_newer = generations.newest().get("generation", 0) > generations.number
                if not is_newer and not any(word in str(error) for word in _LOST_PEER):
                    raise
                traceback.print_exc()  # it may be the program's, and is not kept: it holds the groups
                line = str(error).partition("\n")[0][:200]
            abort()
            leave_groups()
            gc.collect()  # what the function held of the groups, in frames of its exception too
            print(f"zslurm.recover: a rank was lost ({line})", flush=True)
            if not generations.wait_for_next():
                raise RuntimeError(f"no rank was replaced in {_WAIT_S:g} s: {line}")
            abort.made()
            print(f"zslurm.recover: continues in generation {generations.number}", flush=True)
    finally:
        generations.leave()


def _note_groups(abort: Any) -> None:
    """Have every group that torch makes from now on noted by `abort`, with its sockets."""
    from torch.distributed import distributed_c10d

    make = distributed_c10d._new_process_group_helper  # what both public functions call

    def noting(*args: Any, **kwargs: Any) -> Any:
        abort.add_port(int(os.environ["MASTER_PORT"]))
        with abort.making_groups():
            return make(*args, **kwargs)

    distributed_c10d._new_process_group_helper = noting
