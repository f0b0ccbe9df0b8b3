"""The package as others meet it: light to import, its example true, its errors ordinary."""

from __future__ import annotations

import pickle
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

from zslurm import checkpoint_tools
from zslurm.checkpoint_tools import CheckpointError, Damaged, NoSpace, Tensor, VersionTooNew, errors

OURS = {"zslurm"}
FOREIGN = {"torch", "zslurm.train", "zslurm.core", "safetensors", "pydantic"}


def test_importing_it_imports_numpy_and_zlib_ng_and_nothing_else() -> None:
    program = f"""
import sys, numpy
before = set(sys.modules)
import zslurm.checkpoint_tools
new = {{name.partition(".")[0] for name in set(sys.modules) - before}}
print(*sorted(new - set(sys.stdlib_module_names) - {OURS | {"numpy", "zlib_ng"}}))
print(*sorted({FOREIGN} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_the_example_of_the_documentation_works(tmp_path: Path) -> None:
    blocks = re.findall(r"(?:^ {4}.*\n|^\n(?= {4}))+", checkpoint_tools.__doc__ or "", re.MULTILINE)
    programs = [textwrap.dedent(block) for block in blocks[1:]]
    assert len(programs) == 4
    names = {
        **vars(checkpoint_tools),
        "root": tmp_path,
        "rank": 0,
        "world_size": 1,
        "tensors": [Tensor("w", (5, 3), {"master": "F32"})],
        "master_chunk": np.arange(32, dtype=np.float32),
    }
    exec(programs[0], names)
    names["reports"] = [names["report"]]
    exec(programs[1], names)
    names["master_chunk"] = np.zeros(32, np.float32)
    exec(programs[2], names)
    np.testing.assert_array_equal(names["master_chunk"][:15], np.arange(15))
    exec(programs[3], names)
    np.testing.assert_array_equal(names["values"], np.arange(15).reshape(5, 3))
    np.testing.assert_array_equal(names["weights"]["w"], names["values"])


@pytest.mark.parametrize(
    "error", [Damaged(Path("shard"), "bad", "w", 3), NoSpace("full"), VersionTooNew("2")], ids=repr
)
def test_errors_survive_the_way_between_processes(error: CheckpointError) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert vars(copy) == vars(error)


def test_every_error_is_public_and_an_ordinary_exception() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    ours = [kind for kind in kinds if issubclass(kind, CheckpointError)]
    assert all(issubclass(kind, Exception) for kind in ours)
    assert {kind.__name__ for kind in ours} <= vars(checkpoint_tools).keys()
