"""`python -m zslurm.job.generation_rank FOLDER`: one rank of a text, as `generation_step.py` starts it.

All ranks divide the keys and values. The first one publishes the address of its store, and writes each token as a
file.
"""

from __future__ import annotations

import json
import os
import sys
from itertools import count
from pathlib import Path

from torch.distributed import TCPStore

from zslurm.core.files import read_json, write_atomically
from zslurm.job.own_address import rendezvous_host
from zslurm.job.rank_setup import leave
from zslurm.job.ranks_step import REQUEST, wait_for, write_failure
from zslurm.slurm.environment import step_info
from zslurm.train.decoding import DecodingRequest, generate_as_rank
from zslurm.train.parallel.local_ranks import Failure, RankOf

TOKEN = "token-{number:07}.json"
_STORE = "store.json"


def main() -> None:
    """Run as a program."""
    folder, info = Path(sys.argv[1]), step_info(os.environ)
    request = read_json(folder / REQUEST)
    assert request is not None, f"{folder} has no request"
    numbers, failed = count(), 0

    def send(message: int | Failure | None) -> None:
        nonlocal failed
        if isinstance(message, Failure):
            failed = 1
            write_failure(folder, message, info.rank)
        elif info.rank == 0:
            path = folder / TOKEN.format(number=next(numbers))
            write_atomically(path, json.dumps({"token": message}), private=True)

    who = RankOf(info.rank, info.world_size, info.local_rank, info.local_world_size)
    if info.rank == 0:
        host = rendezvous_host(os.environ)
        store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
        address = {"host": host, "port": store.port}
        write_atomically(folder / _STORE, json.dumps(address), private=True)
    elif (store_address := wait_for(folder / _STORE)) is None:
        sys.exit(1)  # nobody waits for the text
    else:
        store = TCPStore(store_address["host"], store_address["port"], is_master=False)
    generate_as_rank(who, DecodingRequest.of(request), store, send)
    leave(failed)


if __name__ == "__main__":
    main()
