"""The walk of a fault from a line of the kernel log to the requeue of the job: its files, and its changes of form.

An agent reads a log, and a supervisor with ranks on two nodes gets what it reports; only Slurm and srun are made
up. A file counts if a function of it gets or returns the fault: text or an object that shows a word of the line.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pytest

from benchmarks.common import ROOT, write_result
from tests.aegis.agent.test_agent_in_process import Here
from tests.aegis.contexts import context
from tests.aegis.supervisor.test_killed_shell import NODES, SETTINGS, SilentAgents, Site
from tests.submit.specs import run_spec
from zslurm.aegis.agent.sensors.kernel_log import make
from zslurm.aegis.core.messages import CoreEvent
from zslurm.aegis.supervisor import supervisor
from zslurm.aegis.supervisor.agents.agents import Agents
from zslurm.aegis.supervisor.agents.link import AgentLink
from zslurm.config.aegis import AegisSection
from zslurm.core.errors import Exit

BY_HAND = {"files": 31, "changes_of_form": 13}
"""By following the calls, on 2026-11-26: without files that only record it, and without what wraps it."""
RECORDS = ("zslurm/run/", "zslurm/aegis/notify/", "zslurm/core/redact.py", "train/jsonl.py")
"""Files that write the fault to the run's events, send it to hooks, and read it back."""
WORD = "0xfeedc0de"
LINE = f"amdgpu 0000:c1:00.0: amdgpu: 1 uncorrectable hardware errors detected in gfx block {WORD}"
SRUN = "#!/bin/sh\nexec sleep 600\n"
STATE = {"AttemptState", "FollowState", "AttemptSummary", "History", "Incident"}
"""What has the fault among much else; who only gets that is not on the walk."""


class Walk:
    """Notes each function that gets or returns the fault, and in which form."""

    def __init__(self) -> None:
        self.files: dict[str, list[str]] = {}
        self.forms: dict[str, str] = {}

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        file = frame.f_code.co_filename
        if event not in ("call", "return") or not file.startswith(str(ROOT)) or "/.venv/" in file:
            return
        name = str(Path(file).resolve().relative_to(ROOT))
        if name.startswith(("tests/", "benchmarks/")):
            return
        code = frame.f_code
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        values = [frame.f_locals.get(key) for key in names] if event == "call" else [argument]
        sys.setprofile(None)  # what follows calls functions as well
        try:
            for value in values:
                self._note(name, code.co_name, value)
        finally:
            sys.setprofile(self)

    def _note(self, name: str, function: str, value: object) -> None:
        kind = type(value).__name__
        if value is None or kind in STATE or isinstance(value, int | float) or WORD not in repr(value)[:100_000]:
            return
        if isinstance(value, list | tuple | dict):
            if any(type(part).__name__ in STATE for part in value):
                return
            kind = next((type(part).__name__ for part in value if WORD in repr(part)), kind)
        functions = self.files.setdefault(name, [])
        if function not in functions:
            functions.append(function)
        self.forms.setdefault(kind, name)


class Heard(SilentAgents):
    """In place of Agents: reports of one agent, read from its pipe as the real ones are."""

    pipe: Path

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()
        self._agents = Agents(AegisSection(), lambda _: None)
        self._agents._launcher = SimpleNamespace(on_slurm=True)  # type: ignore[assignment]
        self._agents._keeper = SimpleNamespace(mark_lost=lambda *_: None)  # type: ignore[assignment]
        self._agents.liveness.begin(NODES)
        link = AgentLink(["cat", str(self.pipe)], os.environ, NODES, "agents", self._agents._on_line)
        self._agents.liveness.nodes["node1"].link = link

    def news(self) -> list[CoreEvent]:
        return self._agents.news()


def run() -> None:
    """Let the fault happen, and write the result."""
    with tempfile.TemporaryDirectory(prefix="fault-walk-", ignore_cleanup_errors=True) as directory:
        walk = follow(Path(directory))
    print("\n".join(f"{name}: {', '.join(functions)}" for name, functions in walk.files.items()))
    acting = [name for name in walk.files if not name.startswith(RECORDS)]
    traced = {
        "files": len(walk.files),
        "files_without_records": len(acting),
        "changes_of_form": len(walk.forms) - 1,
    }
    print(traced)
    write_result("fault_walk", {"by_hand": BY_HAND, "traced": traced, "files": walk.files, "forms": walk.forms})


def follow(directory: Path) -> Walk:
    """Return the walk of a GPU's fault on a node without a spare."""
    walk, log = Walk(), directory / "kern.log"
    log.touch()
    Heard.pipe = directory / "reports"
    os.mkfifo(Heard.pipe)
    with pytest.MonkeyPatch.context() as patched:
        site = Site(directory / "site", patched, SRUN)
        spec = run_spec(
            directory / "site",
            slurm={"nodes": 2, "ranks_per_node": 1},
            cluster={"name": "lab", "launcher": "slurm", "gpus_per_node": 1},
            aegis=SETTINGS,
        )
        site.run.config.write_text(spec.model_dump_json())
        site.environ["SLURM_JOB_NODELIST"] = "node[0-1]"
        patched.setattr(supervisor, "Agents", Heard)
        threading.setprofile(walk)
        reader = threading.Thread(target=_agent, args=(directory, log, site))
        reader.start()
        sys.setprofile(walk)
        try:
            code = site.supervise()
        finally:
            sys.setprofile(None)
            threading.setprofile(None)  # type: ignore[arg-type]
        reader.join()
        assert (code, site.slurm.done, site.slurm.excluded) == (Exit.INTERRUPTED, ["requeue"], "node1")
    return walk


def _agent(directory: Path, log: Path, site: Site) -> None:
    """Run an agent whose kernel log gets the line once the ranks have started."""
    at = context(directory / "root", kernel_log=str(log), progress_s=0.1, period_s=0.1)
    at = replace(at, node="node1", now=time.time)
    here = Here(at, {"kernel_log": make}, lambda _seconds, _hung_up: False)

    follows = threading.Event()

    def pass_on() -> None:
        with Heard.pipe.open("wb", buffering=0) as pipe:
            while data := os.read(here._out, 1 << 16):
                pipe.write(data)
                if b"kernel_log" in data:
                    follows.set()

    threading.Thread(target=pass_on, daemon=True).start()
    follows.wait()
    while not site.counts["attempt_started"]:
        time.sleep(0.1)
    with log.open("a") as file:
        file.write(f"Nov 28 12:00:00 node1 kernel: {LINE}\n")
    while not site.counts["run_ended"]:
        time.sleep(0.1)
    here.quit()
