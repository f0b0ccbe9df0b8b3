"""The ways to run the program that are compared. What is set is what the contender's documents recommend."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from .plans import Plan
from .site import Site

PROGRAMS = Path(__file__).parent / "programs"
NODES = 2
_HEAD = """#!/bin/bash
#SBATCH --job-name=chaos --nodes={nodes} --ntasks-per-node=1 --time={minutes}
#SBATCH --requeue --open-mode=append --exclusive
export OMP_NUM_THREADS=1 CHAOS_DIR={directory} MASTER_PORT={port} WORLD_SIZE={nodes}
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
"""
_RANK = "RANK=$SLURM_PROCID LOCAL_RANK=0 exec {python} {program}"
_SRUN = "srun --kill-on-bad-exit=1 bash -c '" + _RANK + "'"
_TORCHRUN = """srun --kill-on-bad-exit=0 --wait=0 {python} -m torch.distributed.run --nnodes=2 \\
  --nproc-per-node=1 --max-restarts=3 --rdzv-backend=c10d --rdzv-id="$SLURM_JOB_ID" \\
  --rdzv-endpoint="$MASTER_ADDR:{port}" {program}
"""
_FT_LAUNCHER = """srun --kill-on-bad-exit=0 --wait=0 {python} -m nvidia_resiliency_ext.fault_tolerance.launcher \\
  --nnodes=2 --nproc-per-node=1 --max-restarts=3 --rdzv-backend=c10d --rdzv-id="$SLURM_JOB_ID" \\
  --rdzv-endpoint="$MASTER_ADDR:{port}" {program}
"""
_TORCHFT = """export TORCHFT_LIGHTHOUSE="http://$MASTER_ADDR:{port}"
{python} -c "
import time
from torchft.coordination import LighthouseServer
server = LighthouseServer(bind='0.0.0.0:{port}', min_replicas=1, join_timeout_ms=1000, quorum_tick_ms=50,
                          heartbeat_timeout_ms=1000)
time.sleep(100_000)" &
srun --kill-on-bad-exit=0 --wait=0 bash -c 'unset RANK WORLD_SIZE MASTER_ADDR MASTER_PORT; \\
  REPLICA_GROUP_ID=$SLURM_PROCID exec {python} -m torch.distributed.run --nnodes=1 --nproc-per-node=1 \\
  --max-restarts=3 --rdzv-backend=c10d --rdzv-endpoint=localhost:0 {program}'
"""
_NVRX = "srun --kill-on-bad-exit=0 --wait=0 bash -c '" + _RANK + "'"
_SUBMITIT = """\
import submitit

class Train(submitit.helpers.Checkpointable):
    def __call__(self):
        submitit.helpers.CommandFunction(["bash", "-c", {command!r}], verbose=False)()

