"""The lines of a JSONL file of prompts, each read and checked by itself.

    {"id": "a", "prompt": "Once upon", "max_output_tokens": 20}
    {"messages": [{"role": "user", "content": "Hi"}], "temperature": 0}

Fields are those of `SamplingParams`, `id` (a text or a whole number) and one of `prompt` and `messages`.
"""

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from ambidex.cli.config_file import closest
from ambidex.cli.settings import SAMPLING_SETTINGS
from ambidex.cli.source import check_text, decode
from ambidex.core.errors import ConfigError, RequestError
from ambidex.core.request import SamplingParams

_SETTINGS: Final = {setting.name: setting for setting in SAMPLING_SETTINGS}
_FIELDS: Final = ("id", "prompt", "messages", *_SETTINGS)
_NUM_SEEDS: Final = 2**63

LineId = str | int | None
"""`id` of a line; None if it has none."""
Conversation = tuple[Mapping[str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A line that can be asked. `index` counts the lines of the file from 0."""

    index: int
    line_id: LineId
    prompt: str | Conversation
    params: SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class BadLine:
    """A line that cannot be asked, and why."""

    index: int
    line_id: LineId
    error: str


def read_lines(name: str, *, defaults: SamplingParams, seed: int) -> list[Line | BadLine]:
    """Read a file (`-`: stdin); empty lines are left out.

    Args:
        defaults: what holds for a line that does not say otherwise.
        seed: line i without a seed of its own gets `seed + i`, so an answer does not hang on what ran before.
    Raises:
        ConfigError: the file cannot be read.
    """
    try:
        data = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
    except OSError as error:
        raise ConfigError(f"--jsonl {name} cannot be read: {error.strerror}") from error
    lines: list[Line | BadLine] = []
    owners: dict[LineId, int] = {}
    for index, raw in enumerate(data.split(b"\n")):
        if not raw.strip():
            continue
        line = _read_line(index, raw, replace(defaults, seed=(seed + index) % _NUM_SEEDS))
        if line.line_id is not None and owners.setdefault(line.line_id, index) != index:
            first = owners[line.line_id]
            line = BadLine(index=index, line_id=None, error=f"id {line.line_id!r} is also that of line {first + 1}")
        lines.append(line)
    return lines


def _read_line(index: int, raw: bytes, defaults: SamplingParams) -> Line | BadLine:
    line_id: LineId = None
    try:
        fields = _read_object(decode(raw, name="the line"))
        line_id = _read_id(fields.get("id"))
        return Line(index=index, line_id=line_id, prompt=_read_prompt(fields), params=_read_params(fields, defaults))
    except RequestError as error:
        return BadLine(index=index, line_id=line_id, error=str(error))


def _read_object(text: str) -> dict[str, Any]:
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"no JSON: {error}") from None
    if not isinstance(fields, dict):
        raise RequestError('no JSON object: write it like {"prompt": "…"}')
    for name in fields:
        if name not in _FIELDS:
            raise RequestError(f"unknown field {name!r}{closest(name, _FIELDS)}")
    return fields


def _read_id(value: object) -> LineId:
    if value is None or (isinstance(value, str | int) and not isinstance(value, bool)):
        return value if not isinstance(value, str) else check_text(value, name="id")
    raise RequestError(f"id is {value!r}: it must be a text or a whole number")


def _read_prompt(fields: Mapping[str, Any]) -> str | Conversation:
    if ("prompt" in fields) == ("messages" in fields):
        raise RequestError("one of prompt and messages is needed, and not both")
    if "messages" in fields:
        return _read_messages(fields["messages"])
    prompt = fields["prompt"]
    if not isinstance(prompt, str):
        raise RequestError(f"prompt is {prompt!r}: it must be a text")
    if not prompt:
        raise RequestError("the prompt is empty: give at least one character")
    return check_text(prompt, name="prompt")


def _read_messages(messages: object) -> Conversation:
    if not isinstance(messages, list) or not messages:
        raise RequestError("messages must be a list with at least one message")
    for message in messages:
        is_message = isinstance(message, dict) and set(message) == {"role", "content"}
        if not is_message or not all(isinstance(text, str) for text in message.values()):
            raise RequestError(f'a message is {message!r}: write it like {{"role": "user", "content": "…"}}')
        check_text(message["content"], name="content")
        check_text(message["role"], name="role")
    return tuple(messages)


def _read_params(fields: Mapping[str, Any], defaults: SamplingParams) -> SamplingParams:
    given = {}
    for name in fields:
        if name in _SETTINGS:
            try:
                given[name] = _SETTINGS[name].read(fields[name])
            except ValueError as error:
                raise RequestError(f"{name} is {fields[name]!r}: {error}") from None
    return replace(defaults, **given)
