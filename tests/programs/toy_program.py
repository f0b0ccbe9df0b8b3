"""A program that trains nothing and needs no torch: the trainer of runs whose subject is not the trainer.

    toy_program.py STEPS [--save-every N] [--deaf] [--binary] [FAULT:STEP:RANK:ATTEMPT ...]

Each rank counts steps of STEP_S seconds, shows them with `zslurm.progress`, and meets its peers after each one.
Rank 0 notes each step in OUTPUT/steps.jsonl and saves its state as OUTPUT/saved/STEP.json, from which the next
attempt continues; the loss follows from that state alone. SIGTERM or SIGINT makes all ranks save and stop, unless
they are `--deaf`. A log that is `--binary` begins with bytes that are no text. A fault happens to a rank after a
step: `kill`, `hang`, `raise`, or `exit-CODE`; `*` stands for every rank or every attempt.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

from zslurm import progress

RANK, SIZE, ATTEMPT = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "ZSLURM_ATTEMPT"))
OUTPUT = Path(os.environ["ZSLURM_OUTPUT_DIR"])
SAVED = OUTPUT / "saved"
STEP_S = float(os.environ.get("STEP_S", "0.02"))
DECAY = 0.99
"""Of the state, and so of the loss, in each step."""
KEPT = 3
"""Saved states."""

asked: list[int] = []
"""Signals that have asked this rank to stop."""


class Peers:
    """The ranks of this attempt; rank 0 listens at the address of the rendezvous, and the others connect."""

    def __init__(self) -> None:
        """Wait for all of them."""
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        if RANK == 0:
            server = socket.create_server(("", port), backlog=SIZE)
            connections = [server.accept()[0] for _ in range(SIZE - 1)]
        else:
            connections = [_connected(host, port)]
        self._files = [connection.makefile("rwb", buffering=0) for connection in connections]

    def any(self, flag: bool) -> bool:
        """Return whether any rank gives True, once all ranks have come here.

        Raises:
            RuntimeError: a rank is lost.
        """
        if RANK == 0:
            flag = any([flag, *map(_read, self._files)])
        for file in self._files:
            file.write(b"%d" % flag)
        return flag if RANK == 0 else _read(self._files[0])


def _connected(host: str, port: int) -> socket.socket:
    while True:
        try:
            return socket.create_connection((host, port))
        except ConnectionRefusedError:  # rank 0 does not listen yet
            time.sleep(0.02)


def _read(file: socket.SocketIO) -> bool:
    if not (byte := file.read(1)):
        raise RuntimeError("Connection closed by peer")
    return byte == b"1"


def load() -> tuple[int, float]:
    """Return the newest saved step and its state; of a fresh run 0 and 1."""
    newest = max(SAVED.glob("*.json"), default=None)
    return (0, 1.0) if newest is None else (int(newest.stem), json.loads(newest.read_text()))


def save(step: int, state: float) -> None:
    """Write the state by rename on rank 0, and remove old ones."""
    if RANK != 0:
        return
    SAVED.mkdir(exist_ok=True)
    draft = SAVED / "draft"
    draft.write_text(json.dumps(state))
    draft.rename(SAVED / f"{step:08}.json")
    for old in sorted(SAVED.glob("*.json"))[:-KEPT]:
        old.unlink()
    print(f"saved step {step}", flush=True)


def fail(fault: str) -> None:
    """Do to this rank what a test asks for."""
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "hang":
        time.sleep(10_000)
    if fault == "raise":
        raise ValueError("a matrix has the wrong shape")
    sys.exit(int(fault.removeprefix("exit-")))


def train(steps: int, save_every: int, faults: list[list[str]]) -> None:
    """Count from the saved step to the last, or until the ranks are asked to stop."""
    peers = Peers()
    step, state = load()
    while step < steps:
        time.sleep(STEP_S)
        step, state = step + 1, state * DECAY
        progress.step(step, loss=(loss := 4.2 * state))
        if RANK == 0:
            note = {"kind": "step", "attempt": ATTEMPT, "step": step, "loss": loss, "time": time.time()}
            with (OUTPUT / "steps.jsonl").open("a") as file:
                file.write(json.dumps(note) + "\n")
            if step == 1 or step % 10 == 0:
                print(f"step {step}/{steps} loss {loss:.4f}", flush=True)
        for fault, *at in faults:
            if all(word in ("*", str(here)) for word, here in zip(at, (step, RANK, ATTEMPT), strict=True)):
                fail(fault)
        stop = peers.any(bool(asked))
        if stop or step == steps or step % save_every == 0:
            save(step, state)
        if stop:
            return
    if RANK == 0:
        print(f"completed {steps} steps", flush=True)


if __name__ == "__main__":
    words = sys.argv[2:]
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN if "--deaf" in words else lambda signum, _: asked.append(signum))
    faulthandler.register(signal.SIGRTMIN + 2)  # as zslurm's trainer: Aegis asks for the stacks of ranks that hang
    if "--binary" in words:
        sys.stdout.buffer.write(b"\xff\xfe no text \x00\n")
    every = int(words[words.index("--save-every") + 1]) if "--save-every" in words else 10
    train(int(sys.argv[1]), every, [word.split(":") for word in words if ":" in word])
