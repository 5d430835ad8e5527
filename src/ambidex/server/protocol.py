"""Request bodies of the OpenAI API, as far as they are honoured here; all else is refused by name.

Fields that may only say what holds anyway (`store: false`, `echo: false`) are there because clients send them.
"""

from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from ambidex.core.request import MAX_COUNT, MAX_LOGIT_BIAS, MAX_LOGPROBS, MAX_PRIORITY, MAX_STOP_STRINGS

MAX_TOOLS: Final = 128
MAX_TOOL_NAME: Final = 64
MAX_MESSAGES: Final = 16384
MAX_N: Final = 128
"""The OpenAI API's limits."""

OTHER_PARTS: Final = {
    "image_url": "an image", "image_file": "an image", "image": "an image", "input_image": "an image",
    "input_audio": "sound", "audio_url": "sound", "video_url": "a video", "file": "a file", "input_file": "a file",
}  # fmt: skip
"""Parts of messages that clients of other models send."""
UNSUPPORTED_PART: Final = "unsupported_part"
"""The kind of error that they are."""

Count = Annotated[int, Field(ge=1, le=MAX_COUNT)]
Text = Annotated[str, Field(min_length=1)]
TokenIds = list[Annotated[int, Field(ge=0, le=MAX_COUNT)]]
JsonObject = dict[str, Any]


class Body(BaseModel):
    """Unknown fields and values of another type are errors."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class StreamOptions(Body):
    """What a stream brings beside the answer."""

    include_usage: bool = False


class JsonSchema(Body):
    """A named schema; the model does not see name and description."""

    name: str = Field(max_length=256)
    description: str | None = None
    schema_: JsonObject = Field(alias="schema")
    strict: bool | None = None


class TextFormat(Body):
    """Free text."""

    type: Literal["text"]


class JsonObjectFormat(Body):
    """Any JSON object."""

    type: Literal["json_object"]


class JsonSchemaFormat(Body):
    """JSON that fits a schema; always held to it, whatever `strict` says."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


class StructuredOutputs(Body):
    """What OpenAI's `response_format` has no word for; exactly one field."""

    json_: JsonObject | None = Field(None, alias="json")
    regex: str | None = None
    choice: list[Text] | None = Field(None, min_length=1, max_length=1024)
    grammar: str | None = None


class Sampling(Body):
    """What completions and chat completions share."""

    model: str | None = Field(None, max_length=1024)
    max_tokens: Count | None = None
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, gt=0, le=1)
    n: Annotated[int, Field(ge=1, le=MAX_N)] | None = None
    stop: str | Annotated[list[Text], Field(max_length=MAX_STOP_STRINGS)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: Annotated[dict[str, float], Field(max_length=MAX_LOGIT_BIAS)] | None = None
    user: str | None = Field(None, max_length=1024)
    response_format: ResponseFormat | None = None
    # Beyond OpenAI's, by the names that other servers gave them.
    top_k: Annotated[int, Field(ge=-1, le=MAX_COUNT)] | None = None
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, ge=0.01, le=100)
    min_tokens: Annotated[int, Field(ge=0, le=MAX_COUNT)] | None = None
    stop_token_ids: Annotated[TokenIds, Field(max_length=MAX_LOGIT_BIAS)] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    structured_outputs: StructuredOutputs | None = None
    priority: Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = None


class CompletionRequest(Sampling):
    """`POST /v1/completions`."""

    prompt: str | list[str] | TokenIds | list[TokenIds]
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: Literal[False] | None = None
    best_of: Literal[1] | None = None
    suffix: Literal[""] | None = None


class TextPart(Body):
    """A piece of a message; images, sound and files are refused by what they are."""

    type: Literal["text"]
    text: str

    @model_validator(mode="before")
    @classmethod
    def _check_kind(cls, value: Any) -> Any:
        kind = value.get("type") if isinstance(value, dict) else None
        what = OTHER_PARTS.get(kind) if isinstance(kind, str) else None
        if what is not None:
            raise PydanticCustomError(UNSUPPORTED_PART, "is {what} (type {kind})", {"what": what, "kind": kind})
        return value


class CalledFunction(Body):
    """A call that the model made earlier; `arguments` is JSON."""

    name: str = Field(max_length=MAX_TOOL_NAME)
    arguments: str


class EarlierCall(Body):
    """A tool call in an assistant's message."""

    id: str = Field(max_length=256)
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(Body):
    """One turn of a conversation. `developer` is OpenAI's newer word for `system`."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = Field(None, max_length=256)
    tool_calls: Annotated[list[EarlierCall], Field(max_length=MAX_TOOLS)] | None = None
    tool_call_id: str | None = Field(None, max_length=256)
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None


class FunctionTool(Body):
    """A function that the model may call; `parameters` is a JSON schema."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]+$", max_length=MAX_TOOL_NAME)]
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


class Tool(Body):
    """A tool; functions are the only kind."""

    type: Literal["function"]
    function: FunctionTool


class NamedFunction(Body):
    """The function that must be called."""

    name: str


class NamedTool(Body):
    """A `tool_choice` that names one function."""

    type: Literal["function"]
    function: NamedFunction


class ChatRequest(Sampling):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    modalities: Annotated[list[Literal["text"]], Field(max_length=1)] | None = None
    service_tier: Literal["auto", "default"] | None = None
    store: Literal[False] | None = None
    metadata: None = None


class TokenizeRequest(Body):
    """`POST /tokenize`: a prompt or messages."""

    model: str | None = Field(None, max_length=1024)
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)] | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    add_special_tokens: bool = True


class DetokenizeRequest(Body):
    """`POST /detokenize`."""

    model: str | None = Field(None, max_length=1024)
    tokens: TokenIds


class AbortRequest(Body):
    """`POST /v1/abort`: the `id` of an answer, or the `X-Request-Id` that was sent with the request."""

    id: Annotated[str, Field(min_length=1, max_length=256)]
