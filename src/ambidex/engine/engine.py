"""`Engine`: requests in, outputs out. Validates prompts, owns the text side of each request, drives `EngineCore`."""

from collections.abc import Callable

from ambidex.core.errors import InternalError, RequestError
from ambidex.core.ids import RequestId, Tier
from ambidex.core.request import FinishReason, Request, SamplingParams
from ambidex.core.sparsity import NeuronFigures
from ambidex.core.step import SampledToken
from ambidex.engine.auto_placement import Predict
from ambidex.engine.core import EngineCore
from ambidex.engine.outputs import AnswerText, RequestOutput
from ambidex.engine.report import EngineFigures, EngineReport
from ambidex.engine.run_plan import DecodeOutcome
from ambidex.engine.sessions import Sessions
from ambidex.engine.stats import EngineStats
from ambidex.engine.text_side import Prompt, TextSide
from ambidex.engine.weight_tuner import WeightTuner
from ambidex.text.guided import GuideCompiler
from ambidex.text.tokenizer import Tokenizer


class Engine:
    """One model with its queue of requests. Not thread-safe: one thread calls it.

    Args:
        kv_bytes, cached_bytes: bytes that requests hold on each tier now, and that are kept for others to come.
        kv_capacity, weights_bytes: bytes of the KV pools and of the parameters on each tier.
        predict_step: what a decode step should take; None: nobody has worked that out.
        tuner: who moves weights while the engine runs; None: they stay where they are.
        sessions: keeps blocks of the prefix cache on disk; None: nobody does.
        neuron_figures: what was left out of MLPs so far; None: nothing is.
        end_runner: ends the threads of the data plane; called when the engine is closed. None: it has none.
    """

    def __init__(
        self,
        *,
        core: EngineCore,
        text: TextSide,
        report: EngineReport,
        figures: EngineFigures,
        kv_bytes: Callable[[], dict[Tier, int]],
        cached_bytes: Callable[[], dict[Tier, int]],
        guides: GuideCompiler,
        kv_capacity: dict[Tier, int],
        weights_bytes: dict[Tier, int],
        predict_step: Predict | None = None,
        tuner: WeightTuner | None = None,
        sessions: Sessions | None = None,
        neuron_figures: Callable[[], NeuronFigures | None] | None = None,
        end_runner: Callable[[], None] | None = None,
    ) -> None:
        self._end_runner = end_runner
        self._is_closed = False
        self.tuner = tuner
        self.core = core
        self.text = text
        self.report = report
        self.figures = figures
        self._guides = guides
        self.kv_capacity = kv_capacity
        self.weights_bytes = weights_bytes
        self._kv_bytes = kv_bytes
        self._predict_step = predict_step
        self._neuron_figures = neuron_figures
        self._cached_bytes = cached_bytes
        self._sessions = sessions
        self._live: dict[RequestId, tuple[Request, AnswerText]] = {}

    @property
    def stats(self) -> EngineStats:
        """Counters since the engine was built."""
        self.core.stats.record_kv(self._kv_bytes(), self._cached_bytes())
        if self._sessions is not None:
            self._sessions.record(self.core.stats)
        if self._neuron_figures is not None:
            self.core.stats.neurons = self._neuron_figures()
        return self.core.stats

    def compare_decode(self) -> tuple[float, float] | None:
        """Seconds of a decode step, predicted for the mean batch and context so far, and measured in the mean.

        None: no decode step has run, or nobody predicts.
        """
        stats = self.core.stats
        if self._predict_step is None or not stats.num_decode_tokens or not stats.num_decode_steps:
            return None
        batch = round(stats.num_decode_tokens / stats.num_decode_steps)
        predicted = self._predict_step(batch, round(stats.num_decode_keys / stats.num_decode_tokens))
        return None if predicted is None else (predicted, stats.decode_seconds / stats.num_decode_steps)

    def decode_outcome(self) -> DecodeOutcome | None:
        """Decode steps so far beside what was predicted of them; None: no decode step has run."""
        stats = self.core.stats
        if not stats.num_decode_tokens or not stats.num_decode_steps:
            return None
        compared = self.compare_decode()
        return DecodeOutcome(
            num_steps=stats.num_decode_steps,
            measured_s=stats.decode_seconds / stats.num_decode_steps,
            batch=stats.num_decode_tokens / stats.num_decode_steps,
            context=round(stats.num_decode_keys / stats.num_decode_tokens),
            predicted_s=None if compared is None else compared[0],
        )

    @property
    def has_work(self) -> bool:
        """A step would do something."""
        return self.core.scheduler.has_work

    @property
    def has_chores(self) -> bool:
        """There is something to do for an engine that has no other work."""
        return self._sessions is not None and self._sessions.has_unsaved

    def do_chore(self) -> bool:
        """Do a small part of it; False if that is not possible now."""
        return self._sessions is not None and self._sessions.save_next()

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self.text.tokenizer

    @property
    def max_context_len(self) -> int:
        """Tokens of prompt and answer together, at most."""
        return self.text.facts.max_context_len

    def make_request(
        self, prompt: Prompt, params: SamplingParams, *, tenant: str = "", cache_salt: str = "", priority: int = 0
    ) -> Request:
        """Check a prompt and its parameters; nothing runs yet. Any thread may call it.

        Raises:
            RequestError, ContextLengthError: as `TextSide.make_request`, or the grammar cannot be used.
        """
        request = self.text.make_request(prompt, params, tenant=tenant, cache_salt=cache_salt, priority=priority)
        self.check_guide(params)
        return request

    def check_guide(self, params: SamplingParams) -> None:
        """Compile the grammar of the parameters, if they have one, and keep it for the requests to come.

        Raises:
            RequestError: it is not valid, not known in all its parts, or too large.
        """
        self._guides.check(params)

    def submit(self, request: Request) -> RequestId:
        """Queue a checked request.

        Raises:
            RequestError: the engine was closed.
        """
        if self._is_closed:
            raise RequestError(f"request {request.request_id} comes too late: the engine was closed; make another one")
        guide = self._guides.open(request.params)
        if guide is not None:
            request.allowed_tokens = guide.mask()
        self._live[request.request_id] = (request, AnswerText(self.text.tokenizer, request.params, guide))
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
        self.do_chore()
        return outputs

    def abort(self, request_id: RequestId) -> RequestOutput | None:
        """End a request wherever it stands and give its last output; None if it is not known (any more)."""
        if request_id not in self._live:
            return None
        request, answer = self._live.pop(request_id)
        self.core.scheduler.abort(request_id)
        return answer.advance(request, None)

    def drop_cached(self, tenant: str | None = None) -> int:
        """Forget what the prefix cache holds, of one tenant or of all, also on disk; returns the blocks that it held in
        memory or on disk, whichever are more."""
        num_dropped = self.core.scheduler.drop_cached(tenant)
        if self._sessions is not None:
            num_dropped = max(num_dropped, self._sessions.drop(tenant))  # most lie in both
        return num_dropped

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

    def close(self, *, is_trusted: bool = True, save_s: float | None = None) -> None:
        """End: what is to outlive the process is saved, unless the engine's state is unknown; threads end. Nothing may
        run. Closing again does nothing.

        Args:
            save_s: most seconds that saving may take; None: as many as it takes.
        """
        self._is_closed = True
        if self._sessions is not None:
            self._sessions.close(is_trusted=is_trusted, save_s=save_s)
            self._sessions = None
        if self.tuner is not None:
            self.tuner.close()
        if self._end_runner is not None:
            self._end_runner()

    def _follow_guide(self, request: Request, answer: AnswerText, sampled: SampledToken | None) -> None:
        """Say which tokens may come next; an answer that cannot be held to its grammar fails."""
        if answer.guide is None or sampled is None or request.finish_reason is not None:
            return
        try:
            answer.guide.accept(sampled.token_id)
            request.allowed_tokens = answer.guide.mask()
        except RequestError as error:
            self.core.scheduler.finish(request.request_id, FinishReason.ERROR, str(error))
