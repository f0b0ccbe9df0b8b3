"""`zslurm.classify` and `zslurm.env` from Python."""

from __future__ import annotations

from pathlib import Path

import pytest

import zslurm

OOM = "torch.OutOfMemoryError: HIP out of memory. Tried to allocate 2.00 GiB. GPU 3 has 192 GiB in total.\n"


def test_a_log_is_classified_by_its_path_as_text_or_as_a_path(tmp_path: Path) -> None:
    log = tmp_path / "slurm-1.out"
    log.write_text(f"step 1\n{OOM}")
    for files in (log, str(log), [log], [str(log)]):
        found = zslurm.classify(files)
        assert found.root is not None
        assert found.root.finding.number == 2
        assert found.advice
    assert "HIP out of memory" in repr(found)


def test_a_log_that_is_not_there_or_is_a_directory_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(zslurm.NotFound, match=r"nix\.log: no such file; name log files"):
        zslurm.classify(tmp_path / "nix.log")
    with pytest.raises(zslurm.NotFound, match="is a directory; name the files in it"):
        zslurm.classify(tmp_path)


def test_the_environment_is_a_dictionary_that_knows_why() -> None:
    found = zslurm.env("mi300x-pollara", ["cluster.env.HF_TOKEN=hf_abcdefgh"])
    assert found["NCCL_IB_GID_INDEX"] == "1"
    reasons = {setting.name: setting.reason for setting in found.settings}
    assert "RoCE" in reasons["NCCL_IB_GID_INDEX"]
    assert (found.left_out, "HF_TOKEN" in found) == (["HF_TOKEN"], False)
    assert "<td>NCCL_IB_GID_INDEX</td><td>1</td>" in found._repr_html_()
    with pytest.raises(zslurm.NotFound, match="did you mean `mi300x-pollara`"):
        zslurm.env("mi300x-polara")
