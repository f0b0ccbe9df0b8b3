"""What zslurm overrides of submitit and calls in it, by name and signature: a submitit that differs fails here.

pyproject.toml names the versions that are supported. Another one is tried by installing it and running
tests/submit/plugin and tests/on_slurm/test_submitit.py.
"""

from __future__ import annotations

import inspect
import tomllib
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import pytest
import submitit
from packaging.requirements import Requirement
from submitit.auto import auto
from submitit.core import core, job_environment, utils
from submitit.slurm import slurm

from tests.checkout import ROOT
from zslurm.submit.plugin.executor import ZslurmExecutor
from zslurm.submit.plugin.job import JobWatcher, ZslurmJob
from zslurm.submit.plugin.job_environment import ZslurmJobEnvironment
from zslurm.submit.slurm_launcher import _RunExecutor

SIGNATURES: dict[Callable[..., Any], list[str]] = {
    submitit.SlurmExecutor.__init__: ["self", "folder", "max_num_timeout", "max_pickle_size_gb", "python"],
    slurm.SlurmExecutor._internal_update_parameters: ["self", "kwargs"],
    slurm.SlurmExecutor._internal_process_submissions: ["self", "delayed_submissions"],
    slurm.SlurmExecutor._make_submission_file_text: ["self", "command", "uid"],
    slurm.SlurmExecutor._make_submission_command: ["self", "submission_file_path"],
    slurm.SlurmExecutor._num_tasks: ["self"],
    core.PicklingExecutor._submit_command: ["self", "command"],
    core.PicklingExecutor._throttle: ["self"],
    core.Job.__init__: ["self", "folder", "job_id", "tasks"],
    core.InfoWatcher.update: ["self"],
    slurm.SlurmInfoWatcher._make_command: ["self"],
    slurm.SlurmInfoWatcher.read_info: ["self", "string"],
    core.InfoWatcher.is_done: ["self", "job_id", "mode"],
    core.InfoWatcher.clear: ["self"],
    auto.flexible_init: ["cls", "folder", "kwargs"],
    auto.AutoExecutor._internal_update_parameters: ["self", "kwargs"],
    job_environment.JobEnvironment._handle_signals: ["self", "paths", "submission"],
    slurm.SlurmJobEnvironment._requeue: ["self", "countdown"],
    job_environment.SignalHandler.__init__: ["self", "env", "job_paths", "delayed"],
    job_environment.SignalHandler.bypass: ["self", "signum", "frame"],
    job_environment.SignalHandler.checkpoint_and_exit: ["self", "signum", "frame"],
    job_environment.SignalHandler.checkpoint_and_try_requeue: ["self", "signum", "frame"],
    utils.DelayedSubmission.set_timeout: ["self", "timeout_min", "max_num_timeout"],
    utils.JobPaths.move_temporary_file: ["self", "tmp_path", "name", "keep_as_symlink"],
    slurm.read_job_id: ["job_id"],
}

OVERRIDDEN: dict[type, set[str]] = {
    ZslurmExecutor: {
        "__init__",
        "affinity",
        "job_class",
        "_valid_parameters",
        "_internal_update_parameters",
        "_internal_process_submissions",
        "_make_submission_file_text",
        "_make_submission_command",
        "_submit_command",
        "_num_tasks",
    },
    _RunExecutor: {"__init__", "affinity", "_make_submission_file_text", "_num_tasks"},
    ZslurmJob: {"watcher"},
    JobWatcher: {"__init__", "update", "is_done", "clear"},
    ZslurmJobEnvironment: {"_handle_signals", "_requeue"},
}


@pytest.mark.parametrize("function", SIGNATURES, ids=lambda function: function.__qualname__)
def test_submitit_has_what_is_used_of_it(function: Callable[..., Any]) -> None:
    assert list(inspect.signature(inspect.unwrap(function)).parameters) == SIGNATURES[function]


@pytest.mark.parametrize("ours", OVERRIDDEN, ids=lambda ours: ours.__name__)
def test_nothing_else_is_overridden(ours: type) -> None:
    """Names of submitit's that a class defines again; a new one belongs into the list above."""
    (base,) = [base for base in ours.__mro__[1:] if base.__module__.startswith("submitit.")][:1]
    python_s = {"__module__", "__doc__", "__orig_bases__", "__parameters__", "__abstractmethods__", "_abc_impl"}
    assert {name for name in vars(ours) if hasattr(base, name)} - python_s == OVERRIDDEN[ours]


def test_the_module_s_docstring_lists_what_the_executor_overrides() -> None:
    import zslurm.submit.plugin.executor as module

    assert module.__doc__ is not None
    for name in OVERRIDDEN[ZslurmExecutor] - {"job_class"}:
        assert f"`{name}`" in module.__doc__


def test_the_installed_submitit_is_in_the_supported_range() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (needed,) = [Requirement(text) for text in project["dependencies"] if text.startswith("submitit")]
    assert {each.operator for each in needed.specifier} == {">=", "<"}
    assert needed.specifier.contains(version("submitit"))
