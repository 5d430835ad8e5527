"""`Engine`: requests in, outputs out. Validates prompts, owns the text side of each request, drives `EngineCore`."""

import itertools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ambidex.core.errors import ContextLengthError, InternalError, RequestError
from ambidex.core.ids import RequestId, Tier
from ambidex.core.request import MAX_PRIORITY, FinishReason, Request, SamplingParams
from ambidex.core.step import SampledToken
from ambidex.engine.core import EngineCore
from ambidex.engine.outputs import AnswerText, RequestOutput
from ambidex.engine.report import EngineFigures, EngineReport
from ambidex.engine.stats import EngineStats
from ambidex.text.chat import ChatTemplate
from ambidex.text.guided import GuideCompiler
from ambidex.text.tokenizer import Tokenizer

Prompt = str | Sequence[int]


class Engine:
    """One model with its queue of requests. Not thread-safe: one thread calls it.

    Args:
        max_context_len: tokens of prompt and answer together, at most.
        kv_bytes, cached_bytes: bytes that requests hold on each tier now, and that are kept for others to come.
        kv_capacity, weights_bytes: bytes of the KV pools and of the parameters on each tier.
    """

    def __init__(
        self,
        *,
        core: EngineCore,
        tokenizer: Tokenizer,
        chat_template: ChatTemplate,
        max_context_len: int,
        vocab_size: int,
        eos_ids: frozenset[int],
        report: EngineReport,
        figures: EngineFigures,
        kv_bytes: Callable[[], dict[Tier, int]],
        cached_bytes: Callable[[], dict[Tier, int]],
        guides: GuideCompiler,
        kv_capacity: dict[Tier, int],
        weights_bytes: dict[Tier, int],
    ) -> None:
        self.core = core
        self.tokenizer = tokenizer
        self.report = report
        self.figures = figures
        self.max_context_len = max_context_len
        self._guides = guides
        self.kv_capacity = kv_capacity
        self.weights_bytes = weights_bytes
        self._vocab_size = vocab_size
        self._eos_ids = eos_ids
        self._kv_bytes = kv_bytes
        self._cached_bytes = cached_bytes
        self._live: dict[RequestId, tuple[Request, AnswerText]] = {}
        self._numbers = itertools.count()
        self.chat_template = chat_template

    @property
    def stats(self) -> EngineStats:
        """Counters since the engine was built."""
        self.core.stats.record_kv(self._kv_bytes(), self._cached_bytes())
        return self.core.stats

    @property
    def has_work(self) -> bool:
        """A step would do something."""
        return self.core.scheduler.has_work

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> list[int]:
        """Token ids of a conversation, ready for the model's answer.

        Raises:
            RequestError: the model has no template, or the messages or tools do not fit it.
        """
        return self.tokenizer.encode(self.chat_template.render(messages, tools=tools), add_special=False)

    def make_request(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        tenant: str = "",
        cache_salt: str = "",
        priority: int = 0,
    ) -> Request:
        """Check a prompt and its parameters; nothing runs yet.

        Args:
            tenant, cache_salt: only requests with the same two share what they have in common.
            priority: lower goes sooner among the waiting requests of its tenant.
        Raises:
            RequestError, ContextLengthError: what is wrong with them.
        """
        token_ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else _as_ids(prompt)
        if not isinstance(params, SamplingParams):
            raise RequestError(f"the sampling parameters are a {type(params).__name__}: give SamplingParams(...)")
        if not token_ids or prompt == "":
            raise RequestError("the prompt is empty: give at least one token")
        self.check_ids("prompt", token_ids)
        self.check_ids("stop_token_ids", params.stop_token_ids)
        self.check_ids("logit_bias", [token_id for token_id, _ in params.logit_bias])
        if len(token_ids) >= self.max_context_len:
            raise ContextLengthError(len(token_ids), self.max_context_len)
        if not isinstance(priority, int) or not -MAX_PRIORITY <= priority <= MAX_PRIORITY:
            raise RequestError(f"priority is {priority!r}: it must be in [-{MAX_PRIORITY}, {MAX_PRIORITY}]")
        max_total = self.max_context_len
        if params.max_output_tokens is not None:
            max_total = min(max_total, len(token_ids) + params.max_output_tokens)
        self._guides.check(params)
        eos_ids: frozenset[int] = frozenset() if params.ignore_eos else self._eos_ids
        return Request(
            request_id=RequestId(f"req-{next(self._numbers)}"),
            prompt_token_ids=tuple(token_ids),
            params=params,
            max_total_tokens=max_total,
            stop_ids=eos_ids | frozenset(params.stop_token_ids),
            tenant=tenant,
            cache_salt=cache_salt,
            priority=priority,
        )

    def submit(self, request: Request) -> RequestId:
        """Queue a checked request."""
        guide = self._guides.open(request.params)
        if guide is not None:
            request.allowed_tokens = guide.mask()
        self._live[request.request_id] = (request, AnswerText(self.tokenizer, request.params, guide))
        self.core.scheduler.add(request)
        return request.request_id

    def add(self, prompt: Prompt, params: SamplingParams) -> RequestId:
        """Check and queue."""
        return self.submit(self.make_request(prompt, params))

    def step(self) -> list[RequestOutput]:
        """Run one step; an output for each request that got a token or ended, also in a step that was cut short."""
        changed, tokens = self.core.step()
        changed += [request for request, _ in self._live.values() if request.finish_reason and request not in changed]
        outputs = []
        for request in changed:
            if request.request_id not in self._live:
                raise InternalError(f"a step changed request {request.request_id}, which the engine does not know")
            _, answer = self._live[request.request_id]
            sampled = tokens.get(request.request_id)
            self._follow_guide(request, answer, sampled)
            output = answer.advance(request, sampled)
            if answer.is_stopped and request.finish_reason is None:
                self.core.scheduler.finish(request.request_id, FinishReason.STOP)
            if output.is_finished:
                del self._live[request.request_id]
            outputs.append(output)
        self.core.stats.record_kv(self._kv_bytes(), self._cached_bytes())
        return outputs

    def abort(self, request_id: RequestId) -> RequestOutput | None:
        """End a request wherever it stands and give its last output; None if it is not known (any more)."""
        if request_id not in self._live:
            return None
        request, answer = self._live.pop(request_id)
        self.core.scheduler.abort(request_id)
        return answer.advance(request, None)

    def drop_cached(self, tenant: str | None = None) -> int:
        """Forget what the prefix cache holds, of one tenant or of all; returns the blocks that it held."""
        return self.core.scheduler.drop_cached(tenant)

    def num_computed_tokens(self, request_id: RequestId) -> int:
        """Tokens of a live request that are computed so far; 0 for one that is not known. Any thread may call it."""
        live = self._live.get(request_id)
        return live[0].num_computed_tokens if live is not None else 0

    def snapshot(self, request_id: RequestId) -> RequestOutput:
        """The answer of a request that has not ended, as it stands."""
        request, answer = self._live[request_id]
        return answer.snapshot(request)

    def abort_all(self) -> None:
        """End every request and carry the news to the executor."""
        for request_id in list(self._live):
            self.abort(request_id)
        while self.has_work:
            self.core.step()

    def _follow_guide(self, request: Request, answer: AnswerText, sampled: SampledToken | None) -> None:
        """Say which tokens may come next; an answer that cannot be held to its grammar fails."""
        if answer.guide is None or sampled is None or request.finish_reason is not None:
            return
        try:
            answer.guide.accept(sampled.token_id)
            request.allowed_tokens = answer.guide.mask()
        except RequestError as error:
            self.core.scheduler.finish(request.request_id, FinishReason.ERROR, str(error))

    def check_ids(self, name: str, token_ids: Sequence[int]) -> None:
        """See that ids are the model's.

        Raises:
            RequestError: one is not; names it and the list.
        """
        for token_id in token_ids:
            if not 0 <= token_id < self._vocab_size:
                raise RequestError(f"{name}: {token_id!r} is no token id of this model (0 … {self._vocab_size - 1})")


def _as_ids(prompt: Sequence[int]) -> list[int]:
    """Token ids as plain numbers; numpy's are as good."""
    try:
        ids = [operator.index(token_id) for token_id in prompt if not isinstance(token_id, bool)]
        if len(ids) == len(prompt):
            return ids
    except TypeError:
        pass
    raise RequestError(f"the prompt is a {type(prompt).__name__} of something else: give text or a list of token ids")
