"""`zslurm generate --slurm` on a real Slurm: ranks on two nodes divide the cache of one prompt."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator

import pytest

from tests import forked
from tests.cli.trained import trained_run
from tests.on_slurm.cluster.slurm_cluster import SlurmCluster
from tests.on_slurm.cluster.user import User, add_to_profile, at_work
from zslurm.core.errors import Exit

pytestmark = pytest.mark.slurm


@pytest.fixture
def user(slurm_cluster: SlurmCluster) -> Iterator[User]:
    """The user with a run that was really trained; jobs and ranks are forked from a process that has torch."""
    with at_work(slurm_cluster, "generate-test") as person:
        trained_run(person.directory)
        account = person.cluster.user
        for path in [person.directory, *person.directory.rglob("*")]:
            shutil.chown(path, account.pw_uid, account.pw_gid)
        env = person.cluster.forking([*forked.RANKS, *forked.OTHERS, "zslurm"], torch=True)
        add_to_profile(person.cluster, f"  env: {json.dumps(env)}\n")
        yield person


def test_ranks_on_two_nodes_make_the_text_of_one(user: User) -> None:
    words = ("generate", "first", "--prompt", "The quick", "-n", "8", "--json")
    alone = json.loads(user.zslurm(*words, torch=True))
    done = user.cluster.zslurm(*words, "--slurm", "--nodes", "2", "--ranks", "2", cwd=user.directory, torch=True)
    assert json.loads(done.stdout)["tokens"] == alone["tokens"]
    tools = user.cluster.instance.user / "home" / ".local" / "state" / "zslurm" / "tools"
    assert list(tools.iterdir()) == [], "nothing is left of the job's files"
    code, said = user.fails("generate", "first", "--prompt", "a", "--nodes", "2", torch=True)
    assert (code, said.count("\n")) == (Exit.USAGE, 1)
    assert said.startswith("zslurm: --nodes 2 needs --slurm")
    code, said = user.fails("generate", "first", "--prompt", "-", "--slurm", torch=True)
    assert (code, said) == (
        Exit.USAGE,
        "zslurm: --slurm: the job has no stdin; give --prompt TEXT, or --prompts FILE\n",
    )
