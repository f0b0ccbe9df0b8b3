"""submitit's own tests of its Slurm executor and of AutoExecutor, with our executor, jobs and job environment.

They come with the installed submitit: all run but those that are listed here with a reason.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping

import pytest
from submitit.auto import test_auto
from submitit.conftest import fast_forward_clock
from submitit.slurm import test_slurm

__all__ = ["fast_forward_clock"]

pytestmark = pytest.mark.usefixtures("our_classes")

OF_SLURM = {
    "test_get_default_parameters": "a function of submitit's that we call",
    "test_job_environment": "the name of the environment; test_plugin.py has ours",
    "test_make_sbatch_stderr": "submitit's text of a script; test_script.py has ours",
    "test_make_sbatch_string": "submitit's text of a script",
    "test_make_sbatch_string_gpu": "submitit's text of a script",
    "test_name": "the name of the executor; test_plugin.py has ours",
    "test_read_job_id": "a function of submitit's that we call",
    "test_slurm_weird_dir": "reads options as a shell; tests/submit/script/test_render.py as Slurm",
}
OF_AUTO = {
    "test_deprecated_argument": "asks for the cluster slurm; test_plugin.py has other clusters beside ours",
    "test_local_executor": "runs no job of ours",
    "test_python_executor": "runs no job of ours",
    "test_redirect_stdout_stderr": "runs no job of ours",
    "test_slurm_executor": "asks for the cluster slurm",
}


def of_module(module: types.ModuleType) -> dict[str, Callable[..., None]]:
    return {name: test for name, test in vars(module).items() if name.startswith("test_") and callable(test)}


def taken(module: types.ModuleType, left_out: Mapping[str, str]) -> dict[str, Callable[..., None]]:
    return {name: test for name, test in of_module(module).items() if name not in left_out}


@pytest.mark.parametrize(("module", "left_out"), [(test_slurm, OF_SLURM), (test_auto, OF_AUTO)])
def test_what_is_left_out_is_there(module: types.ModuleType, left_out: dict[str, str]) -> None:
    assert left_out.keys() <= of_module(module).keys()
    assert len(taken(module, left_out)) > len(left_out)


globals().update(taken(test_slurm, OF_SLURM) | taken(test_auto, OF_AUTO))
