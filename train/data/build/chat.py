"""Chat templates: a conversation as the text that a model reads, and which of it the assistant said.

The template is the tokenizer's: `chat_template.jinja` next to tokenizer.json, or `chat_template` of
tokenizer_config.json, rendered by jinja2's immutable sandbox with what templates of transformers expect (loop
controls, `raise_exception`, `tojson`, the special tokens, `{% generation %}`). The clock is left out
(`strftime_now` is not defined): the same conversations give the same bytes on any day.

What the assistant said is what is learned:

    {% generation %}    in the template marks it, if the author put it there
    otherwise           it is what each of its messages adds to the conversation before it, rendered up to where
                        the assistant's turn begins. A template that renders the beginning of a conversation
                        differently once it continues (one that drops earlier reasoning) cannot be looked at in
                        this way and is refused

Tokens of the template that are special are encoded as such, and so are those that a message spells, as
transformers does it: do not build from conversations of strangers without looking for them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import CallBlock, Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from zslurm.checkpoint_tools.plain import Unexpected, load_json
from zslurm.train.errors import DataError

CONFIG_FILE = "tokenizer_config.json"
TEMPLATE_FILE = "chat_template.jinja"
_DEFAULT = "default"  # of several templates by name
_ASSISTANT = "assistant"


class Rendered(NamedTuple):
    """A conversation as text, and what of it the assistant said: [start, end) of its characters, in order."""

    text: str
    learned: tuple[tuple[int, int], ...]


class RefusedConversation(Exception):
    """The template cannot render this conversation; why, in a clause."""


@dataclass(frozen=True)
class ChatTemplate:
    """A template, and the special tokens that it may write.

    Attributes:
        source: the template.
        tokens: such as {"bos_token": "<bos>"}.
        where: the file, for people.
    """

    source: str
    tokens: tuple[tuple[str, str], ...]
    where: str

    @property
    def sha256(self) -> str:
        """Return a hash of what decides how conversations are rendered, in hex."""
        return hashlib.sha256(json.dumps([self.source, self.tokens]).encode()).hexdigest()

    @classmethod
    def of_tokenizer(cls, tokenizer: Path, template: Path | None = None) -> ChatTemplate:
        """Return the template of the tokenizer in a directory or file; `template` is a file to use instead.

        Raises:
            DataError: there is none, or it is no template.
        """
        directory = tokenizer if tokenizer.is_dir() else tokenizer.parent
        config = _read_config(directory / CONFIG_FILE)
        path = template or directory / TEMPLATE_FILE
        if template is not None or path.is_file():
            try:
                source = path.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise DataError(f"{path}: the chat template cannot be read: {error}") from error
        else:
            path, source = directory / CONFIG_FILE, _template_of(config, directory)
        named = {name: value["content"] if isinstance(value, dict) else value for name, value in config.items()
                 if name.endswith("_token")}  # fmt: skip
        tokens = tuple(sorted((name, value) for name, value in named.items() if isinstance(value, str)))
        try:
            _compiled(source)
        except jinja2.TemplateSyntaxError as error:
            raise DataError(f"{path}: is no chat template: line {error.lineno}: {error.message}") from error
        return cls(source, tokens, str(path))

    def render(self, messages: Sequence[Mapping[str, Any]]) -> Rendered:
        """Return a conversation as text.

        Raises:
            RefusedConversation: the template refuses it or fails, or does not show what the assistant said.
        """
        spans: list[tuple[int, int]] = []
        text = self._text(messages, spans)
        if not _compiled(self.source).marks:
            spans = [span for index, message in enumerate(messages) if message["role"] == _ASSISTANT
                     for span in self._added(messages, index, text)]  # fmt: skip
        return Rendered(text, tuple(span for span in spans if span[0] < span[1]))

    def _added(self, messages: Sequence[Mapping[str, Any]], place: int, text: str) -> list[tuple[int, int]]:
        """Return the range of the text that the message at `place` adds."""
        before = self._text(messages[:place], add_generation_prompt=True) if place else ""
        after = text if place == len(messages) - 1 else self._text(messages[: place + 1])
        if not (after.startswith(before) and text.startswith(after)):
            raise RefusedConversation(
                f"the beginning of the conversation, up to message {place}, is rendered differently when it "
                "continues, so that nothing shows what the assistant said; use a template with {% generation %}"
            )
        return [(len(before), len(after))]

    def _text(
        self,
        messages: Sequence[Mapping[str, Any]],
        spans: list[tuple[int, int]] | None = None,
        *,
        add_generation_prompt: bool = False,
    ) -> str:
        compiled = _compiled(self.source)
        pieces: list[str] = []
        compiled.tracker.begin(pieces, [] if spans is None else spans)
        try:
            for piece in compiled.template.generate(
                messages=messages, add_generation_prompt=add_generation_prompt, **dict(self.tokens)
            ):
                pieces.append(piece)
        except jinja2.TemplateError as error:
            raise RefusedConversation(" ".join(str(error).split()) or type(error).__name__) from error
        except Exception as error:  # whatever an expression of the template runs into
            raise RefusedConversation(f"{type(error).__name__}: {' '.join(str(error).split())}") from error
        return "".join(pieces)


class _Tracker(Extension):
    """`{% generation %}`: notes the range of its body in the text that is being rendered."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's interface)

    def __init__(self, environment: jinja2.Environment) -> None:
        super().__init__(environment)
        self._pieces: list[str] = []
        self._spans: list[tuple[int, int]] = []

    def begin(self, pieces: list[str], spans: list[tuple[int, int]]) -> None:
        """Note spans of the text whose `pieces` grow as it is rendered."""
        self._pieces, self._spans = pieces, spans

    def parse(self, parser: Parser) -> Node:
        """Make a call of the block's body."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_note"), [], [], body).set_lineno(line)

    def _note(self, caller: Any) -> str:
        text = str(caller())
        start = sum(map(len, self._pieces))
        self._spans.append((start, start + len(text)))
        return text


class _Compiled(NamedTuple):
    """A template that can be rendered, by one thread at a time; `marks`: it has `{% generation %}`."""

    template: jinja2.Template
    tracker: _Tracker
    marks: bool


@lru_cache(maxsize=4)
def _compiled(source: str) -> _Compiled:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Tracker, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    template = environment.from_string(source)
    tracker = environment.extensions[_Tracker.identifier]
    assert isinstance(tracker, _Tracker)
    marks = any(
        getattr(block.call, "node", None) is not None and getattr(block.call.node, "name", "") == "_note"
        for block in environment.parse(source).find_all(CallBlock)
    )
    return _Compiled(template, tracker, marks)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """Return JSON without jinja2's escapes for HTML, as templates of transformers expect."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _read_config(path: Path) -> dict[str, Any]:
    """Return tokenizer_config.json; nothing if there is none."""
    try:
        config = load_json(path.read_bytes())
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error
    except Unexpected as error:
        raise DataError(f"{path}: is not a tokenizer's configuration: {error}") from error
    return config if isinstance(config, dict) else {}


def _template_of(config: Mapping[str, Any], directory: Path) -> str:
    """Return the template in tokenizer_config.json: the only one, or that named `default`."""
    template = config.get("chat_template")
    if isinstance(template, list):
        by_name = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = by_name.get(_DEFAULT)
    if not isinstance(template, str):
        raise DataError(
            f"{directory}: has no chat template, neither {TEMPLATE_FILE} nor `chat_template` in {CONFIG_FILE}; "
            "give one (--chat-template FILE), or the folder of a tokenizer that has one"
        )
    return template
