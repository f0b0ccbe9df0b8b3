"""The flight recorder is set up by the names that torch has: it warns of a name that it has replaced."""

from __future__ import annotations

import pytest

from zslurm.job.rank import name_recorder_variables

OLD = {"TORCH_NCCL_TRACE_BUFFER_SIZE": "2000"}


@pytest.mark.parametrize(
    ("torch", "given", "expected"),
    [
        ("2.13.0+cpu", OLD, {"TORCH_FR_BUFFER_SIZE": "2000", "TORCH_FR_DUMP_TEMP_FILE": "dump"}),
        ("2.10.0", {}, {"TORCH_FR_DUMP_TEMP_FILE": "dump"}),
        ("2.9.1", OLD, OLD | {"TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "dump"}),
        (
            "2.13.0",
            {"TORCH_FR_BUFFER_SIZE": "9", "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000"},
            {"TORCH_FR_BUFFER_SIZE": "9", "TORCH_FR_DUMP_TEMP_FILE": "dump"},
        ),
        ("2.13.0", {"TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "mine"}, {"TORCH_FR_DUMP_TEMP_FILE": "mine"}),
        ("2.9.1", {"TORCH_FR_DUMP_TEMP_FILE": "mine"}, {"TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "mine"}),
    ],
)
def test_variables_get_the_names_of_this_torch(
    torch: str, given: dict[str, str], expected: dict[str, str]
) -> None:
    environ = dict(given)
    name_recorder_variables(environ, "dump", torch)
    assert environ == expected
