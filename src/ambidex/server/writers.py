"""Outputs of the engine → choices of the OpenAI API, whole or in chunks."""

import math
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol
from uuid import uuid4

from ambidex.core.request import FinishReason
from ambidex.core.step import SampledToken
from ambidex.engine.outputs import RequestOutput
from ambidex.server.tools import ToolCall, ToolReader
from ambidex.text.tokenizer import Tokenizer

Choice = dict[str, Any]

_LOWEST_LOGPROB: Final = -9999.0
"""JSON has no minus infinity; the OpenAI API says this."""


class Writer(Protocol):
    """Writes the choices of one answer."""

    kind: str
    """`object` of a whole answer."""
    chunk_kind: str
    """`object` of a chunk."""

    def begin(self, idx: int) -> list[Choice]:
        """What the first chunk of a choice says before there is text."""
        ...

    def advance(self, idx: int, output: RequestOutput) -> list[Choice]:
        """Chunks for what came; none if nothing can be shown yet."""
        ...

    def whole(self, idx: int, output: RequestOutput) -> Choice:
        """The whole choice."""
        ...


class CompletionWriter:
    """Choices of `/v1/completions`."""

    kind = chunk_kind = "text_completion"

    def __init__(self, tokenizer: Tokenizer, num_choices: int) -> None:
        self._tokenizer = tokenizer
        self._num_seen = [0] * num_choices
        self._num_chars = [0] * num_choices

    def begin(self, idx: int) -> list[Choice]:
        """Nothing: text comes with the first chunk."""
        del idx
        return []

    def advance(self, idx: int, output: RequestOutput) -> list[Choice]:
        """One chunk, if there is something to show."""
        new = _new_logprobs(output, self._num_seen[idx])
        if not (output.delta or new or output.is_finished):
            return []
        self._num_seen[idx] += len(new)
        logprobs = self._logprobs(idx, new) if output.logprobs is not None else None
        return [_completion_choice(idx, output.delta, _reason(output), logprobs)]

    def whole(self, idx: int, output: RequestOutput) -> Choice:
        """The whole choice."""
        logprobs = self._logprobs(idx, output.logprobs) if output.logprobs is not None else None
        return _completion_choice(idx, output.text, _reason(output), logprobs)

    def _logprobs(self, idx: int, tokens: Sequence[SampledToken]) -> dict[str, Any]:
        texts = [self._tokenizer.token_text(token.token_id) for token in tokens]
        offsets = []
        for text in texts:
            offsets.append(self._num_chars[idx])
            self._num_chars[idx] += len(text)
        top = [
            {self._tokenizer.token_text(token_id): _finite(logprob) for token_id, logprob in token.top_logprobs}
            for token in tokens
        ]
        return {
            "tokens": texts,
            "token_logprobs": [_finite(token.logprob) for token in tokens],
            "top_logprobs": top,
            "text_offset": offsets,
        }


class ChatWriter:
    """Choices of `/v1/chat/completions`.

    Args:
        make_reader: makes what takes tool calls out of an answer; None: there are no tools.
        max_calls: calls that are shown at most; None: all.
    """

    kind, chunk_kind = "chat.completion", "chat.completion.chunk"

    def __init__(
        self,
        tokenizer: Tokenizer,
        num_choices: int,
        *,
        make_reader: Callable[[], ToolReader] | None = None,
        max_calls: int | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._make_reader = make_reader
        self._max_calls = max_calls
        self._num_seen = [0] * num_choices
        self._num_calls = [0] * num_choices
        self._readers = [make_reader() if make_reader is not None else None for _ in range(num_choices)]

    def begin(self, idx: int) -> list[Choice]:
        """The role."""
        return [_chat_chunk(idx, {"role": "assistant", "content": ""})]

    def advance(self, idx: int, output: RequestOutput) -> list[Choice]:
        """A chunk with text or calls, and one with the reason at the end."""
        text, calls = self._read(idx, output)
        delta: dict[str, Any] = {"content": text} if text else {}
        if calls:
            first = self._num_calls[idx]
            delta["tool_calls"] = [{"index": first + place, **_call(call)} for place, call in enumerate(calls)]
            self._num_calls[idx] += len(calls)
        new = _new_logprobs(output, self._num_seen[idx])
        self._num_seen[idx] += len(new)
        choices = []
        if delta or new:
            choice = _chat_chunk(idx, delta)
            choice["logprobs"] = {"content": self._logprobs(new)} if output.logprobs is not None else None
            choices.append(choice)
        if output.is_finished:
            choices.append(_chat_chunk(idx, {}, _reason(output, has_calls=self._num_calls[idx] > 0)))
        return choices

    def whole(self, idx: int, output: RequestOutput) -> Choice:
        """The whole choice."""
        calls: list[ToolCall] = []
        text = output.text
        if self._make_reader is not None:
            reader = self._make_reader()
            text, calls = _join(reader.push(output.text), reader.finish())
            calls = calls[: self._max_calls]
        message: dict[str, Any] = {"role": "assistant", "content": None if calls and not text else text}
        message["refusal"] = None
        if calls:
            message["tool_calls"] = [_call(call) for call in calls]
        logprobs = {"content": self._logprobs(output.logprobs)} if output.logprobs is not None else None
        return {
            "index": idx,
            "message": message,
            "logprobs": logprobs,
            "finish_reason": _reason(output, has_calls=bool(calls)),
        }

    def _read(self, idx: int, output: RequestOutput) -> tuple[str, list[ToolCall]]:
        reader = self._readers[idx]
        if reader is None:
            return output.delta, []
        text, calls = reader.push(output.delta)
        if output.is_finished:
            text, calls = _join((text, calls), reader.finish())
        if self._max_calls is not None:
            calls = calls[: max(0, self._max_calls - self._num_calls[idx])]
        return text, calls

    def _logprobs(self, tokens: Sequence[SampledToken]) -> list[dict[str, Any]]:
        return [
            {
                **self._logprob(token.token_id, token.logprob),
                "top_logprobs": [self._logprob(token_id, logprob) for token_id, logprob in token.top_logprobs],
            }
            for token in tokens
        ]

    def _logprob(self, token_id: int, logprob: float | None) -> dict[str, Any]:
        data = self._tokenizer.token_bytes(token_id)
        return {"token": data.decode(errors="replace"), "logprob": _finite(logprob), "bytes": list(data)}


def _completion_choice(idx: int, text: str, reason: str | None, logprobs: dict[str, Any] | None) -> Choice:
    return {"index": idx, "text": text, "logprobs": logprobs, "finish_reason": reason}


def _chat_chunk(idx: int, delta: dict[str, Any], reason: str | None = None) -> Choice:
    return {"index": idx, "delta": delta, "logprobs": None, "finish_reason": reason}


def _call(call: ToolCall) -> dict[str, Any]:
    return {
        "id": f"call_{uuid4().hex[:24]}",
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


def _join(first: tuple[str, list[ToolCall]], second: tuple[str, list[ToolCall]]) -> tuple[str, list[ToolCall]]:
    return first[0] + second[0], first[1] + second[1]


def _reason(output: RequestOutput, *, has_calls: bool = False) -> str | None:
    if has_calls and output.finish_reason is FinishReason.STOP:
        return "tool_calls"
    return output.finish_reason


def _new_logprobs(output: RequestOutput, num_seen: int) -> Sequence[SampledToken]:
    return output.logprobs[num_seen:] if output.logprobs is not None else ()


def _finite(logprob: float | None) -> float:
    return logprob if logprob is not None and math.isfinite(logprob) else _LOWEST_LOGPROB
