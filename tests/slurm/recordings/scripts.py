"""Slurm's commands as scripts that write down how they were called; tests/on_slurm has the real ones."""

from __future__ import annotations

from pathlib import Path

from zslurm.slurm.client import SlurmClient
from zslurm.slurm.jobs import FIELD_END, QUEUE_FIELDS, RECORD_END


class Calls:
    """A directory of commands that is the whole PATH of `client`.

    Attributes:
        job_id: the one job. It runs until it is requeued, and then completes.
        excluded: nodes that it excludes, as squeue shows them.
        refuses: pattern of scontrol's arguments that it refuses, with `refusal`.
        misses: pattern of those that it does not answer, once, though it does what it is asked for.
        deaf: it does not do it either.
        ignores: pattern of those that it does not do, without a message.
        hides_nodes: the site has PrivateData=nodes.
    """

    def __init__(
        self,
        directory: Path,
        *,
        job_id: str = "12",
        excluded: str = "(null)",
        refuses: str = "never",
        misses: str = "never",
        deaf: bool = False,
        ignores: str = "never",
        hides_nodes: bool = False,
        refusal: str = "Job/step already completing or completed",
    ) -> None:
        self.directory, self._log = directory, directory / "calls"
        state = directory / "state"
        state.write_text("RUNNING\n")
        shown_excluded = directory / "excluded"
        shown_excluded.write_text(f"{excluded}\n")
        values = {"JobArrayID": job_id, "State": "$state", "RestartCnt": "$restarts"}
        record = FIELD_END.join(values.get(field, "") for field in QUEUE_FIELDS) + RECORD_END
        show_excluded = f'read -r shown < {shown_excluded}; echo "$shown"'
        show_job = (
            f'read -r state < {state}; restarts=0; [ "$state" = RUNNING ] || restarts=1; printf "%s" "{record}"'
        )
        shown = f'case "$*" in *%x*) {show_excluded};; *) {show_job};; esac'
        self._write("squeue", shown)
        miss = f"""case "$*" in {misses}*)
    [ -e {directory}/missed ] || {{ : > {directory}/missed; echo "Socket timed out on send/recv" >&2; exit 1; }}
esac"""
        obey = f"""case "$*" in requeue*)
    read -r state < {state}
    [ "$state" = RUNNING ] || {{ echo "Job is pending execution" >&2; exit 1; }}
    echo COMPLETING > {state}
esac
case "$*" in {ignores}*) ;; *ExcNodeList=*)
    value="$*"; value="${{value#*ExcNodeList=}}"; echo "${{value%% *}}" > {shown_excluded}
esac"""
        refuse = f'case "$*" in {refuses}*) echo "{refusal}" >&2; exit 1;; esac'
        order = [miss, obey] if deaf else [obey, miss]
        self._write("scontrol", "\n".join([f'echo "$@" >> {self._log}', refuse, *order]))

        denied = 'echo "slurm_load_node: Access/permission denied" >&2; exit 1'
        self._write("sinfo", f"echo sinfo >> {self._log}; {denied if hides_nodes else 'exit 0'}")

    def _write(self, program: str, script: str) -> None:
        path = self.directory / program
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)

    @property
    def made(self) -> list[str]:
        """What scontrol was called with, without questions."""
        calls = self._log.read_text().splitlines() if self._log.exists() else []
        return [call for call in calls if not call.startswith(("show", "--oneliner show", "sinfo"))]

    def asked(self, program: str) -> list[str]:
        """Return the calls of sinfo."""
        calls = self._log.read_text().splitlines() if self._log.exists() else []
        return [call for call in calls if call.startswith(program)]

    @property
    def client(self) -> SlurmClient:
        return SlurmClient({"PATH": str(self.directory)})
