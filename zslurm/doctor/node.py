"""Run the checks of one machine, all at once; `python -m zslurm.doctor.node` answers `run_on_nodes`.

Each check runs in a thread with its deadline: one that hangs in a driver or a dead mount has failed, and
the others are reported all the same. What hangs like this cannot be ended, so the process leaves without it.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Collection, Iterable

from zslurm.checkpoint_tools.plain import reason_of
from zslurm.doctor.check import Check, CheckOutcome, all_checks, failed, unavailable
from zslurm.hardware.node_sources import NodeTask, Sources

TASK_VARIABLE = "ZSLURM_DOCTOR_TASK"
"""Environment variable with the task as JSON: a command line is visible to everybody, and has a limit."""

_ON_REQUEST_TIME_FACTOR = 5


def run_checks(checks: Iterable[Check], sources: Sources) -> dict[str, CheckOutcome | None]:
    """Return what each check found; None if it does not apply."""
    by_check: dict[str, CheckOutcome | None] = {}
    checks = list(checks)
    # Measuring speed takes the whole machine, and spoils what others measure; so does what takes GPU memory.
    idle = [check for check in checks if not check.on_request and not check.uses_gpus]
    busy = [check for check in checks if not check.on_request and check.uses_gpus]
    for group in (idle, busy, [check for check in checks if check.on_request]):
        threads = {}
        for check in group:
            thread = threading.Thread(target=_run, args=(check, sources, by_check), daemon=True)
            thread.start()
            threads[check] = thread
        began = time.monotonic()
        for check, thread in threads.items():
            limit = sources.limits.check_s * (_ON_REQUEST_TIME_FACTOR if check.on_request else check.time_factor)
            thread.join(max(0.0, began + limit - time.monotonic()))
            if thread.is_alive():
                remedy = "exclude the node: a driver or a mount hangs"
                by_check.setdefault(check.name, failed(f"the check did not end within {limit:g} s", remedy))
    return {check.name: by_check[check.name] for check in checks}


def _run(check: Check, sources: Sources, found: dict[str, CheckOutcome | None]) -> None:
    try:
        outcome = check.run(sources)
    except Exception as error:  # one broken check must not hide the others
        outcome = unavailable(f"the check itself failed: {reason_of(error)}", "please report this")
    found.setdefault(check.name, outcome)


def node_checks(names: Collection[str]) -> list[Check]:
    """Return the checks of these names that run on compute nodes."""
    return [check for check in all_checks() if check.name in names and check.runs_on("node")]


def main() -> None:
    """Run the checks of a node and answer."""
    from zslurm.slurm.on_nodes.run_on_nodes import answer

    began = time.time()
    sources = Sources(NodeTask.from_json(json.loads(os.environ[TASK_VARIABLE])))
    outcomes_by_check = run_checks(node_checks(sources.task.checks), sources)
    outcomes = {name: outcome.to_json() for name, outcome in outcomes_by_check.items() if outcome is not None}
    answer({"sent": sources.task.sent, "began": began, "ended": time.time(), "outcomes": outcomes})
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
