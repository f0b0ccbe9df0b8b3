"""An agent that says and does what a test wants: `python -m tests.aegis.fake_agent DIRECTORY RUN_DIR ...`.

It reports as a real agent does, and writes its arguments to DIRECTORY/words-NODE and every line that it receives
to DIRECTORY/told-NODE. A file in DIRECTORY makes it misbehave: on every node, or, with a node's name in place of
`all`, on that node alone:

    garbage-all     write what is no report, too
    weather-all     send reports of an unknown kind, too
    mute-all        say nothing
    blocked-all     neither read nor say anything
    exit-all        end with this exit code
"""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path

from zslurm.aegis.protocol import (
    MARK,
    AgentReport,
    Answer,
    Command,
    ProgressReport,
    Report,
    Stamp,
    decode_command,
    encode_report,
)
from zslurm.slurm.on_nodes.message_lines import split

PERIOD_S = 0.1


def main() -> None:
    directory = Path(sys.argv[1])
    node = os.environ.get("SLURMD_NODENAME", "here")
    seq = 0
    out = threading.Lock()

    def asked(what: str) -> Path | None:
        return next((path for name in (node, "all") if (path := directory / f"{what}-{name}").exists()), None)

    def stamp() -> Stamp:
        nonlocal seq
        seq += 1
        return Stamp(node, seq, time.time(), time.monotonic())

    def say(report: Report) -> None:
        with out:
            sys.stdout.write("".join(encode_report(report)))
            sys.stdout.flush()

    def listen() -> None:
        for line in sys.stdin:
            while asked("blocked"):
                time.sleep(PERIOD_S)
            with (directory / f"told-{node}").open("a") as told:
                told.write(line)
            command = decode_command(line)
            if isinstance(command, Command) and (not command.nodes or node in command.nodes):
                if command.do == "quit":
                    say(AgentReport(stamp(), "ended"))
                    os._exit(0)
                if not asked("mute"):
                    say(Answer(stamp(), command.id, True, values={"attempt": command.attempt}))
        os._exit(0)

    (directory / f"words-{node}").write_text(" ".join(sys.argv))
    draft = directory / f"pid-{node}.{os.getpid()}"
    draft.write_text(str(os.getpid()))
    draft.rename(directory / f"pid-{node}")  # whole from the first moment: a test reads it as soon as it is there
    threading.Thread(target=listen, daemon=True).start()
    started, unknown = False, 0
    while True:
        if (code := asked("exit")) is not None:
            os._exit(int(code.read_text()))
        if not started and not asked("mute"):
            say(AgentReport(stamp(), "started", {"pid": os.getpid()}))
            started = True
        if asked("garbage"):
            with out:
                sys.stdout.buffer.write(
                    b'zslurm-agent {"node": \nzslurm-agent \xff\xfe\n' + b"x" * 200_000 + b"\n"
                )
                sys.stdout.flush()
        if asked("weather") and unknown < 3:
            unknown += 1
            with out:
                sys.stdout.write("".join(split(MARK, (node, f"0{unknown}"), {"kind": "weather"})))
                sys.stdout.flush()
        if not asked("mute") and not asked("blocked"):
            say(ProgressReport(stamp(), 1))
        time.sleep(PERIOD_S)


if __name__ == "__main__":
    main()
