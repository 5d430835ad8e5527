"""Chat messages to a prompt, through the model's own Jinja template, in a sandbox.

The names that a template may use are those of transformers: `messages`, `add_generation_prompt`, `bos_token`,
`eos_token`, `tools`, `documents` (none), `raise_exception`, `strftime_now`, the filter `tojson`, the loop
controls, and the tag `generation`, which marks the model's turns and prints what it holds.

A template comes from a file that nobody has read: it is compiled only when it is first needed, nothing of it runs
while it is compiled, and it can neither repeat a text nor raise a number to a size that would fill the memory.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any, Final, NoReturn

from jinja2 import Template, TemplateError, TemplateSyntaxError, meta, nodes, pass_context
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ambidex.core.errors import RequestError
from ambidex.core.units import MIB

MAX_TEMPLATE_BYTES: Final = 16 * MIB
"""Of a file with a template; those of today's models have some 10 KB."""
_MESSAGE_KEYS: Final = ("role", "content", "name", "tool_calls", "tool_call_id")
_MAX_GROWTH: Final = 64
_MAX_EXTRA: Final = MIB
"""A prompt has at most `_MAX_GROWTH` times the characters of its messages, and `_MAX_EXTRA` more.

`_MAX_EXTRA` also bounds the items of a repetition (`"x" * n`) and the bits of a product or power."""


class ChatTemplate:
    """A chat template, compiled when it is first needed: making one never fails.

    Args:
        source: the template's text; None if the model has none.
        bos, eos: strings of the tokens that begin and end a text, None if the model has none.
    """

    def __init__(self, source: str | None, bos: str | None, eos: str | None) -> None:
        self.source = source
        tokens = {"bos_token": bos, "eos_token": eos}
        self._tokens = {name: token for name, token in tokens.items() if token is not None}

    def check(self) -> None:
        """Compile the template now, to learn early that it is broken.

        Raises:
            RequestError: there is no template, or it is not valid Jinja.
        """
        _ = self._template

    @cached_property
    def names(self) -> frozenset[str]:
        """Names that the template reads: with `tools` among them it can tell the model of tools.

        Raises:
            RequestError: as `check`.
        """
        self.check()
        return frozenset(meta.find_undeclared_variables(_environment().parse(self.source or "")))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """The prompt for these messages.

        It holds the special tokens as text: encode it with `add_special=False`.

        Args:
            messages: `{"role": …, "content": …}` each, both strings. `content` may be None beside `tool_calls`, a list
                of `{"type": "function", "function": {"name": …, "arguments": {…}}}`; `name` and `tool_call_id` are
                strings.
            tools: `{"type": "function", "function": {"name": …, "description": …, "parameters": {…}}}` each.
            add_generation_prompt: end with the beginning of the model's turn.

        Raises:
            RequestError: there is no template or no valid one, there is no message, one has other keys or values, or
                the template refuses them.
        """
        self.check()
        _check_messages(messages)
        if tools and "tools" not in self.names:
            raise RequestError("the model's chat template has no place for tools: leave them out, or choose a model "
                               "that was trained with tools")  # fmt: skip
        num_given = sum(_num_chars(message) for message in (*messages, *(tools or ())))
        limit = _MAX_GROWTH * num_given + _MAX_EXTRA
        parts: list[str] = []
        num_chars = 0
        for part in self._render_parts(messages, add_generation_prompt, tools):
            parts.append(part)
            if (num_chars := num_chars + len(part)) > limit:
                raise RequestError(f"the chat template makes more than {limit} characters of these messages: refused")
        return "".join(parts)

    @cached_property
    def _template(self) -> Template:
        if self.source is None:
            raise RequestError(
                "the model has no chat template: use `generate` with a plain prompt, or give `chat_template` FILE"
            )
        try:
            return _environment().from_string(self.source)
        except TemplateSyntaxError as error:
            raise RequestError(f"the chat template is not valid in line {error.lineno}: {error.message}") from error
        except Exception as error:  # the compilers, Jinja's and Python's, have limits of many kinds
            raise RequestError(f"the chat template cannot be compiled: {type(error).__name__}: {error}") from error

    def _render_parts(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None,
    ) -> Iterator[str]:
        try:
            yield from self._template.generate(
                messages=[dict(message) for message in messages],
                add_generation_prompt=add_generation_prompt,
                tools=[dict(tool) for tool in tools] if tools else None,
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


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, without the products and powers that would fill the memory."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if _size_of_result(operator, left, right) > _MAX_EXTRA:
            raise SecurityError(f"{operator!r} would make more than {_MAX_EXTRA} characters, items or bits")
        return super().call_binop(context, operator, left, right)


def _size_of_result(operator: str, left: Any, right: Any) -> int:
    """Items of a repetition, bits of a whole number; 0 for anything that has neither."""
    match operator, left, right:
        case "**", int(), int():
            return left.bit_length() * right
        case "*", int(), int():
            return left.bit_length() + right.bit_length()
        case ("*", Sequence() as items, int() as count) | ("*", int() as count, Sequence() as items):
            return len(items) * count
    return 0


@pass_context
def _at_run_time(_context: Context, value: object) -> object:
    """A `finalize` that needs a context keeps Jinja from computing constant expressions while it compiles."""
    return value


def _environment() -> _Sandbox:
    environment = _Sandbox(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationTag, loopcontrols],
        optimized=False,
        finalize=_at_run_time,
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


def _num_chars(value: object) -> int:
    """Characters of all texts inside."""
    match value:
        case str():
            return len(value)
        case Mapping():
            return sum(_num_chars(key) + _num_chars(item) for key, item in value.items())
        case list() | tuple():
            return sum(map(_num_chars, value))
    return 0


def _check_messages(messages: Sequence[Mapping[str, Any]]) -> None:
    if not isinstance(messages, list | tuple):
        raise RequestError(f"messages is {type(messages).__name__}: it must be a list")
    if not messages:
        raise RequestError("there are no messages: give at least one")
    for idx, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise RequestError(f"message {idx} is {type(message).__name__}: it must have a role and a content")
        if unknown := [key for key in message if key not in _MESSAGE_KEYS]:
            raise RequestError(f"message {idx} has {unknown[0]!r:.60}: known are {', '.join(_MESSAGE_KEYS)}")
        calls = message.get("tool_calls")
        if calls is not None and not (isinstance(calls, list | tuple) and all(isinstance(c, Mapping) for c in calls)):
            raise RequestError(f"message {idx}: tool_calls must be a list of objects, got {calls!r:.60}")
        for key in _MESSAGE_KEYS:
            is_needed = key == "role" or (key == "content" and not calls)
            is_optional = key != "tool_calls" and not is_needed and message.get(key) is None
            if key != "tool_calls" and not is_optional and not isinstance(message.get(key), str):
                raise RequestError(f"message {idx}: {key} must be a string, got {message.get(key)!r:.60}")
