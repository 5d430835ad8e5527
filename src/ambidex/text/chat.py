"""Chat messages to a prompt, through the model's own Jinja template, in a sandbox.

The names that a template may use are those of transformers: `messages`, `add_generation_prompt`, `bos_token`,
`eos_token`, `tools` and `documents` (both none), `raise_exception`, `strftime_now`, the filter `tojson`, the loop
controls, and the tag `generation`, which marks the model's turns and prints what it holds.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Final, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ambidex.core.errors import RequestError
from ambidex.core.units import MIB

_MESSAGE_KEYS: Final = ("role", "content")
_MAX_GROWTH: Final = 64
_MAX_EXTRA: Final = MIB
"""A prompt has at most `_MAX_GROWTH` times the characters of its messages, and `_MAX_EXTRA` more."""


class ChatTemplate:
    """A chat template, compiled.

    Args:
        source: the template's text; None if the model has none.
        bos, eos: strings of the tokens that begin and end a text, None if the model has none.

    Raises:
        RequestError: there is no template, or it is not valid Jinja.
    """

    def __init__(self, source: str | None, bos: str | None, eos: str | None) -> None:
        if source is None:
            raise RequestError(
                "the model has no chat template: use `generate` with a plain prompt, or give --chat-template FILE"
            )
        try:
            self._template = _environment().from_string(source)
        except TemplateSyntaxError as error:
            raise RequestError(f"the chat template is not valid in line {error.lineno}: {error.message}") from error
        tokens = {"bos_token": bos, "eos_token": eos}
        self._tokens = {name: token for name, token in tokens.items() if token is not None}

    def render(self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool = True) -> str:
        """The prompt for these messages.

        It holds the special tokens as text: encode it with `add_special=False`.

        Args:
            messages: `{"role": …, "content": …}` each, both strings.
            add_generation_prompt: end with the beginning of the model's turn.

        Raises:
            RequestError: there is no message, one has other keys or values, or the template refuses them.
        """
        _check_messages(messages)
        limit = _MAX_GROWTH * sum(len(message["content"]) for message in messages) + _MAX_EXTRA
        parts: list[str] = []
        num_chars = 0
        for part in self._render_parts(messages, add_generation_prompt):
            parts.append(part)
            if (num_chars := num_chars + len(part)) > limit:
                raise RequestError(f"the chat template makes more than {limit} characters of these messages: refused")
        return "".join(parts)

    def _render_parts(self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool) -> Iterator[str]:
        try:
            yield from self._template.generate(
                messages=[dict(message) for message in messages],
                add_generation_prompt=add_generation_prompt,
                tools=None,
                documents=None,
                **self._tokens,
            )
        except Exception as error:  # a template is a program: it may raise anything
            raise RequestError(f"the chat template refuses these messages: {error}") from error


class _GenerationTag(Extension):
    """`{% generation %} … {% endgeneration %}`: for training only, prints what it holds."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's interface)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it is; Jinja's own filter would escape it for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _check_messages(messages: Sequence[Mapping[str, str]]) -> None:
    if not isinstance(messages, list | tuple):
        raise RequestError(f"messages is {type(messages).__name__}: it must be a list")
    if not messages:
        raise RequestError("there are no messages: give at least one")
    for idx, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise RequestError(f"message {idx} is {type(message).__name__}: it must have a role and a content")
        if unknown := [key for key in message if key not in _MESSAGE_KEYS]:
            raise RequestError(f"message {idx} has {unknown[0]!r:.60}: only role and content are known")
        for key in _MESSAGE_KEYS:
            if not isinstance(message.get(key), str):
                raise RequestError(f"message {idx}: {key} must be a string, got {message.get(key)!r:.60}")
