"""Ranks of a tiny model with recovery in memory, and a controller that plays the supervisor.

Faults are injected inside of a rank: at its n-th call of a named point it kills itself, or stops.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from torch.distributed import TCPStore

from tests.train.ranks import _CONTEXT
from tests.train.runs import clean_environment
from tests.waiting import wait_for
from zslurm.config.aegis import Recovery
from zslurm.core.files import write_atomically
from zslurm.job.in_memory.store_server import StoreServer
from zslurm.train.progress import STACK_SIGNAL, dump_stacks_on_signal
from zslurm.train.recovery.generation import NEW, Generation

POINTS = {
    "forward": ("zslurm.train.model.zaya", "Zaya.losses"),
    "reduce_scatter": ("zslurm.train.parallel.comm", "Comm.reduce_scatter"),
    "all_gather": ("zslurm.train.parallel.comm", "Comm.all_gather"),
    "all_reduce": ("zslurm.train.parallel.comm", "Comm.all_reduce"),
    "optimizer": ("zslurm.train.optim.sharded", "ShardedOptimizer.step"),
    "save": ("zslurm.train.checkpointing.checkpointer", "Checkpointer.written"),
    "regroup": ("zslurm.train.recovery.membership", "Membership.check_in"),
    "restore": ("zslurm.train.recovery.copying", "StepCopies.slot_of"),
}
"""Where a fault can be injected, by name: a method of the program."""

_WHOLE, _ALLOWED = "copies-are-whole", "steps-allowed"


class _Server(StoreServer):
    """A store server in this process."""

    def __init__(self) -> None:
        self.hosted = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        super().__init__(self.hosted)
        self.events: list[dict[str, Any]] = []

    def emit(self, event: dict[str, Any]) -> None:
        self.events.append(event)


class Cluster:
    """Ranks, warm processes, and who is a member."""

    def __init__(
        self,
        run: Path,
        ranks: int,
        *,
        warm: int = 1,
        local_size: int = 1,
        faults: dict[str, str] | None = None,
        recovery: Recovery = "memory",
        device_s: float = 0.0,
    ) -> None:
        """Start `ranks` and `warm` processes.

        Args:
            run: their run directory.
            ranks: how many they are.
            warm: processes that wait to take a place.
            local_size: ranks of a node.
            faults: POINT:CALL:SIGNAL by member (`0`, `w0`).
            recovery: `aegis.recovery`: without `restart` ranks keep copies of their state.
            device_s: seconds of each forward pass in which a device would compute, and the host's core is free.
        """
        self._recovery, self._device_s = recovery, device_s
        self.run, self.ranks, self.local_size, self.faults = run, ranks, local_size, faults or {}
        self.server = _Server()
        self.members = [str(rank) for rank in range(ranks)]
        self.processes: dict[str, Any] = {}
        self.generation = 0
        self.events: list[dict[str, Any]] = []
        self.warm_made = 0
        for rank in range(ranks):
            self._start(str(rank), {"RANK": str(rank), "LOCAL_RANK": str(rank % local_size)})
        for _ in range(warm):
            self.add_warm()
        self.lines: SimpleQueue[str | None] = SimpleQueue()

    def add_warm(self) -> str:
        """Start a warm process."""
        name = f"w{self.warm_made}"
        self.warm_made += 1
        self._start(name, {})
        return name

    def _start(self, member: str, variables: dict[str, str]) -> None:
        environment = clean_environment() | {
            "WORLD_SIZE": str(self.ranks),
            "LOCAL_WORLD_SIZE": str(self.local_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self.server.hosted.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "ZSLURM_RECOVERY": self._recovery,
            "ZSLURM_MEMBER": member,
            "ZSLURM_ATTEMPT": "1",
            **variables,
        }
        fault = self.faults.get(member)
        process = _CONTEXT.Process(
            target=_process, args=(self.run, member, environment, fault, self._device_s), daemon=True
        )
        process.start()
        self.processes[member] = process

    # ------------------------------------------------------------------------------------------ the supervisor

    def pump(self) -> list[dict[str, Any]]:
        """Let the server look at its store; returns what it reported since the last call."""
        self.server.look()
        found, self.server.events = self.server.events, []
        self.events += found
        return found

    def wait_warm(self, count: int) -> None:
        """Wait until so many warm processes are ready."""

        def ready() -> bool:
            self.pump()
            return len([event for event in self.events if event["event"] == "warm"]) >= count

        wait_for(ready, "warm processes", every_s=0.02)

    def wait_lost(self, count: int = 1) -> list[int]:
        """Wait until so many members are dead; returns their ranks."""

        def lost() -> list[int] | None:
            self.pump()
            dead = [rank for rank, name in enumerate(self.members) if self.processes[name].exitcode is not None]
            return dead if len(dead) >= count else None

        return wait_for(lost, "a lost rank", every_s=0.005)

    def replace(self, lost: list[int], by: list[str], *, deadline_s: float = 60) -> None:
        """Publish a generation with other processes in the places of the lost ranks."""
        for rank, name in zip(lost, by, strict=True):
            self.members[rank] = name
        self.generation += 1
        published = Generation(self.generation, tuple(self.members), tuple(lost), deadline_s)
        request = {"op": "generation", **json.loads(published.to_json())}
        assert self.server.take(json.dumps(request))

    def move(self, ranks: list[int], by: list[str], *, deadline_s: float = 60) -> list[str]:
        """Plan a move at the next boundary; returns the processes that leave. Processes are on the node ``."""
        members = list(self.members)
        for rank, name in zip(ranks, by, strict=True):
            members[rank] = name
        left, self.members = [self.members[rank] for rank in ranks], members
        self.generation += 1
        planned = Generation(self.generation, tuple(members), tuple(ranks), deadline_s, left=("",))
        assert self.server.take(json.dumps({"op": "move", **json.loads(planned.to_json())}))
        return left

    def shrink(self, lost: list[int], *, deadline_s: float = 60) -> None:
        """Publish a generation without the lost ranks, and nobody in their places."""
        size = len(self.members)
        former = tuple(rank for rank in range(size) if rank not in lost)
        self.members = [self.members[rank] for rank in former]
        self._plan_number_of_ranks("generation", former, size, deadline_s)

    def stay(self, size: int, *, deadline_s: float = 60) -> None:
        """Publish a generation of the first `size` ranks alone, after processes that were to join were lost."""
        self.members = self.members[:size]
        self._plan_number_of_ranks("generation", tuple(range(size)), size, deadline_s)

    def grow(self, by: list[str], *, deadline_s: float = 60) -> None:
        """Plan that warm processes join at the next boundary, as ranks after the present ones."""
        size = len(self.members)
        self.members = [*self.members, *by]
        self._plan_number_of_ranks("move", (*range(size), *[NEW] * len(by)), size, deadline_s)

    def _plan_number_of_ranks(self, how: str, former: tuple[int, ...], size: int, deadline_s: float) -> None:
        self.generation += 1
        members = tuple(self.members)
        planned = Generation(self.generation, members, deadline_s=deadline_s, former=former, former_size=size)
        assert self.server.take(json.dumps({"op": how, **json.loads(planned.to_json())}))

    def is_whole(self) -> bool:
        """Whether every rank's buddy has had a whole copy in this generation: from then on any one may be lost."""
        file = self.run / _WHOLE
        return file.exists() and file.read_text() == str(self.generation)

    def allow(self, steps: int) -> None:
        """Let the ranks make so many steps; if this is never called they make all."""
        write_atomically(self.run / _ALLOWED, str(steps))

    def outcome(self) -> dict[str, Any]:
        """The result of the newest generation, once it is there."""
        number = self.generation

        def look() -> dict[str, Any] | None:
            self.pump()
            kinds = ("recovered", "failed", "refused")
            mine = (event for event in self.events if event.get("number") == number)
            return next((event for event in mine if event["event"] in kinds), None)

        return wait_for(look, f"the outcome of generation {number}", every_s=0.002)

    def finish(self) -> dict[str, int]:
        """Wait until all members have ended; exit codes by member."""
        for name in self.members:
            self.processes[name].join(3600)  # the limit of the test ends it before
            assert self.processes[name].exitcode is not None, f"{name} hangs:\n{self.output(name)}"
        return {name: self.processes[name].exitcode for name in self.members}

    def kill(self, ranks: list[int]) -> None:
        """Kill the processes of some ranks."""
        for rank in ranks:
            os.kill(self.processes[self.members[rank]].pid, signal.SIGKILL)

    def show_stacks(self) -> None:
        """Have every member that lives write the stacks of its threads to what it prints."""
        for name in self.members:
            if self.processes[name].exitcode is None:
                os.kill(self.processes[name].pid, STACK_SIGNAL)
        time.sleep(1)

    def stop(self) -> None:
        """End every process."""
        for process in self.processes.values():
            if process.exitcode is None:
                os.kill(process.pid, signal.SIGKILL)
            process.join(60)

    def output(self, member: str) -> str:
        """What a process printed."""
        return (self.run / f"output-{member}").read_text()


