"""What the routes do."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, TypeVar
from uuid import uuid4

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from ambidex.core.request import GuideKind, Request, SamplingParams
from ambidex.engine.client import EngineClient
from ambidex.server.answers import Answer, Answers
from ambidex.server.bodies import Parsed, read_body
from ambidex.server.config import ServerConfig, ToolFormat
from ambidex.server.errors import bad_request, context_length
from ambidex.server.gate import record_of
from ambidex.server.generation import Generation
from ambidex.server.metrics import Metrics
from ambidex.server.params import chat_params, completion_params, for_choice, is_usage_wanted, message_values
from ambidex.server.protocol import (
    AbortRequest,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    NamedTool,
    Sampling,
    TokenizeRequest,
    Tool,
)
from ambidex.server.service import EngineService
from ambidex.server.tools import ToolReader, find_tool_format, make_grammar
from ambidex.server.writers import ChatWriter, CompletionWriter, Writer

T = TypeVar("T")

LONG_TEXT_CHARS: Final = 20_000
"""A text of this length takes about 10 ms to tokenize: longer ones do not hold up the event loop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Handlers:
    """The routes of one server over what they share."""

    config: ServerConfig
    names: tuple[str, ...]
    """Names of the model; the first is the one that answers show."""
    service: EngineService
    answers: Answers
    metrics: Metrics
    begun_s: float

    async def chat(self, http: HttpRequest) -> Response:
        """`POST /v1/chat/completions`."""
        parsed = await read_body(http, ChatRequest, is_lenient=self.config.lenient)
        body, llm = parsed.body, self._engine(parsed.body.model)
        tools = _usable_tools(body)
        kind = self._tool_format(llm, tools)
        params = chat_params(body)
        if kind is not None:
            params = _hold_to_tools(params, body, kind)
        messages = message_values(body.messages)
        tool_values = [tool.model_dump(exclude_none=True) for tool in tools] or None
        num_chars = sum(len(message["content"] or "") for message in messages)
        prompt = await _aside(num_chars, lambda: llm.text.render_chat(messages, tool_values))
        names = frozenset(tool.function.name for tool in tools)
        writer = ChatWriter(
            llm.text.tokenizer,
            body.n or 1,
            make_reader=None if kind is None else lambda: ToolReader(kind, names),
            max_calls=1 if body.parallel_tool_calls is False else None,
        )
        return await self._generate(http, llm, parsed, [prompt], params, writer, prefix="chatcmpl", param="messages")

    async def completions(self, http: HttpRequest) -> Response:
        """`POST /v1/completions`."""
        parsed = await read_body(http, CompletionRequest, is_lenient=self.config.lenient)
        body, llm = parsed.body, self._engine(parsed.body.model)
        params = completion_params(body)
        texts = _prompts(body.prompt)
        self._check_choices(len(texts) * (body.n or 1))
        num_chars = sum(len(text) for text in texts if isinstance(text, str))
        prompts = await _aside(num_chars, lambda: [_encode(llm, text) for text in texts])
        writer = CompletionWriter(llm.text.tokenizer, len(prompts) * (body.n or 1))
        return await self._generate(http, llm, parsed, prompts, params, writer, prefix="cmpl", param="prompt")

    async def models(self, http: HttpRequest) -> Response:
        """`GET /v1/models`."""
        del http
        return JSONResponse({"object": "list", "data": [self._model(name) for name in self.names]})

    async def model(self, http: HttpRequest) -> Response:
        """`GET /v1/models/{name}`."""
        name = http.path_params["name"]
        self._check_model(name)
        return JSONResponse(self._model(name))

    async def embeddings(self, http: HttpRequest) -> Response:
        """`POST /v1/embeddings`: always refused."""
        del http
        raise bad_request(
            f"{self.names[0]} generates text and has no embeddings: use /v1/chat/completions or /v1/completions",
            param="model",
            code="unsupported_model",
        )

    async def tokenize(self, http: HttpRequest) -> Response:
        """`POST /tokenize`."""
        parsed = await read_body(http, TokenizeRequest, is_lenient=self.config.lenient)
        body, llm = parsed.body, self._engine(parsed.body.model)
        if (body.prompt is None) == (body.messages is None):
            raise bad_request("give either prompt or messages", param="prompt")
        if body.messages is not None:
            messages = message_values(body.messages)
            tools = [tool.model_dump(exclude_none=True) for tool in body.tools or ()] or None
            num_chars = sum(len(message["content"] or "") for message in messages)
            ids = await _aside(num_chars, lambda: llm.text.render_chat(messages, tools))
        else:
            text = body.prompt or ""
            ids = await _aside(len(text), lambda: llm.text.tokenizer.encode(text, add_special=body.add_special_tokens))
        return JSONResponse(
            _with_warnings(
                {"count": len(ids), "max_model_len": llm.text.facts.max_context_len, "tokens": ids}, parsed.warnings
            )
        )

    async def detokenize(self, http: HttpRequest) -> Response:
        """`POST /detokenize`."""
        parsed = await read_body(http, DetokenizeRequest, is_lenient=self.config.lenient)
        llm = self._engine(parsed.body.model)
        llm.text.check_ids("tokens", parsed.body.tokens)
        ids = parsed.body.tokens
        text = await _aside(len(ids), lambda: llm.text.tokenizer.decode(ids, skip_special=False))
        return JSONResponse(_with_warnings({"prompt": text}, parsed.warnings))

    async def abort(self, http: HttpRequest) -> Response:
        """`POST /v1/abort`."""
        parsed = await read_body(http, AbortRequest, is_lenient=self.config.lenient)
        answer = self.answers.find(record_of(http).client, parsed.body.id)
        if answer is None:
            raise bad_request(f"no open answer has the id {parsed.body.id!r}", param="id", code="not_found", status=404)
        await answer.abort()
        return JSONResponse(_with_warnings({"id": answer.id, "aborted": True}, parsed.warnings))

    async def health(self, http: HttpRequest) -> Response:
        """`GET /health`: the process lives, and its engine does or is being built."""
        del http
        is_dead = self.service.state == "failed"
        body = {"status": "failed" if is_dead else "ok", "engine": self.service.state}
        return JSONResponse(body, status_code=503 if is_dead else 200)

    async def ready(self, http: HttpRequest) -> Response:
        """`GET /ready`: a token was produced lately, or can be."""
        del http
        readiness = await self.service.readiness()
        body = {name: value for name, value in asdict(readiness).items() if name != "is_ready"}
        return JSONResponse(body, status_code=200 if readiness.is_ready else 503)

    async def metrics_text(self, http: HttpRequest) -> Response:
        """`GET /metrics`."""
        del http
        text = self.metrics.text(await self.service.find_status())
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def status(self, http: HttpRequest) -> Response:
        """`GET /v1/ambidex/status`: settings, and the counters from which the page makes rates."""
        del http
        llm = self.service.engine()
        status = await self.service.status()
        stats = status.stats
        return JSONResponse(
            {
                "model": self.names[0],
                "time_s": time.monotonic() - self.begun_s,
                "stage": status.beat.stage,
                "num_waiting": status.num_waiting,
                "num_running": status.num_running,
                "num_open": self.answers.num_choices,
                "max_queue": self.config.max_queue,
                "max_context_len": llm.text.facts.max_context_len,
                "num_restarts": self.service.num_restarts,
                "num_steps": stats.num_steps,
                "num_computed_tokens": stats.num_computed_tokens,
                "num_output_tokens": stats.num_output_tokens,
                "num_preemptions": stats.num_preemptions,
                "num_cached_tokens": stats.num_cached_tokens,
                "num_evicted_blocks": stats.num_evicted_blocks,
                "num_cache_mismatches": stats.num_cache_mismatches,
                "num_moves": stats.num_moves,
                "num_failed_moves": stats.num_failed_moves,
                "fallbacks": dict(stats.fallbacks),
                "tiers": {
                    tier: {
                        "weights_bytes": status.weights_bytes.get(tier, 0),
                        "kv_bytes": stats.kv_bytes.get(tier, 0),
                        "cached_bytes": stats.cached_bytes.get(tier, 0),
                        "peak_kv_bytes": stats.peak_kv_bytes.get(tier, 0),
                        "capacity_bytes": capacity,
                    }
                    for tier, capacity in status.capacity_bytes.items()
                },
                "lane_bytes": dict(stats.lane_bytes),
                "seconds": dict(stats.seconds),
                "report": llm.report.as_json(),
            }
        )

    async def cache(self, http: HttpRequest) -> Response:
        """`GET /v1/ambidex/cache`: what the prefix cache keeps and has done."""
        del http
        stats = (await self.service.status()).stats
        return JSONResponse(
            {
                "cached_bytes": stats.cached_bytes,
                "num_cached_tokens": stats.num_cached_tokens,
                "num_computed_tokens": stats.num_computed_tokens,
                "num_evicted_blocks": stats.num_evicted_blocks,
                "num_cache_mismatches": stats.num_cache_mismatches,
                "saved_bytes": stats.saved_bytes,
                "num_saved_blocks": stats.num_saved_blocks,
                "num_restored_tokens": stats.num_restored_tokens,
                "num_refused_files": stats.num_refused_files,
            }
        )

    async def drop_cache(self, http: HttpRequest) -> Response:
        """`DELETE /v1/ambidex/cache`: forget what the prefix cache keeps of the caller's requests."""
        num_blocks = await self.service.engine().drop_cached(record_of(http).tenant)
        return JSONResponse({"num_dropped_blocks": num_blocks})

    async def _generate(
        self,
        http: HttpRequest,
        llm: EngineClient,
        parsed: Parsed[Any],
        prompts: Sequence[list[int]],
        params: SamplingParams,
        writer: Writer,
        *,
        prefix: str,
        param: str,
    ) -> Response:
        body: Sampling = parsed.body
        num_each = body.n or 1
        num_choices = num_each * len(prompts)
        self._check_choices(num_choices)
        for prompt in prompts:
            self._check_length(llm, prompt, params, param, body)
        self.answers.check_room(num_choices)
        requests = await self._make_requests(llm, prompts, params, body, record_of(http).tenant)
        if body.user:
            record_of(http).fields["user"] = body.user
        answer = Answer(f"{prefix}-{uuid4().hex}", self.service, requests, self.metrics, is_stream=bool(body.stream))
        generation = Generation(
            answer=answer,
            writer=writer,
            model=body.model or self.names[0],
            num_choices=num_choices,
            num_each=num_each,
            num_prompt_tokens=sum(map(len, prompts)),
            is_stream=bool(body.stream),
            has_usage=is_usage_wanted(body),
            warnings=parsed.warnings,
            ping_s=self.config.ping_s,
        )
        self.answers.check_room(num_choices)  # others may have come while a grammar was compiled
        return await generation.respond(http, self.answers, self.metrics)

    async def _make_requests(
        self, llm: EngineClient, prompts: Sequence[list[int]], params: SamplingParams, body: Sampling, tenant: str
    ) -> list[Request]:
        def make() -> list[Request]:
            return [
                llm.text.make_request(
                    prompt,
                    for_choice(params, idx),
                    tenant=tenant,
                    cache_salt=body.cache_salt or "",
                    priority=body.priority or 0,
                )
                for prompt in prompts
                for idx in range(body.n or 1)
            ]

        if params.guide is not None:
            await self._check_guide(llm, params, params.guide[0])
        return await _aside(4 * sum(map(len, prompts)), make)

    async def _check_guide(self, llm: EngineClient, params: SamplingParams, kind: GuideKind) -> None:
        try:
            await asyncio.wait_for(llm.check_guide(params), self.config.guide_s or None)
        except TimeoutError:
            raise bad_request(
                f"{kind} takes longer than {self.config.guide_s:g} s to compile (--guide-s): simplify it",
                param="response_format" if kind is GuideKind.JSON_SCHEMA else "structured_outputs",
            ) from None

    def _engine(self, model: str | None) -> EngineClient:
        if model is not None:
            self._check_model(model)
        return self.service.engine()

    def _check_model(self, name: str) -> None:
        if name not in self.names:
            raise bad_request(
                f"model {name!r:.200} is not served here: there is {', '.join(self.names)}",
                param="model",
                code="model_not_found",
                status=404,
            )

    def _check_choices(self, num_choices: int) -> None:
        if num_choices > self.config.max_choices:
            raise bad_request(
                f"{num_choices} answers are asked for (prompts times n): at most {self.config.max_choices} "
                f"(--max-choices)",
                param="n",
            )

    def _check_length(
        self, llm: EngineClient, prompt: list[int], params: SamplingParams, param: str, body: Sampling
    ) -> None:
        limit = self.config.max_prompt_tokens
        if limit is not None and len(prompt) > limit:
            raise bad_request(
                f"the prompt has {len(prompt)} tokens: at most {limit} (--max-prompt-tokens)",
                param=param,
                code="context_length_exceeded",
            )
        num_output = params.max_output_tokens or 0
        if len(prompt) + max(1, num_output) > llm.text.facts.max_context_len:
            is_newer = isinstance(body, ChatRequest) and body.max_completion_tokens is not None
            raise context_length(
                len(prompt),
                num_output,
                llm.text.facts.max_context_len,
                prompt_param=param,
                output_param="max_completion_tokens" if is_newer else "max_tokens",
            )

    def _tool_format(self, llm: EngineClient, tools: Sequence[Tool]) -> ToolFormat | None:
        if not tools:
            return None
        if self.config.tool_format is not ToolFormat.AUTO:
            return self.config.tool_format
        kind = find_tool_format(llm.text.chat_template.source)
        if kind is None:
            raise bad_request(
                "the model's chat template shows no way to call tools: leave tools out, or start the server with "
                "--tool-format",
                param="tools",
                code="unsupported_tools",
            )
        return kind

    def _model(self, name: str) -> dict[str, Any]:
        llm = self.service.engine()
        return {
            "id": name,
            "object": "model",
            "created": 0,
            "owned_by": "ambidex",
            "max_model_len": llm.text.facts.max_context_len,
        }