executor = submitit.SlurmExecutor({folder!r})
executor.update_parameters(
    nodes={nodes}, ntasks_per_node=1, time={minutes}, job_name="chaos", exclusive=True,
    additional_parameters={{"requeue": True, **{options!r}}},
)
executor.submit(Train())
"""
_KEYS = ("partition", "account", "qos", "constraint", "nodelist", "exclude", "mem", "time")
"""Options of sbatch for which a run file of zslurm has a key; others are `slurm.flags`."""


@dataclass(frozen=True)
class Start:
    """One start of a contender: its site, plan and directory, and an unused port."""

    site: Site
    plan: Plan
    directory: Path
    port: int

    def program(self, name: str) -> str:
        """Return a program of this package with its arguments."""
        return f"{PROGRAMS / name} --steps {self.plan.steps} --out {self.directory}/out"

    def fill(self, template: str, program: str) -> str:
        """Return a script with the names in braces replaced."""
        words = {
            "nodes": NODES, "directory": self.directory, "port": self.port, "python": self.site.python,
            "program": self.program(program), "minutes": self.plan.minutes,
        }  # fmt: skip
        return template.format(**words)


@dataclass(frozen=True)
class Contender:
    """A way to run the program.

    Attributes:
        name: as the table shows it.
        source: of what is set.
        start: submits the job; raises RuntimeError if it is refused.
        needs: a module that the site's Python must have.
        nodes: that a job takes.
        note: what is different about its program or its set-up.
    """

    name: str
    source: str
    start: Callable[[Start], None]
    needs: str = "torch"
    nodes: int = NODES
    note: str = ""

    def why_not(self, site: Site) -> str | None:
        """Return the error of an import that the contender needs; None if there is none."""
        done = site.run([site.python, "-c", f"import {self.needs}"])
        if done.returncode == 0:
            return None
        return done.stderr.strip().rpartition("\n")[2] or f"its import ends with exit code {done.returncode}"


def _by_script(body: str, program: str = "ddp.py") -> Callable[[Start], None]:
    def start(job: Start) -> None:
        script = job.directory / "job.sh"
        script.write_text(job.fill(_HEAD + body, program))
        options = [f"--chdir={job.directory}", *job.site.sbatch]
        _run(job, ["sbatch", *options, str(script)])

    return start


def _by_submitit(job: Start) -> None:
    variables = """export OMP_NUM_THREADS=1 CHAOS_DIR={directory} MASTER_PORT={port} WORLD_SIZE={nodes}
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
"""
    command = job.fill(variables + _RANK, "ddp.py")
    folder = str(job.directory / "submitit")
    script = _SUBMITIT.format(command=command, folder=folder, nodes=NODES, options=job.site.options(),
                              minutes=job.plan.minutes)  # fmt: skip
    _run(job, [job.site.python, "-c", script])


def _by_zslurm(program: str, *arguments: str, warm: bool = False) -> Callable[[Start], None]:
    def start(job: Start) -> None:
        options = job.site.options()
        flags = {name: value for name, value in options.items() if name not in _KEYS}
        run = {
            "run": {"name": f"chaos-{job.directory.name}"},
            "trainer": {
                "command": [job.site.python, *job.program(program).split(), *arguments],
                "env": {"CHAOS_DIR": str(job.directory), "OMP_NUM_THREADS": "1"},
                "checkpoints": f"{job.directory}/out/step-*.pt",
                "warm": warm,
            },
            "slurm": {
                "nodes": NODES,
                "ranks_per_node": 1,
                "spares": 1,
                "time": str(job.plan.minutes),
                "save_margin_s": min(300, 15 * job.plan.minutes),
                "flags": flags,
                **{name: value for name, value in options.items() if name not in flags},
            },
            "cluster": {"gpus_per_node": 0},
        }
        (job.directory / "run.yaml").write_text(json.dumps(run))
        _run(job, [job.site.python, "-m", "zslurm", "submit", "run.yaml"])

    return start


def _run(job: Start, argv: list[str]) -> None:
    done = job.site.run(argv, cwd=job.directory)
    if done.returncode:
        raise RuntimeError(done.stderr.strip() or done.stdout.strip())


_SBATCH = "https://slurm.schedmd.com/sbatch.html"
CONTENDERS = (
    Contender("sbatch --requeue", _SBATCH, _by_script(_SRUN)),
    Contender(
        "requeue in the script",
        _SBATCH,
        _by_script(_SRUN + ' || scontrol requeue "$SLURM_JOB_ID"\n'),
        note="as in the templates of torchx and NeMo-Run",
    ),
    Contender(
        "torchrun --max-restarts",
        "https://docs.pytorch.org/docs/stable/elastic/run.html",
        _by_script(_TORCHRUN),
    ),
    Contender(
        "submitit",
        "https://github.com/facebookincubator/submitit/blob/main/docs/checkpointing.md",
        _by_submitit,
        needs="submitit",
    ),
    Contender(
        "ft_launcher",
        "https://nvidia.github.io/nvidia-resiliency-ext/fault_tolerance/usage_guide.html",
        _by_script(_FT_LAUNCHER),
        needs="nvidia_resiliency_ext.fault_tolerance.launcher",
    ),
    Contender(
        "nvrx in process",
        "https://nvidia.github.io/nvidia-resiliency-ext/inprocess/usage_guide.html",
        _by_script(_NVRX, "ddp_nvrx.py"),
        needs="nvidia_resiliency_ext.inprocess",
        note="continues without the lost rank",
    ),
    Contender(
        "torchft",
        "https://github.com/meta-pytorch/torchft/blob/main/README.md",
        _by_script(_TORCHFT, "ddp_torchft.py"),
        needs="torchft",
        note="a replica group is one rank; the optimizer is not sharded",
    ),
    Contender(
        "zslurm",
        "docs/programs.md",
        _by_zslurm("ddp.py", "--each-step=zslurm.progress:step"),
        needs="zslurm",
        nodes=NODES + 1,
        note="one spare node",
    ),
    Contender(
        "zslurm recover",
        "docs/programs.md",
        _by_zslurm("ddp_zslurm.py", warm=True),
        needs="zslurm",
        nodes=NODES + 1,
        note="one spare node; the program calls `zslurm.recover` and `keep`",
    ),
)
