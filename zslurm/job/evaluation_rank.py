"""`python -m zslurm.job.evaluation_rank FOLDER`: one rank of an evaluation, as `evaluation_step.py` starts it.

It reads whose answers are wanted and then one file of requests after another from the folder, and writes its
answers there, each as a file that appears at once.
"""

from __future__ import annotations

import json
import os
import sys
from itertools import count
from pathlib import Path

from zslurm.core.files import read_json, write_atomically
from zslurm.job.rank_setup import leave
from zslurm.job.ranks_step import REQUEST, wait_for, write_failure
from zslurm.slurm.environment import step_info
from zslurm.train.evaluation.on_ranks import Message, ScoringRequest, serve
from zslurm.train.evaluation.scoring import Work
from zslurm.train.parallel.local_ranks import Failure, RankOf

WORK = "work-{number:05}.json"
ANSWERS = "rank-{rank:05}-{number:05}.json"


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
            write_failure(folder, message, info.rank)
            return
        path = folder / ANSWERS.format(rank=info.rank, number=next(sent))
        write_atomically(path, json.dumps({"answers": list(message.items())}), private=True)

    who = RankOf(info.rank, info.world_size, info.local_rank, info.local_world_size)
    serve(who, ScoringRequest.of(request), receive, send)
    leave(failed)


if __name__ == "__main__":
    main()
