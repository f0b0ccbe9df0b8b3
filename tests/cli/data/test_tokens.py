"""`zslurm data build` of tokens that exist already."""

from __future__ import annotations

from tests.cli.commands import Shell
from tests.train.data.build.test_tokenized import DOCUMENTS, megatron
from zslurm.core.errors import Exit
from zslurm.train.data.build.tokenizer import train_tokenizer


def test_the_command_line_takes_tokens_with_their_tokenizer(shell: Shell) -> None:
    megatron(shell.directory / "corpus", DOCUMENTS)
    tokenizer = shell.directory / "tokenizer.json"
    train_tokenizer(["some text that is trained on"], 512).save(str(tokenizer))
    done = shell.zslurm("data", "build", "corpus.idx", "--vocab-size", "512", "--out", "out")
    assert done.code == Exit.USAGE and "corpus.idx has tokens: give --tokenizer" in done.stderr
    done = shell.zslurm.ok("data", "build", "corpus.idx", "--tokenizer", tokenizer, "--out", "out")
    assert "3 documents did not end with" in done.stderr and "11 tokens of " in done.stderr
    shell.zslurm.ok("data", "verify", "out")
    again = shell.zslurm("data", "build", "corpus.idx", "--tokenizer", tokenizer, "--out", "out")
    assert again.code == Exit.USAGE and "exists; name another directory" in again.stderr
