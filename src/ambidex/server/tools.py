"""Tool calls: how the families write them, the grammar that holds an answer to them, and reading them back.

hermes   <tool_call>\\n{"name": …, "arguments": {…}}\\n</tool_call>, as often as wanted    Hermes, Qwen 2.5, Qwen 3
llama    {"name": …, "parameters": {…}}, instead of any other text                        Llama 3.1 and later
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from ambidex.server.config import ToolFormat
from ambidex.server.protocol import NamedTool, Tool

_OPEN: Final = "<tool_call>"
_CLOSE: Final = "</tool_call>"
_TAG: Final = "<|python_tag|>"
_ARGUMENTS: Final = {ToolFormat.HERMES: "arguments", ToolFormat.LLAMA: "parameters"}


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the model made; `arguments` is JSON."""

    name: str
    arguments: str


def find_tool_format(template: str | None) -> ToolFormat | None:
    """How the model of a chat template writes tool calls; None if the template does not show it."""
    if template is None:
        return None
    if _OPEN in template:
        return ToolFormat.HERMES
    if _TAG in template or ('"parameters"' in template and "ipython" in template):
        return ToolFormat.LLAMA
    return None


def make_grammar(
    kind: ToolFormat, tools: Sequence[Tool], choice: str | NamedTool | None, *, parallel: bool
) -> str | None:
    """The grammar (in llguidance's Lark form) that an answer with tools is held to; None: it is free.

    `required` or a named function hold it to calls. With `auto` it is free until it begins a call, which is then held
    to the schemas, if a function is `strict`.
    """
    is_forced = choice == "required" or isinstance(choice, NamedTool)
    if not is_forced and not any(tool.function.strict for tool in tools):
        return None
    if isinstance(choice, NamedTool):
        tools = [tool for tool in tools if tool.function.name == choice.function.name]
    body = json.dumps({"anyOf": [_call_schema(kind, tool) for tool in tools]})
    if kind is ToolFormat.LLAMA:
        start = "start: call" if is_forced else "start: call | FREE\nFREE: /([^{ \\n](.|\\n)*)?/"
        return f"{start}\ncall: %json {body}\n"
    call = f"call: %json {body}\n"
    if is_forced:
        more = f'("\\n{_OPEN}\\n" call "\\n{_CLOSE}")*' if parallel and not isinstance(choice, NamedTool) else ""
        return f'start: "{_OPEN}\\n" call "\\n{_CLOSE}" {more}\n{call}'
    return f'start: (begin call "\\n{_CLOSE}")* FREE\nbegin[lazy]: FREE "{_OPEN}\\n"\n{call}FREE: /(.|\\n)*/\n'


def _call_schema(kind: ToolFormat, tool: Tool) -> dict[str, Any]:
    arguments = _ARGUMENTS[kind]
    return {
        "type": "object",
        "properties": {
            "name": {"const": tool.function.name},
            arguments: tool.function.parameters or {"type": "object"},
        },
        "required": ["name", arguments],
        "additionalProperties": False,
    }


class ToolReader:
    """Takes calls out of an answer while it grows. Text that may begin a call is held back until that is known."""

    def __init__(self, kind: ToolFormat, names: frozenset[str]) -> None:
        self._kind = kind
        self._names = names
        self._held = ""
        self._is_plain = False  # Llama's: the answer began with something else than a call
        self.num_calls = 0

    def push(self, text: str) -> tuple[str, list[ToolCall]]:
        """Text that is no call, and calls that have become whole."""
        self._held += text
        return self._push_hermes() if self._kind is ToolFormat.HERMES else self._push_llama()

    def finish(self) -> tuple[str, list[ToolCall]]:
        """What is left when no text follows: what did not become a call is text."""
        held, self._held = self._held, ""
        calls = self._read_llama(held) if self._kind is ToolFormat.LLAMA and not self._is_plain else None
        if calls is None and self._kind is ToolFormat.HERMES and held.startswith(_OPEN):
            call = self._read_call(held.removeprefix(_OPEN).strip())  # the end tag may be a stop string
            calls = [call] if call is not None else None
        return (held, []) if calls is None else ("", self._count(calls))

    def _push_hermes(self) -> tuple[str, list[ToolCall]]:
        calls: list[ToolCall] = []
        text = ""
        while True:
            start = self._held.find(_OPEN)
            if start < 0:
                safe = len(self._held) - _overlap(self._held, _OPEN)
                text, self._held = text + self._held[:safe], self._held[safe:]
                return _without_gap(text, self.num_calls), calls
            text, self._held = text + self._held[:start], self._held[start:]
            end = self._held.find(_CLOSE)
            if end < 0:
                return _without_gap(text, self.num_calls), calls
            call = self._read_call(self._held[len(_OPEN) : end].strip())
            whole, self._held = self._held[: end + len(_CLOSE)], self._held[end + len(_CLOSE) :]
            if call is None:
                text += whole
            else:
                calls += self._count([call])

    def _push_llama(self) -> tuple[str, list[ToolCall]]:
        begin = self._held.lstrip()
        if not self._is_plain and (begin.startswith("{") or begin.startswith(_TAG) or _TAG.startswith(begin)):
            return "", []
        self._is_plain = True
        text, self._held = self._held, ""
        return text, []

    def _read_llama(self, text: str) -> list[ToolCall] | None:
        calls: list[ToolCall] = []
        decoder, place = json.JSONDecoder(), 0
        text = text.strip().removeprefix(_TAG).strip()
        while place < len(text):
            try:
                _, end = decoder.raw_decode(text, place)
            except (ValueError, RecursionError):
                return None
            call = self._read_call(text[place:end])
            if call is None:
                return None
            calls.append(call)
            place = end + len(text[end:]) - len(text[end:].lstrip("; \n"))
        return calls or None

    def _read_call(self, text: str) -> ToolCall | None:
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            return None
        if not isinstance(value, dict) or value.get("name") not in self._names:
            return None
        arguments = value.get("arguments", value.get("parameters", {}))
        if not isinstance(arguments, dict):
            return None
        return ToolCall(value["name"], json.dumps(arguments, ensure_ascii=False))

    def _count(self, calls: list[ToolCall]) -> list[ToolCall]:
        self.num_calls += len(calls)
        return calls


def _overlap(text: str, mark: str) -> int:
    """Length of the longest end of `text` that begins `mark`."""
    return next((n for n in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:n])), 0)


def _without_gap(text: str, num_calls: int) -> str:
    """White space between calls is no content."""
    return "" if num_calls and not text.strip() else text
