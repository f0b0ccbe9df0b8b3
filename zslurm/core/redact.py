"""Take secrets out of text and data that others may read: by the name of a value, and by its shape.

By name: `HF_TOKEN=...`, `password: ...`, `--api-key ...`. By shape, whatever it is called: tokens of the services
that people train with, private keys, JSON web tokens, passwords inside URLs. A reference to a secret (`$HF_TOKEN`,
a path to a file) is none. What this cannot know is a secret without a telling name or shape: such a value belongs
into a file that the job reads.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

REDACTED = "[redacted]"
_SHORTEST_KNOWN = 6

# --- by shape --------------------------------------------------------------------------------------------------

_SHAPES: dict[str, str] = {
    "a Hugging Face token": r"\b(?:hf|api_org)_[A-Za-z0-9]{30,}",
    "a GitHub token": r"\bgh[pousr]_[A-Za-z0-9]{36,}|\bgithub_pat_[A-Za-z0-9_]{40,}",
    "a GitLab token": r"\bgl(?:pat|ptt|dt|rt)-[A-Za-z0-9_-]{20,}",
    "an AWS access key": r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b",
    "an API key": r"\bsk-(?:[A-Za-z0-9]+-)*[A-Za-z0-9_]{20,}|\bAIza[A-Za-z0-9_-]{35}",
    "a Slack token": r"\bxox[abeprs]-[A-Za-z0-9-]{10,}",
    "a JSON web token": r"\beyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{4,}\.[A-Za-z0-9_-]*",
    "a private key": r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)",
}
_SHAPE = {what: re.compile(pattern, re.DOTALL) for what, pattern in _SHAPES.items()}
_IN_URL = re.compile(r"(?P<before>[A-Za-z][A-Za-z0-9+.-]{0,30}+://[^\s/:@'\"]*:)(?P<secret>[^\s/@'\"]+)(?=@)")
_IN_HEADER = re.compile(
    r"(?P<before>\bAuthorization['\"]?\s*[:=]\s*['\"]?(?:Bearer|Basic|token)\s+)[^\s'\"]+", re.I
)

# --- by name ---------------------------------------------------------------------------------------------------

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_SECRET_ENDS = tuple("PASSWORD PASSWD PASSPHRASE SECRET TOKEN APIKEY JWT CREDENTIAL CREDENTIALS".split())
# What may follow the word without making the value harmless: AWS_SECRET_ACCESS_KEY, TOKEN_2.
_BEHIND = {"ACCESS", "KEY", "VALUE", "ID", "STRING", "BASE64", "B64"}
# A token of a tokenizer, a key of a mapping: words before TOKEN and KEY that make them ordinary.
_TEXT_TOKENS = {"BOS", "EOS", "PAD", "UNK", "MASK", "SEP", "CLS", "END", "START", "STOP", "NEXT", "LAST", "PER"}
_SECRET_KEYS = {"API", "ACCESS", "AUTH", "PRIVATE", "ENCRYPTION", "SIGNING", "ACCOUNT", "STORAGE", "MASTER", "SSH"}
_SERVICES = {"OPENAI", "ANTHROPIC", "WANDB", "COMET", "NEPTUNE", "HF", "GITHUB", "AWS", "AZURE", "GCP", "MLFLOW"}
# NUM_PASS, OLDPWD, or PASS alone.
_NO_PASSWORDS = {"FORWARD", "BACKWARD", "OLD", "NUM", ""}
# Libraries whose variables tune them: NCCL_IB_PKEY and the like are settings, never secrets.
_TUNING = ("NCCL_", "RCCL_", "TORCH_NCCL_", "UCX_", "FI_", "HSA_", "ROCR_", "HIP_", "OMP_", "PMIX_")


def is_secret_name(name: str) -> bool:
    """Return whether a value of this name (of a variable, a key, an option) is a secret."""
    if name.upper().startswith(_TUNING):
        return False
    words = [word.upper() for word in _WORD.findall(name.replace("_", " ").replace("-", " "))]
    while len(words) > 1 and words[-1].isdigit():
        words.pop()
    for index, word in enumerate(words):
        later_words, before = words[index + 1 :], words[index - 1] if index else ""
        if word == "TOKEN" and (before in _TEXT_TOKENS or later_words == ["ID"]):  # of a tokenizer
            continue
        telling = word.endswith(_SECRET_ENDS) and all(later in _BEHIND for later in later_words)
        key = word == "KEY" and not later_words and before in _SECRET_KEYS | _SERVICES
        short = word in ("PASS", "PAT", "PWD") and not later_words and before not in _NO_PASSWORDS
        if telling or key or short:
            return True
    return False


# --- text ------------------------------------------------------------------------------------------------------

_SHELL_WORD = r"(?:'[^'\n]*'|\"(?:\\.|[^\"\\\n])*\"|\\.|[^\s'\"\\;&|<>()])+"
# Bounded, and never given back: else a line of some 10,000 characters without a space takes seconds. Of a longer
# name the end is looked at, which shows what it is.
_NAME = r"[A-Za-z_][A-Za-z0-9_.-]{0,200}+"
# NAME=value in a shell; the name may be part of `export NAME=`, `--option=`, or of a URL's query.
_ASSIGNED = re.compile(rf"(?P<before>(?:--)?(?P<name>{_NAME})=)(?P<value>{_SHELL_WORD})")
# --option value
_OPTION = re.compile(rf"(?P<before>(?<!\S)--(?P<name>[a-z][a-z0-9-]*)[ \t]+)(?P<value>(?!-){_SHELL_WORD})")
# "name": "value", name = 'value', and the plain scalars of YAML
_QUOTED = re.compile(
    rf"(?P<before>(?P<q>['\"]?)(?P<name>{_NAME})(?P=q)\s*[:=]\s*)"
    r"(?P<value>'(?:\\.|[^'\\\n])*'|\"(?:\\.|[^\"\\\n])*\")"
)
_SCALAR = re.compile(
    r"(?P<before>^[+\- \t]*(?P<name>[A-Za-z_][A-Za-z0-9_-]*):[ \t]+)"
    r"(?P<value>[^\s'\"\[\]{}()#&*,][^\n'\"(){}\[\]]*)$",
    re.MULTILINE,
)
_KEYWORDS = frozenset("str int float bool bytes None null true false True False ~ Any".split())


def redact(text: str, known: Iterable[str] = ()) -> str:
    """Return the text with every secret that is recognized replaced; anything else stays as it is.

    Values in `known` are secrets too; those of a few characters are left alone, they are in every text.
    """
    for value in known:
        if len(value) >= _SHORTEST_KNOWN:
            text = text.replace(value, REDACTED)
    for pattern in _SHAPE.values():
        text = pattern.sub(REDACTED, text)
    text = _IN_URL.sub(rf"\g<before>{REDACTED}", text)
    text = _IN_HEADER.sub(rf"\g<before>{REDACTED}", text)
    for pattern in (_ASSIGNED, _OPTION, _QUOTED, _SCALAR):
        text = pattern.sub(_without_value, text)
    return text


def _without_value(match: re.Match[str]) -> str:
    value = match["value"]
    if not is_secret_name(match["name"]) or _is_harmless(value):
        return match[0]
    quote = value[0] if value[0] in "'\"" and value[-1] == value[0] else ""
    return f"{match['before']}{quote}{REDACTED}{quote}"


def _is_harmless(value: str) -> bool:
    """Nothing, a reference, a number, a type: what may follow a secret's name without giving it away."""
    bare = value.strip().strip("'\"")
    return (
        not bare
        or bare.startswith(("$", "<", REDACTED))
        or bare in _KEYWORDS
        or bare.partition("|")[0].strip() in _KEYWORDS
        or (bare.isdigit() and len(bare) < 6)
    )


def shape_of_secret(text: str) -> str | None:
    """Return what the text looks like, in words, if it holds something shaped as a secret; else None."""
    what_found = next((what for what, pattern in _SHAPE.items() if pattern.search(text)), None)
    if what_found is None and _IN_URL.search(text):
        return "a URL with a password"
    return what_found


# --- data ------------------------------------------------------------------------------------------------------


def redact_mapping(mapping: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy in which values of secret names, and secrets inside other texts, are replaced.

    However deep.
    """
    return {key: redact_value(key, value) for key, value in mapping.items()}


def redact_value(name: str, value: Any) -> Any:
    """Return the value, or what may be shown of it if `name` (of the last key) or its shape is a secret's."""
    if isinstance(value, Mapping):
        return redact_mapping(value)
    if isinstance(value, (list, tuple)):
        return [redact_value(name, item) for item in value]
    if isinstance(value, str):
        if is_secret_name(name) and not _is_harmless(value):
            return REDACTED
        return redact(value)
    return value