def _process(run: Path, member: str, environment: dict[str, str], fault: str | None, device_s: float) -> None:
    os.environ.clear()
    os.environ.update(environment)
    file = os.open(run / f"output-{member}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    dump_stacks_on_signal()
    if fault is not None:
        inject(fault)
    if device_s:
        _compute_elsewhere(device_s)
    _note_whole_copies(run / _WHOLE)
    _wait_for_steps(run / _ALLOWED)
    import torch

    torch.set_num_threads(1)
    from zslurm.train.errors import TrainError
    from zslurm.train.main import train

    generation = model = None
    if "RANK" not in os.environ:
        from zslurm.train.assembly import initial_model, warm_up
        from zslurm.train.config import load_train_config
        from zslurm.train.recovery.warm import take_place, wait_to_join

        config = load_train_config(run / "config.json")
        model = initial_model(config, torch.device("cpu"))
        warm_up(model, config)
        store = TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False)
        generation = wait_to_join(store, member, over=lambda: False)
        if generation is None:  # the ranks leave this node
            os._exit(0)
        take_place(store, member, generation)
    code = 1
    try:
        code = int(train(run, generation=generation, model=model))
    except TrainError as error:
        print(f"error: {error}", flush=True)
        code = error.exit_code
    except BaseException:
        import traceback

        traceback.print_exc()
    sys.stdout.flush()
    os._exit(code)


