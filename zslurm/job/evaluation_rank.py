"""`python -m zslurm.job.evaluation_rank FOLDER`: one rank that scores tasks, as `evaluation_step.py` starts it.

It reads the request from the folder, and writes each message there as a file that appears at once.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

from zslurm.core.files import read_json, write_atomically
from zslurm.slurm.environment import node_name, step_info
from zslurm.train.evaluation.on_ranks import Failure, Message, RankOf, Request, score_as_rank
from zslurm.train.evaluation.scoring import Share

REQUEST = "request.json"
MESSAGE = "rank-{rank:05}-{number:05}.json"
_FAILURE = "failure-{rank:05}.json"


def message_of(fields: dict[str, Any]) -> Message:
    """Return the message of a file."""
    if "values" not in fields:
        return None
    return Share(np.array(fields["values"], np.float64), fields["tokens"], fields["samples"])


def main() -> None:
    """Run as a program."""
    folder, info = Path(sys.argv[1]), step_info(os.environ)
    request = read_json(folder / REQUEST)
    assert request is not None, f"{folder} has no request"
    sent = failed = 0

    def send(message: Message) -> None:
        nonlocal sent, failed
        if isinstance(message, Failure):
            failed = 1
            fields = {**message._asdict(), "rank": info.rank, "node": node_name()}
            write_atomically(folder / _FAILURE.format(rank=info.rank), json.dumps(fields), private=True)
            return
        fields = {}
        if message is not None:
            fields = {"values": message.values.tolist(), "tokens": message.tokens, "samples": message.samples}
        path = folder / MESSAGE.format(rank=info.rank, number=sent)
        write_atomically(path, json.dumps(fields), private=True)
        sent += 1

    who = RankOf(info.rank, info.world_size, info.local_rank, info.local_world_size)
    score_as_rank(who, Request.of(request), send)
    sys.exit(failed)


if __name__ == "__main__":
    main()
