"""What a program of zslurm logs: with its prefix, without secrets, and never at the cost of the program."""

from __future__ import annotations

import errno
import io
import logging
import os
import sys
from collections.abc import Iterator

import pytest

from zslurm.core import log

LOG = logging.getLogger("zslurm.aegis.anything")


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    logger = logging.getLogger("zslurm")
    before = logger.handlers, logger.level
    yield
    logger.handlers, logger.level = before


def test_each_message_has_the_prefix_and_goes_to_one_stream(capsys: pytest.CaptureFixture[str]) -> None:
    log.set_up("supervisor: ", "stdout")
    log.set_up("supervisor: ", "stdout")
    LOG.info("run_ended %s", "outcome=1")
    LOG.debug("unseen")
    assert tuple(capsys.readouterr()) == ("supervisor: run_ended outcome=1\n", "")


def test_without_a_set_up_nothing_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    logging.getLogger("zslurm").handlers = []
    LOG.info("unseen")
    assert tuple(capsys.readouterr()) == ("", "")


def test_secrets_are_redacted(capsys: pytest.CaptureFixture[str]) -> None:
    log.set_up()
    LOG.error("HF_TOKEN=%s", "hf_" + "x" * 34)
    assert capsys.readouterr().err == "HF_TOKEN=[redacted]\n"


class Full(io.StringIO):
    """A stream on a full disk."""

    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_stream_that_cannot_be_written_costs_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log.set_up("supervisor: ", "stdout")
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", Full())
        LOG.info("lost")
    LOG.info("next")
    assert tuple(capsys.readouterr()) == ("supervisor: next\n", "")