def _note_whole_copies(file: Path) -> None:
    """Have the file hold the last generation in which all ranks have agreed that their copies are whole."""
    from zslurm.train.recovery.copying import StepCopies

    agree = StepCopies.agree

    def noted(self: StepCopies, busy: float) -> None:
        agree(self, busy)
        if busy == 0 and self.whole >= 0:
            file.write_text(str(self.copies._generation))

    StepCopies.agree = noted  # type: ignore[method-assign]


def _wait_for_steps(file: Path) -> None:
    """Have the ranks wait before a step that is not allowed yet, unless a rank was lost: then they regroup.

    In training the wait for a lost rank is inside a collective, which recovery aborts.
    """
    from zslurm.train.loop import Trainer
    from zslurm.train.recovery.recovery import Recovery

    take_step = Trainer.take_step

    def regroups(self: Trainer) -> bool:
        recoveries = [callback for callback in self.callbacks if isinstance(callback, Recovery)]
        return any(recovery._membership.superseded for recovery in recoveries)

    def held(self: Trainer) -> Any:
        while file.exists() and self.step >= int(file.read_text()) and not regroups(self):
            time.sleep(0.005)
        return take_step(self)

    Trainer.take_step = held  # type: ignore[method-assign]


def _compute_elsewhere(seconds: float) -> None:
    """Have each forward pass take so much longer, with the host's core free: as where a device computes."""
    from zslurm.train.model.zaya import Zaya

    losses = Zaya.losses

    def waited(*arguments: Any, **keywords: Any) -> Any:
        time.sleep(seconds)
        return losses(*arguments, **keywords)

    Zaya.losses = waited  # type: ignore[method-assign]


def inject(fault: str) -> None:
    """Make this process do something at a call of a point: `reduce_scatter:3:KILL`."""
    point, call, name = fault.split(":")
    module_name, path = POINTS[point]
    owner = __import__(module_name, fromlist=["_"])
    *classes, method = path.split(".")
    for part in classes:
        owner = getattr(owner, part)
    original, calls = getattr(owner, method), [0]

    def hooked(*arguments: Any, **keywords: Any) -> Any:
        calls[0] += 1
        if calls[0] == int(call):
            os.kill(os.getpid(), getattr(signal, f"SIG{name}"))
        return original(*arguments, **keywords)

    setattr(owner, method, hooked)
