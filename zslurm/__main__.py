"""The program `zslurm`, and `python -m zslurm`.

Ctrl-C while modules are imported ends the process without a traceback; afterwards Python handles it.
"""

from __future__ import annotations

import signal
from typing import NoReturn


def main() -> NoReturn:
    """Run the command line and leave with its exit code."""
    handles = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # else a caller ignores it, as nohup
    if handles:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from zslurm.cli.main import main as run

    if handles:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    run()


if __name__ == "__main__":
    main()
