"""The tokenizer that goes with weights: the paths of its files, and what a folder that others load needs.

A run's tokenizer is the tokenizer.json next to its data; transformers' AutoTokenizer also wants to know which
tokens are special, so an export of a run adds a tokenizer_config.json. A published model's files are passed on
as they are: they may hold a chat template.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zslurm.train.data.build.tokenizer import end_token_id, file_sha256, load_tokenizer
from zslurm.train.data.schema import TOKENIZER_FILE
from zslurm.train.errors import DataError, HubError
from zslurm.train.hub.settings import TokenIds

CONFIG = "tokenizer_config.json"
OTHER_FILES = (
    CONFIG,
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "chat_template.jinja",
    "generation_config.json",
)
"""Files that a published model has next to its tokenizer.json, and that are passed on unread."""


@dataclass(frozen=True)
class TokenizerFiles:
    """A tokenizer.json and what belongs to it.

    Attributes:
        adds_special_tokens: text is to be encoded by the rules of tokenizer.json (special tokens are recognised,
            a first token may be added), not as plain text, which is how a run's data are encoded.
    """

    file: Path
    others: tuple[Path, ...] = ()
    adds_special_tokens: bool = False

    @staticmethod
    def in_directory(directory: Path) -> TokenizerFiles | None:
        """Return the tokenizer of a published model in `directory`; None if it has none."""
        file = directory / TOKENIZER_FILE
        others = tuple(directory / name for name in OTHER_FILES if (directory / name).is_file())
        return TokenizerFiles(file, others, adds_special_tokens=True) if file.is_file() else None

    @staticmethod
    def of_data(path: Path, sha256: str) -> TokenizerFiles:
        """Return the tokenizer of the bundle, or directory of bundles, at `path`.

        Raises:
            HubError: it is not there, or is not the one with this hash.
        """
        file = (path if path.is_dir() else path.parent) / TOKENIZER_FILE
        if not file.is_file():
            raise HubError(f"{file}: the run's tokenizer is not there; name it with --tokenizer")
        if file_sha256(file) != sha256:
            raise HubError(f"{file}: is not the tokenizer of the checkpoint's data; name that with --tokenizer")
        return TokenizerFiles(file)

    def check(self) -> None:
        """Raise HubError unless the file is a tokenizer."""
        try:
            load_tokenizer(self.file)
        except DataError as error:
            raise HubError(str(error)) from error

    def copy_to(self, directory: Path, settings: dict[str, Any]) -> list[str]:
        """Copy all files; if there is no tokenizer_config.json, write one of `settings`. Names of all."""
        for path in (self.file, *self.others):
            shutil.copyfile(path, directory / (TOKENIZER_FILE if path == self.file else path.name))
        names = [TOKENIZER_FILE, *(path.name for path in self.others)]
        if CONFIG not in names and settings:
            (directory / CONFIG).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
            names.append(CONFIG)
        return names


def token_ids(files: TokenizerFiles) -> TokenIds:
    """Return the special tokens of a tokenizer by their usual names.

    Raises:
        HubError: the file is not a tokenizer, or has no end-of-document token of a known name.
    """
    try:
        tokenizer = load_tokenizer(files.file)
        end = end_token_id(tokenizer)
    except DataError as error:
        raise HubError(str(error)) from error
    return TokenIds(pad=tokenizer.token_to_id("<pad>"), begin=tokenizer.token_to_id("<bos>"), end=(end,))


def config_of(files: TokenizerFiles, tokens: TokenIds, context: int | None) -> dict[str, Any]:
    """Return the tokenizer_config.json for a tokenizer that has none."""
    tokenizer = load_tokenizer(files.file)
    names = {"pad_token": tokens.pad, "bos_token": tokens.begin, "eos_token": next(iter(tokens.end), None)}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{key: tokenizer.id_to_token(number) for key, number in names.items() if number is not None},
        **({"model_max_length": context} if context is not None else {}),
        "clean_up_tokenization_spaces": False,
    }
