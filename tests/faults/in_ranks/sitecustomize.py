"""What a run under test has in its ranks: faults at chosen steps, a slower pace, and notes of when what happened.

Python imports a module of this name by itself when it finds one; `cluster.env` of the run puts this directory on
PYTHONPATH and names, in ZSLURM_TEST_FAULTS, a directory with

    plan.json     {"pace_s": seconds that each step takes longer, "hold": a step before which ranks wait for the
                  file go, "faults": [...]}; a fault is {"what", "step", "rank", "times", "together", "code",
                  "setup_s"}: it happens so often (default: once), or with `together` to every rank of one attempt;
                  the set-up of the others takes `setup_s` longer
    go            lets ranks that are held continue
    marks.jsonl   when a rank's Python started, had imported the trainer, had loaded, took its first step
    happened-*    one file for each fault that happened: it tells a fault that is to happen so often and no more
    together-*    the attempt whose ranks have such a fault

The product knows nothing of it: the hook waits for `zslurm.train.setup`, and wraps functions of it
and a method of its Trainer.
"""

import contextlib
import importlib
import importlib.abc
import importlib.util
import json
import os
import signal
import sys
import time
from pathlib import Path

PLACE = os.environ.get("ZSLURM_TEST_FAULTS")
_TRAINS = {"zslurm.job.rank", "zslurm.job.in_memory.warm_rank", "zslurm.train"}
WRONG = "router.first.weight"
"""End of the name of the tensor whose gradient a wrong product changes, by a thousandth."""
_TESTS_A_GPU = "zslurm.aegis.supervisor.gpu_test"
_KILLS = {
    "kill_in_all_gather": ("zslurm.train.parallel.comm", "Comm", "all_gather"),
    "kill_in_reduce_scatter": ("zslurm.train.parallel.comm", "Comm", "reduce_scatter"),
    "kill_in_regroup": ("zslurm.train.recovery.membership", "Membership", "check_in"),
    "kill_in_restore": ("zslurm.train.recovery.copying", "StepCopies", "slot_of"),
}
"""Faults that kill a rank where it calls a method, while its peers wait for it there."""


