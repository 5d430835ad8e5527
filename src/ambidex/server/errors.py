"""One table: exception → HTTP status and error body in OpenAI's shape."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Final

from starlette.exceptions import HTTPException

from ambidex.core.config import EngineConfig, with_flags
from ambidex.core.errors import (
    AmbidexError,
    CallerError,
    ContextLengthError,
    EngineLostError,
    InternalError,
    MachineError,
    RequestFailedError,
)

_SETTINGS: Final = frozenset(item.name for item in fields(EngineConfig))
RETRY_S: Final = 2
"""Seconds after which a client that was turned away may come again."""


_PARAMS: Final = {
    "prompt": "prompt",
    "stop_token_ids": "stop_token_ids",
    "logit_bias": "logit_bias",
    "min_output_tokens": "min_tokens",
    "json_schema": "response_format",
    "regex": "structured_outputs",
    "grammar": "structured_outputs",
    "message": "messages",
}
"""First word of an engine's refusal → the field that it is about."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorAnswer:
    """What a client is told; `extra` are further fields of the error object.

    `code` is one word for programs, never null: docs/serving.md lists them.
    """

    status: int
    message: str
    type: str
    code: str
    param: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)

    def body(self) -> dict[str, Any]:
        """The JSON body."""
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code, **self.extra}
        return {"error": error}


class RefusedError(CallerError):
    """A request that is turned away, with the answer that it gets."""

    def __init__(self, answer: ErrorAnswer) -> None:
        super().__init__(answer.message)
        self.answer = answer


def bad_request(
    message: str, *, param: str | None = None, code: str = "invalid_value", status: int = 400
) -> RefusedError:
    """The client's mistake."""
    return RefusedError(
        ErrorAnswer(status=status, message=message, type="invalid_request_error", param=param, code=code)
    )


def unavailable(message: str, *, code: str, status: int = 503) -> RefusedError:
    """Nobody's mistake: come again later."""
    kind = "rate_limit_error" if status == 429 else "service_unavailable"
    return RefusedError(
        ErrorAnswer(status=status, message=message, type=kind, code=code, headers={"Retry-After": str(RETRY_S)})
    )


def context_length(
    num_prompt_tokens: int, num_output_tokens: int, limit: int, *, prompt_param: str, output_param: str = "max_tokens"
) -> RefusedError:
    """A prompt, or prompt and answer, longer than the context; agents read the wording and the counts.

    Args:
        prompt_param, output_param: fields that the prompt and the length of the answer came from; the error names the
            one to change.
    """
    asked = f"{num_prompt_tokens} in the {prompt_param}"
    if num_output_tokens:
        asked += f", {num_output_tokens} in the completion"
    return RefusedError(
        ErrorAnswer(
            status=400,
            message=f"This model's maximum context length is {limit} tokens. However, you requested "
            f"{num_prompt_tokens + num_output_tokens} tokens ({asked}). Please reduce the length of the {prompt_param} "
            f"or completion.",
            type="invalid_request_error",
            code="context_length_exceeded",
            param=prompt_param if num_prompt_tokens >= limit else output_param,
            extra={"num_prompt_tokens": num_prompt_tokens, "max_context_len": limit},
        )
    )


def answer_for(error: BaseException) -> ErrorAnswer:
    """What the client is told of an error."""
    match error:
        case RefusedError():
            return error.answer
        case ContextLengthError():
            return context_length(error.num_prompt_tokens, 0, error.limit, prompt_param="messages").answer
        case CallerError():
            param = _PARAMS.get(str(error).partition(" ")[0].rstrip(":"))
            return bad_request(_text(error), param=param).answer
        case EngineLostError():
            return ErrorAnswer(status=500, message=_text(error), type="server_error", code="engine_failed")
        case MachineError():
            return unavailable(_text(error), code="machine_error").answer
        case RequestFailedError():
            return ErrorAnswer(status=500, message=_text(error), type="server_error", code="request_failed")
        case InternalError() | AmbidexError():
            return ErrorAnswer(status=500, message=_text(error), type="server_error", code="engine_failed")
        case HTTPException():
            return _http_answer(error)
    return ErrorAnswer(  # whoever was asked failed in answering this request: the engine goes on
        status=500,
        message=f"internal error ({type(error).__name__}); the server's log says more",
        type="server_error",
        code="request_failed",
    )


def _text(error: AmbidexError) -> str:
    """The message; whoever runs the server set its settings by flags."""
    return with_flags(str(error), _SETTINGS)


def _http_answer(error: HTTPException) -> ErrorAnswer:
    is_callers = error.status_code < 500
    codes = {404: "not_found", 405: "method_not_allowed"}
    return ErrorAnswer(
        status=error.status_code,
        message=str(error.detail),
        type="invalid_request_error" if is_callers else "server_error",
        code=codes.get(error.status_code, "invalid_value" if is_callers else "request_failed"),
        headers=error.headers or {},
    )
