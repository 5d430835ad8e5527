"""`LLM`: the offline API. One thread; the engine steps while the caller waits or iterates."""

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from itertools import islice
from operator import index
from types import TracebackType
from typing import Any, SupportsIndex

from ambidex.core.config import EngineConfig
from ambidex.core.errors import CallerError, RequestError, RequestFailedError
from ambidex.core.ids import RequestId
from ambidex.core.request import FinishReason, Request, SamplingParams
from ambidex.engine.compose import build_engine
from ambidex.engine.engine import Engine
from ambidex.engine.interrupts import holding_interrupts
from ambidex.engine.outputs import RequestOutput
from ambidex.engine.report import EngineReport
from ambidex.engine.run_plan import DecodeOutcome
from ambidex.engine.stats import EngineStats
from ambidex.engine.text_side import Prompt
from ambidex.text.tokenizer import Tokenizer


class LLM:
    """A model, loaded and ready.

    Args:
        model: a folder, a `.gguf` file, a Hub id, `smollm2`, or a whole `EngineConfig`.
        progress: called with (bytes read, bytes in all) while weights load.
        settings: fields of `EngineConfig`.
    Raises:
        ConfigError, ModelError: the settings or the model cannot be used.
        MachineError: the machine has not what they need.
    """

    def __init__(
        self, model: str | EngineConfig, *, progress: Callable[[int, int], None] | None = None, **settings: Any
    ) -> None:
        config = EngineConfig.of(model, settings)
        self.config = config
        self._engine: Engine = build_engine(config, progress=progress)
        self._inboxes: dict[RequestId, list[RequestOutput]] = {}

    @property
    def report(self) -> EngineReport:
        """What the settings became on this machine."""
        return self._engine.report

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._engine.tokenizer

    def token_text(self, token_id: int) -> str:
        """Text of one token as it stands inside a text, U+FFFD where it is a part of a character."""
        return self._engine.tokenizer.token_text(token_id)

    def stats(self) -> EngineStats:
        """Counters since the engine was built."""
        return self._engine.stats

    def compare_decode(self) -> tuple[float, float] | None:
        """Seconds of a decode step, predicted and measured; None without `placement` auto or before one has run."""
        return self._engine.compare_decode()

    def decode_outcome(self) -> DecodeOutcome | None:
        """Decode steps so far beside what was predicted of them; None: no decode step has run."""
        return self._engine.decode_outcome()

    def generate(
        self,
        prompts: str | Sequence[int] | Sequence[str | Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Answer prompts (texts or token ids), all at once; outputs in the order of the prompts.

        Raises:
            RequestError: a prompt or its parameters are wrong; nothing has run then.
        """
        items = _as_prompts(prompts)
        each = [params or SamplingParams()] * len(items) if not isinstance(params, Sequence) else list(params)
        if len(each) != len(items):
            raise CallerError(f"{len(each)} sampling parameters for {len(items)} prompts: give one, or one for each")
        requests = [self._engine.make_request(item, own) for item, own in zip(items, each, strict=True)]
        ids = [request.request_id for request in requests]
        finished: dict[RequestId, RequestOutput] = {}
        try:
            for request in requests:
                self._open(request)
            while len(finished) < len(ids):
                finished |= {output.request_id: output for output in self._next(ids) if output.is_finished}
        finally:
            self._close(ids)
        return [finished[request_id] for request_id in ids]

    def generate_each(
        self, prompts: Iterable[tuple[str | Sequence[int], SamplingParams]]
    ) -> Generator[tuple[int, RequestOutput], None, None]:
        """Answer many prompts and give each answer, with its place in the input, as soon as it is ready.

        At most twice `max_running_requests` are held at a time. A prompt that cannot be answered gives an output whose
        `error` says why; the others go on.
        """
        source = enumerate(prompts)
        places: dict[RequestId, int] = {}
        limit = 2 * self.config.max_running_requests
        try:
            while True:
                chunk = list(islice(source, limit - len(places)))
                is_drained = not chunk and len(places) < limit
                for place, (prompt, params) in chunk:
                    try:
                        request = self._engine.make_request(prompt, params)
                    except CallerError as error:
                        yield place, _failed(error)
                        continue
                    places[request.request_id] = place
                    try:
                        self._open(request)
                    except CallerError as error:  # a grammar that cannot be followed from the first token on
                        self._close([request.request_id])
                        yield places.pop(request.request_id), _failed(error)
                if not places and is_drained:
                    return
                if not places:
                    continue
                for output in self._next(places):
                    if output.is_finished:
                        self._close([output.request_id])
                        yield places.pop(output.request_id), output
        finally:
            self._close(places)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Generator[RequestOutput, None, None]:
        """Answer one prompt, piece by piece. Closing the iterator ends the request.

        An output comes after each step, so that the caller can leave in the middle of a long prompt; its `delta` is
        empty while the prompt is computed and while half a character or half a stop string is held back.
        """
        return self._stream(self._engine.make_request(prompt, params or SamplingParams()))

    def render_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of a conversation, ready for the model's answer.

        Raises:
            RequestError: there is no chat template, or the messages do not fit it.
        """
        return self._engine.text.render_chat(messages)

    def chat(self, messages: Sequence[Mapping[str, str]], params: SamplingParams | None = None) -> RequestOutput:
        """Answer a conversation (`role` and `content` of each message) with the model's chat template.

        Raises:
            RequestFailedError: the engine could not finish the request.
        """
        output = list(self.chat_stream(messages, params))[-1]
        if output.finish_reason is FinishReason.ERROR:
            raise RequestFailedError(output.error)
        return output

    def chat_stream(
        self, messages: Sequence[Mapping[str, str]], params: SamplingParams | None = None
    ) -> Generator[RequestOutput, None, None]:
        """The same, piece by piece."""
        prompt = self._engine.text.render_chat(messages)
        return self._stream(self._engine.make_request(prompt, params or SamplingParams()))

    def close(self) -> None:
        """End all requests; open streams end with finish reason `abort`."""
        with holding_interrupts():
            for request_id, inbox in self._inboxes.items():
                output = self._engine.abort(request_id)
                inbox += [output] if output is not None else []
            self._engine.abort_all()
            self._engine.close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _stream(self, request: Request) -> Generator[RequestOutput, None, None]:
        request_id = request.request_id
        try:
            self._open(request)
            while True:
                for output in self._next([request_id]) or [self._engine.snapshot(request_id)]:
                    yield output
                    if output.is_finished:
                        return
        finally:
            self._close([request_id])

    def _open(self, request: Request) -> None:
        with holding_interrupts():
            self._inboxes[request.request_id] = []
            self._engine.submit(request)

    def _next(self, request_ids: Iterable[RequestId]) -> list[RequestOutput]:
        """Outputs of these requests; steps the engine if none lies ready. Other open requests' outputs are kept."""
        if not any(self._inboxes[request_id] for request_id in request_ids):
            with holding_interrupts():
                for output in self._engine.step():
                    self._inboxes[output.request_id].append(output)
        ready = []
        for request_id in request_ids:
            ready += self._inboxes[request_id]
            self._inboxes[request_id] = []
        return ready

    def _close(self, request_ids: Iterable[RequestId]) -> None:
        with holding_interrupts():
            for request_id in request_ids:
                self._inboxes.pop(request_id, None)
                self._engine.abort(request_id)


def _as_prompts(prompts: str | Sequence[int] | Sequence[str | Sequence[int]]) -> list[Prompt]:
    """One prompt or many: a text, or a list of numbers, is one."""
    if isinstance(prompts, str):
        return [prompts]
    try:
        items: list[Any] = list(prompts)
    except TypeError:
        raise RequestError(f"prompts is a {type(prompts).__name__}: give text, token ids, or a list of them") from None
    numbers = [item for item in items if isinstance(item, SupportsIndex) and not isinstance(item, bool)]
    if items and len(numbers) == len(items):
        return [[index(number) for number in numbers]]
    if numbers:
        raise RequestError(f"prompts mixes token ids with prompts: {len(numbers)} of {len(items)} are numbers")
    return items


def _failed(error: CallerError) -> RequestOutput:
    return RequestOutput(
        request_id=RequestId(""),
        prompt_token_ids=(),
        text="",
        delta="",
        token_ids=(),
        finish_reason=FinishReason.ERROR,
        error=str(error),
    )
