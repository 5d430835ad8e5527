"""The lines of a JSONL file of prompts, each read and checked by itself.

    {"id": "a", "prompt": "Once upon", "max_output_tokens": 20}
    {"messages": [{"role": "user", "content": "Hi"}], "temperature": 0}

Fields are those of `SamplingParams`, `id` (a text or a whole number) and one of `prompt` and `messages`.
"""

import codecs
import hashlib
import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from ambidex.cli.config_file import closest
from ambidex.cli.settings import SAMPLING_SETTINGS
from ambidex.cli.source import check_text, decode, parse_json, quote
from ambidex.core.errors import ConfigError, RequestError
from ambidex.core.request import SamplingParams
from ambidex.core.units import GIB
from ambidex.formats.bounded_file import read_file, read_stream

_SETTINGS: Final = {setting.name: setting for setting in SAMPLING_SETTINGS}
_FIELDS: Final = ("id", "prompt", "messages", *_SETTINGS)
_MAX_BYTES: Final = GIB
_NUM_SEEDS: Final = 2**63

LineId = str | int | None
"""`id` of a line; None if it has none."""
Conversation = tuple[Mapping[str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A line that can be asked.

    `index` counts the lines of the file from 0. `fingerprint` is a hash of all that is asked: prompt and parameters.
    """

    index: int
    line_id: LineId
    fingerprint: str
    prompt: str | Conversation
    params: SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class BadLine:
    """A line that cannot be asked, and why; `fingerprint` is a hash of its bytes."""

    index: int
    line_id: LineId
    fingerprint: str
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
        if name == "-":
            data = read_stream(sys.stdin.buffer, max_bytes=_MAX_BYTES)
        else:
            data = read_file(Path(name), max_bytes=_MAX_BYTES)
    except OSError as error:
        raise ConfigError(f"--jsonl {name} cannot be read: {error.strerror or error}") from error
    lines: list[Line | BadLine] = []
    owners: dict[LineId, int] = {}
    for index, raw in enumerate(data.removeprefix(codecs.BOM_UTF8).split(b"\n")):
        if not raw.strip():
            continue
        line = _read_line(index, raw, defaults, seed)
        if line.line_id is not None and owners.setdefault(line.line_id, index) != index:
            first = owners[line.line_id]
            line = _bad_line(index, None, raw, f"id {quote(line.line_id)} is also that of line {first + 1}")
        lines.append(line)
    return lines


def _read_line(index: int, raw: bytes, defaults: SamplingParams, seed: int) -> Line | BadLine:
    line_id: LineId = None
    try:
        fields = _read_object(decode(raw, name="the line"))
        line_id = _read_id(fields.get("id"))
        prompt = _read_prompt(fields)
        params = _read_params(fields, replace(defaults, seed=(seed + index) % _NUM_SEEDS))
    except RequestError as error:
        return _bad_line(index, line_id, raw, str(error))
    # A line that moves keeps its fingerprint: what hangs on its place, the seed made for it, is left out.
    asked = {**asdict(params), "seed": fields.get("seed", f"{seed} + index"), "prompt": prompt}
    fingerprint = _hash(json.dumps(asked, sort_keys=True).encode())
    return Line(index=index, line_id=line_id, fingerprint=fingerprint, prompt=prompt, params=params)


def _bad_line(index: int, line_id: LineId, raw: bytes, error: str) -> BadLine:
    return BadLine(index=index, line_id=line_id, fingerprint=_hash(raw.strip()), error=error)


def _hash(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def _read_object(text: str) -> dict[str, Any]:
    fields = parse_json(text)
    if not isinstance(fields, dict):
        raise RequestError('no JSON object: write it like {"prompt": "…"}')
    for name in fields:
        if name not in _FIELDS:
            raise RequestError(f"unknown field {quote(name)}{closest(name, _FIELDS)}")
    return fields


def _read_id(value: object) -> LineId:
    if value is None or (isinstance(value, str | int) and not isinstance(value, bool)):
        return value if not isinstance(value, str) else check_text(value, name="id")
    raise RequestError(f"id is {quote(value)}: it must be a text or a whole number")


def _read_prompt(fields: Mapping[str, Any]) -> str | Conversation:
    if ("prompt" in fields) == ("messages" in fields):
        raise RequestError("one of prompt and messages is needed, and not both")
    if "messages" in fields:
        return _read_messages(fields["messages"])
    prompt = fields["prompt"]
    if not isinstance(prompt, str):
        raise RequestError(f"prompt is {quote(prompt)}: it must be a text")
    if not prompt:
        raise RequestError("the prompt is empty: give at least one character")
    return check_text(prompt, name="prompt")


def _read_messages(messages: object) -> Conversation:
    if not isinstance(messages, list) or not messages:
        raise RequestError("messages must be a list with at least one message")
    for message in messages:
        is_message = isinstance(message, dict) and set(message) == {"role", "content"}
        if not is_message or not all(isinstance(text, str) for text in message.values()):
            raise RequestError(f'a message is {quote(message)}: write it like {{"role": "user", "content": "…"}}')
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
                raise RequestError(f"{name} is {quote(fields[name])}: {error}") from None
    return replace(defaults, **given)
