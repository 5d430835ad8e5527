"""Request bodies → sampling parameters and prompts; what two fields say together is checked here."""

import json
from dataclasses import replace
from typing import Any, Final

from ambidex.core.request import SamplingParams
from ambidex.server.errors import bad_request
from ambidex.server.protocol import (
    ChatRequest,
    CompletionRequest,
    JsonObjectFormat,
    JsonSchemaFormat,
    Message,
    Sampling,
    StructuredOutputs,
)

DEFAULT_COMPLETION_TOKENS: Final = 16
"""The OpenAI API's, for completions; a chat answer may take what the context leaves."""
_DEFAULTS: Final = SamplingParams()


def completion_params(body: CompletionRequest) -> SamplingParams:
    """Parameters of a completion.

    Raises:
        RequestError: values do not fit together.
    """
    return _params(body, max_tokens=body.max_tokens or DEFAULT_COMPLETION_TOKENS, logprobs=body.logprobs)


def chat_params(body: ChatRequest) -> SamplingParams:
    """Parameters of a chat answer, without what tools ask for.

    Raises:
        RequestError: values do not fit together.
    """
    if body.max_tokens and body.max_completion_tokens and body.max_tokens != body.max_completion_tokens:
        raise bad_request(
            f"max_tokens {body.max_tokens} and max_completion_tokens {body.max_completion_tokens} differ: give one",
            param="max_completion_tokens",
        )
    if body.top_logprobs and not body.logprobs:
        raise bad_request(f"top_logprobs is {body.top_logprobs}, but logprobs is not true", param="top_logprobs")
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    return _params(body, max_tokens=body.max_completion_tokens or body.max_tokens, logprobs=logprobs)


def for_choice(params: SamplingParams, idx: int) -> SamplingParams:
    """Parameters of choice `idx` of several: each has a seed of its own."""
    return params if params.seed is None or idx == 0 else replace(params, seed=(params.seed + idx) % 2**63)


def is_usage_wanted(body: Sampling) -> bool:
    """The stream ends with a count of tokens.

    Raises:
        RefusedError: there is no stream.
    """
    if body.stream_options is not None and not body.stream:
        raise bad_request("stream_options is given, but stream is not true", param="stream_options")
    return body.stream_options is not None and body.stream_options.include_usage


def message_values(messages: list[Message]) -> list[dict[str, Any]]:
    """Messages as chat templates read them: content as one text, arguments of earlier calls as objects.

    Raises:
        RefusedError: the arguments of an earlier call are no JSON object, or a message has no content.
    """
    return [_message_value(idx, message) for idx, message in enumerate(messages)]


def _message_value(idx: int, message: Message) -> dict[str, Any]:
    role = "system" if message.role == "developer" else message.role  # templates know the older word
    value: dict[str, Any] = {"role": role, "content": message.content}
    if isinstance(message.content, list):
        value["content"] = "".join(part.text for part in message.content)
    if message.content is None and not message.tool_calls:
        raise bad_request(f"messages[{idx}].content is missing", param=f"messages[{idx}].content")
    if message.name is not None:
        value["name"] = message.name
    if message.tool_call_id is not None:
        value["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        value["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {
                    "name": call.function.name,
                    "arguments": _arguments(call.function.arguments, f"messages[{idx}].tool_calls[{place}]"),
                },
            }
            for place, call in enumerate(message.tool_calls)
        ]
    return value


def _arguments(text: str, name: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise bad_request(f"{name}.function.arguments is no JSON object", param=f"{name}.function.arguments")
    return value


def _params(body: Sampling, *, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
    defaults = _DEFAULTS

    def given(value: Any, default: Any) -> Any:
        return default if value is None else value

    return SamplingParams(
        max_output_tokens=max_tokens,
        min_output_tokens=given(body.min_tokens, 0),
        temperature=given(body.temperature, defaults.temperature),
        top_k=max(0, given(body.top_k, 0)),  # -1 is "off" elsewhere
        top_p=given(body.top_p, defaults.top_p),
        min_p=given(body.min_p, defaults.min_p),
        presence_penalty=given(body.presence_penalty, defaults.presence_penalty),
        frequency_penalty=given(body.frequency_penalty, defaults.frequency_penalty),
        repetition_penalty=given(body.repetition_penalty, defaults.repetition_penalty),
        seed=None if body.seed is None else body.seed % 2**63,
        stop=(body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ()),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        include_stop=given(body.include_stop_str_in_output, False),
        ignore_eos=given(body.ignore_eos, False),
        logprobs=logprobs,
        logit_bias=_logit_bias(body.logit_bias or {}),
        **_guide(body),
    )


def _logit_bias(bias: dict[str, float]) -> tuple[tuple[int, float], ...]:
    for name in bias:
        if not (name.isascii() and name.isdigit() and len(name) < 12):
            raise bad_request(f"logit_bias names {name!r:.60}: it must be a token id", param="logit_bias")
    return tuple((int(name), value) for name, value in bias.items())


def _guide(body: Sampling) -> dict[str, str]:
    given: dict[str, str] = {}
    if isinstance(body.response_format, JsonObjectFormat):
        given["json_schema"] = '{"type": "object"}'
    elif isinstance(body.response_format, JsonSchemaFormat):
        given["json_schema"] = json.dumps(body.response_format.json_schema.schema_)
    if body.structured_outputs is not None:
        if given:
            raise bad_request("structured_outputs and response_format exclude each other", param="structured_outputs")
        given = _structured(body.structured_outputs)
    return given


def _structured(outputs: StructuredOutputs) -> dict[str, str]:
    given: dict[str, str] = {}
    if outputs.json_ is not None:
        given["json_schema"] = json.dumps(outputs.json_)
    if outputs.regex is not None:
        given["regex"] = outputs.regex
    if outputs.grammar is not None:
        given["grammar"] = outputs.grammar
    if outputs.choice is not None:
        given["choice"] = "start: " + " | ".join(json.dumps(choice) for choice in outputs.choice)
    if len(given) != 1:
        raise bad_request("structured_outputs needs exactly one of json, regex, choice, grammar",
                          param="structured_outputs")  # fmt: skip
    if "choice" in given:
        given["grammar"] = given.pop("choice")
    return given
