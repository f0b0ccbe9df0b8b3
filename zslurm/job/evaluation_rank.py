"""`python -m zslurm.job.evaluation_rank FOLDER`: one rank of an evaluation, as `evaluation_step.py` starts it.

It reads whose answers are wanted and then one file of requests after another from the folder, and writes its
answers there, each as a file that appears at once.
"""

from __future__ import annotations

import json
import os
import sys
import time
from itertools import count
from pathlib import Path
from typing import Any

from zslurm.core.files import read_json, write_atomically
from zslurm.slurm.environment import node_name, step_info
from zslurm.train.evaluation.on_ranks import Failure, Message, RankOf, Request, serve
from zslurm.train.evaluation.scoring import Work

REQUEST = "request.json"
WORK = "work-{number:05}.json"
ANSWERS = "rank-{rank:05}-{number:05}.json"
LOOK_S = 0.3
_FAILURE = "failure-{rank:05}.json"


def wait_for(path: Path) -> dict[str, Any] | None:
    """Wait for a file that another node writes, and return what it holds; None if its folder is gone."""
    while path.parent.is_dir():
        list(path.parent.iterdir())  # makes an NFS client look again, instead of remembering "no such file"
        if (content := read_json(path)) is not None:
            return content
        time.sleep(LOOK_S)
    return None


def main() -> None:
    """Run as a program."""
    folder, info = Path(sys.argv[1]), step_info(os.environ)
    request = read_json(folder / REQUEST)
    assert request is not None, f"{folder} has no request"
    received, sent, failed = count(), count(), 0

    def receive() -> Work | None:
        content = wait_for(folder / WORK.format(number=next(received)))
        return None if content is None or "end" in content else Work.of(content)

    def send(message: Message) -> None:
        nonlocal failed
        if isinstance(message, Failure):
            failed = 1
            fields = {**message._asdict(), "rank": info.rank, "node": node_name()}
            write_atomically(folder / _FAILURE.format(rank=info.rank), json.dumps(fields), private=True)
            return
        path = folder / ANSWERS.format(rank=info.rank, number=next(sent))
        write_atomically(path, json.dumps({"answers": list(message.items())}), private=True)

    who = RankOf(info.rank, info.world_size, info.local_rank, info.local_world_size)
    serve(who, Request.of(request), receive, send)
    sys.exit(failed)


if __name__ == "__main__":
    main()