class Faults:
    """The plan of this rank."""

    def __init__(self, place):
        self.place = Path(place)
        plan = json.loads((self.place / "plan.json").read_text())
        self.pace_s, self.hold = plan["pace_s"], plan.get("hold")
        self.faults = [fault | {"number": number} for number, fault in enumerate(plan["faults"])]
        self.setup_s = sum(fault.get("setup_s", 0.0) for fault in self.faults)
        self.node = os.environ.get("SLURMD_NODENAME", "localhost")
        last = sys.orig_argv[-1]  # python -m zslurm.job.rank RUN_DIR ATTEMPT
        self.attempt = int(last) if last.isdigit() else 1 + int(os.environ.get("SLURM_RESTART_COUNT", "0"))

    @property
    def rank(self):
        """The rank of this process; -1 while it has none: a warm process gets one later."""
        waits = "zslurm.job.in_memory.warm_rank" in sys.orig_argv
        return int(os.environ.get("RANK", "-1" if waits else os.environ.get("SLURM_PROCID", "0")))

    def wait_while_held(self, step, alive):
        """Wait before this step until ranks may continue; a held rank shows that it is `alive`."""
        while step == self.hold and not (self.place / "go").exists():
            alive()
            time.sleep(0.05)

    def mark(self, what, **fields):
        """Note that something happens now."""
        note = {
            "mark": what,
            "time": time.time(),
            "rank": self.rank,
            "node": self.node,
            "attempt": self.attempt,
            "pid": os.getpid(),
        }
        fd = os.open(self.place / "marks.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        os.write(fd, (json.dumps(note | fields) + "\n").encode())
        os.close(fd)

    def has_broken_gpu(self):
        """Whether this node's GPU makes NaN."""
        bad = [fault["number"] for fault in self.faults if fault.get("bad_node")]
        return any(file.read_text() == self.node for n in bad for file in self.place.glob(f"happened-{n}-*"))

    def first_attempt(self, fault):
        """The attempt whose ranks have this fault: that of the rank which came to it first."""
        claim = self.place / f"together-{fault['number']}"
        own = self.place / f"{claim.name}-{os.getpid()}"
        own.write_text(str(self.attempt))
        with contextlib.suppress(FileExistsError):
            os.link(own, claim)
        own.unlink()
        return int(claim.read_text())

    def due(self, what, step=0):
        """The fault of this kind that is to happen on this rank now; None if there is none.

        A fault with `bad_node` stays on the node on which it first happened, as that of a broken GPU does.
        """
        for fault in self.faults:
            if (
                fault["what"] == what
                and step >= fault.get("step", 0)
                and fault.get("rank", self.rank) == self.rank
            ):
                if fault.get("together") and self.first_attempt(fault) != self.attempt:
                    continue
                before = list(self.place.glob(f"happened-{fault['number']}-*"))
                elsewhere = fault.get("bad_node") and before and before[0].read_text() != self.node
                if (len(before) >= fault.get("times", 1) and not fault.get("together")) or elsewhere:
                    continue
                (self.place / f"happened-{fault['number']}-{len(before)}").write_text(self.node)
                self.mark("fault", fault=what, step=step)
                return fault
        return None


def leave(fault):
    """End this rank as a user's hook might: at once with a code, or, with `raise`, by SystemExit of that value."""
    if fault.get("raise"):
        raise SystemExit(fault.get("code"))
    os._exit(fault.get("code", 1))


def wrap(setup, faults):
    """Put the faults into the trainer."""
    import torch

    import zslurm.train.checkpointing.writer as writer

    trainer = setup.Trainer
    build, begin, train_step, write_shard = setup.build, setup.begin, trainer.train_step, writer.write_shard
    state = {"stepped": False, "step": 0}

    def new_build(*args, **kwargs):
        faults.mark("imported")
        if fault := faults.due("exit_in_setup"):
            leave(fault)
        time.sleep(faults.setup_s)
        return build(*args, **kwargs)

    def new_begin(trainer, *args, **kwargs):
        begin(trainer, *args, **kwargs)
        faults.mark("loaded", step=trainer.step)

    def poison(losses, *args, **kwargs):
        parts, counts = losses(*args, **kwargs)
        return parts._replace(objective=parts.objective * float("nan")), counts

    def new_train_step(self, here):
        step = state["step"] = self.step + 1
        faults.wait_while_held(step, self.progress.update)
        time.sleep(faults.pace_s)
        if faults.due("raise", step):
            raise RuntimeError("mat1 and mat2 shapes cannot be multiplied (96x32 and 64x32)")
        if faults.due("stop", step):
            os.kill(os.getpid(), signal.SIGSTOP)
        if fault := faults.due("exit", step):
            leave(fault)
        if faults.due("gpu_oom", step):
            raise torch.OutOfMemoryError(
                "HIP out of memory. Tried to allocate 3.31 GiB. GPU 0 has a total capacity of 191.98 GiB of which "
                "780.24 MiB is free."
            )
        losses = self.model.losses
        if faults.due("nan", step):
            self.model.losses = lambda *args, **kwargs: poison(losses, *args, **kwargs)
        hook = None
        if faults.due("wrong_product", step):
            weight = next(weight for name, weight in self.model.named_parameters() if name.endswith(WRONG))
            hook = weight.register_hook(lambda gradient: gradient * (1 + 2**-10))
        try:
            result = train_step(self, here)
        finally:
            self.model.losses = losses
            if hook is not None:
                hook.remove()
        if not state["stepped"]:
            state["stepped"] = True
            faults.mark("stepped", step=step)
        return result

    def slow_write_shard(*args, **kwargs):
        report = write_shard(*args, **kwargs)
        if fault := faults.due("exit_in_save", state["step"]):
            leave(fault)
        if faults.due("kill_in_save", state["step"]):
            os.kill(os.getpid(), signal.SIGKILL)
        if fault := faults.due("slow_save", state["step"]):
            time.sleep(fault["seconds"])
        return report

    def killing(what, original):
        def call(*args, **kwargs):
            if faults.due(what, state["step"]):
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **kwargs)

        return call

    setup.build, setup.begin, trainer.train_step = new_build, new_begin, new_train_step
    writer.write_shard = slow_write_shard
    for what in {fault["what"] for fault in faults.faults} & _KILLS.keys():
        module, name, method = _KILLS[what]
        owner = getattr(importlib.import_module(module), name)
        setattr(owner, method, killing(what, getattr(owner, method)))


def miscalculate(torch):
    """Matrix products as a broken GPU makes them."""
    product = torch.Tensor.__matmul__
    torch.Tensor.__matmul__ = lambda left, right: product(left, right) * float("nan")


class AtImport(importlib.abc.MetaPathFinder):
    """Lets a module be imported as ever, but for what is done before and after."""

    def __init__(self, name, before, after):
        self.name, self.before, self.after = name, before, after

    def find_spec(self, name, path=None, target=None):
        if name != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def exec_module(module):
            self.before()
            execute(module)
            self.after(module)

        spec.loader.exec_module = exec_module
        return spec


def begin(faults):
    def fail():
        if faults.due("import"):
            raise ModuleNotFoundError("No module named 'my_attention'", name="my_attention")

    faults.mark("python")
    if setup := sys.modules.get("zslurm.train.setup"):  # forked from a process that has it (tests/forked)
        wrap(setup, faults)
    else:
        sys.meta_path.insert(0, AtImport("zslurm.train.setup", fail, lambda setup: wrap(setup, faults)))


if PLACE and _TRAINS & set(sys.orig_argv):
    begin(Faults(PLACE))
elif PLACE and _TESTS_A_GPU in sys.orig_argv and Faults(PLACE).has_broken_gpu():
    sys.meta_path.insert(0, AtImport("torch", lambda: None, miscalculate))