async def _aside(num_chars: int, work: Callable[[], T]) -> T:
    """Do work at once if it is short, else in a thread."""
    return work() if num_chars < LONG_TEXT_CHARS else await asyncio.to_thread(work)


def _encode(llm: EngineClient, text: str | list[int]) -> list[int]:
    if not text:
        raise bad_request("the prompt is empty: give at least one character or token", param="prompt")
    return llm.text.tokenizer.encode(text) if isinstance(text, str) else text


def _prompts(prompt: str | list[str] | list[int] | list[list[int]]) -> list[str | list[int]]:
    """One prompt or several, each a text or token ids."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise bad_request("prompt is an empty list: give at least one token or text", param="prompt")
    if isinstance(prompt[0], int):
        return [[token_id for token_id in prompt if isinstance(token_id, int)]]
    return [text for text in prompt if not isinstance(text, int)]


def _usable_tools(body: ChatRequest) -> list[Tool]:
    """The tools that the model is told of.

    Raises:
        RefusedError: `tool_choice` does not fit them.
    """
    tools, choice = body.tools or [], body.tool_choice
    if not tools and choice not in (None, "none", "auto"):
        raise bad_request("tool_choice asks for a call, but there are no tools", param="tool_choice")
    names = [tool.function.name for tool in tools]
    if len(set(names)) < len(names):
        raise bad_request("two tools have the same name", param="tools")
    if isinstance(choice, NamedTool) and choice.function.name not in names:
        raise bad_request(
            f"tool_choice names {choice.function.name!r:.80}: there is {', '.join(names):.200}", param="tool_choice"
        )
    return [] if choice == "none" else tools


def _hold_to_tools(params: SamplingParams, body: ChatRequest, kind: ToolFormat) -> SamplingParams:
    grammar = make_grammar(kind, body.tools or [], body.tool_choice, parallel=body.parallel_tool_calls is not False)
    if params.guide is None:
        return replace(params, grammar=grammar)
    if grammar is not None:
        raise bad_request("response_format and calls that are held to a schema exclude each other", param="tools")
    return params


def _with_warnings(body: dict[str, Any], warnings: tuple[str, ...]) -> dict[str, Any]:
    return {**body, "warnings": list(warnings)} if warnings else body
