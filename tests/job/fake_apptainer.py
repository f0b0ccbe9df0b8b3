"""An `apptainer` that runs the command here, as a real process below it, and writes down how it was called.

It keeps what matters of the real one: options until the image, an error in its words if the image or a bind is
missing, a working directory, and an environment that is passed through. As the real one does without a terminal
(apptainer's internal/pkg/runtime/engine/apptainer/monitor_linux.go), it passes signals on and stays until the
command has ended: Slurm kills what is left of a step as soon as its tasks have ended.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

SCRIPT = """#!{python} -S
import json, os, signal, subprocess, sys
words = sys.argv[1:]
assert words.pop(0) == "exec"
binds, directory, options = [], None, []
while words and words[0].startswith("-"):
    word = words.pop(0)
    if word == "--bind":
        binds.append(words.pop(0))
    elif word == "--pwd":
        directory = words.pop(0)
    else:
        options.append(word)
image = words.pop(0)
if not os.path.exists(image):
    sys.exit(f"FATAL:   could not open image {{image}}: failed to retrieve path for {{image}}: "
             f"lstat {{image}}: no such file or directory")
for bind in binds:
    source = bind.split(":")[0]
    if not os.path.exists(source):
        sys.exit(f"FATAL:   container creation failed: mount {{source}}->{{source}} error: no file")
os.chdir(directory)
call = {{"binds": binds, "options": options, "image": image, "command": words,
        "pythonpath": os.environ.get("PYTHONPATH"),
        "rank": os.environ.get("RANK", os.environ.get("SLURM_PROCID"))}}
with open({log!r}, "a") as log:
    log.write(json.dumps(call) + "\\n")
command, early = None, []
def pass_on(number, _):
    early.append(number) if command is None else command.send_signal(number)
for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2"):
    number = getattr(signal, name)
    if signal.getsignal(number) is not signal.SIG_IGN:  # what is ignored, the command ignores too
        signal.signal(number, pass_on)
command = subprocess.Popen(words)
for number in early:
    command.send_signal(number)
sys.exit(command.wait())
"""


class FakeApptainer:
    """The program in a directory of its own, and an image for it."""

    def __init__(self, directory: Path, python: Path = Path(sys.executable)) -> None:
        """Write the program.

        Args:
            directory: where.
            python: its own interpreter.
        """
        self.directory = directory / "bin"
        self.directory.mkdir()
        self.log = directory / "apptainer.jsonl"
        self.log.touch(mode=0o666)
        self.image = directory / "image.sif"
        self.image.touch()
        program = self.directory / "apptainer"
        program.write_text(SCRIPT.format(python=python, log=str(self.log)))
        program.chmod(0o755)

    @property
    def calls(self) -> list[dict[str, Any]]:
        """Every call so far."""
        return [json.loads(line) for line in self.log.read_text().splitlines()]
