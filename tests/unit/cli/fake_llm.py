"""An engine without a model: a token is a word, and every prompt has the same answer."""

import os
import sys
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from click.testing import CliRunner, Result

from ambidex.cli.main import AmbidexCommand
from ambidex.cli.services import Progress, Services
from ambidex.core.config import EngineConfig
from ambidex.core.errors import CallerError, ContextLengthError, RequestError
from ambidex.core.ids import Lane, RequestId, Tier
from ambidex.core.request import FinishReason, SamplingParams
from ambidex.core.step import SampledToken
from ambidex.engine.outputs import RequestOutput
from ambidex.engine.report import EngineReport, ReportRow
from ambidex.engine.run_plan import DecodeOutcome, RunPlan
from ambidex.engine.stats import EngineStats

Prompt = str | Sequence[int]
CHILD_ENV = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
"""Environment of a child that imports what this process imports, this module included."""


@dataclass(kw_only=True)
class FakeLLM:
    """Answers `pieces`; a prompt with the word NAN fails, one of `context_limit` words or more is refused.

    `before_piece` is called with the number of each piece before it comes.
    """

    pieces: tuple[str, ...] = ("Hello", " wörld", "!")
    context_limit: int = 1000
    before_piece: Callable[[int], None] = field(default=lambda _: None)
    configs: list[EngineConfig] = field(default_factory=list)
    asked: list[tuple[Prompt, SamplingParams]] = field(default_factory=list)
    conversations: list[list[Mapping[str, str]]] = field(default_factory=list)
    num_ended_streams: int = 0
    is_closed: bool = False
    plan: RunPlan | None = None
    outcome: DecodeOutcome | None = None

    def make(self, config: EngineConfig, progress: Progress | None) -> "FakeLLM":
        """The factory that `Services` wants."""
        self.configs.append(config)
        if progress is not None:
            progress(1, 1)
        return self

    @property
    def report(self) -> EngineReport:
        facts = (ReportRow(section="kv", name="gpu blocks", value="7", why="what fits"),)
        return EngineReport(facts=facts, plan=self.plan)

    def stats(self) -> EngineStats:
        stats = EngineStats(num_steps=3, num_output_tokens=len(self.pieces), kv_bytes={Tier.GPU: 2048, Tier.DRAM: 0})
        stats.lane_bytes[Lane.CPU] = 4096
        stats.seconds["total"] = 0.5
        stats.num_prefill_tokens, stats.prefill_seconds = 100, 0.25
        stats.num_decode_tokens, stats.decode_seconds = 2, 0.25
        return stats

    def compare_decode(self) -> tuple[float, float] | None:
        return (0.010, 0.0125)

    def decode_outcome(self) -> DecodeOutcome | None:
        return self.outcome

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Generator[RequestOutput, None, None]:
        words = tuple(range(len(prompt.split() if isinstance(prompt, str) else prompt)))
        if len(words) >= self.context_limit:
            raise ContextLengthError(len(words), self.context_limit)
        params = params or SamplingParams()
        self.asked.append((prompt, params))
        return self._stream("NAN" in prompt if isinstance(prompt, str) else False, words, params)

    def chat_stream(
        self, messages: Sequence[Mapping[str, str]], params: SamplingParams | None = None
    ) -> Generator[RequestOutput, None, None]:
        self.conversations.append([dict(message) for message in messages])
        return self.stream(" ".join(message["content"] for message in messages), params)

    def render_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        if any(message["role"] == "tool" for message in messages):
            raise RequestError("role tool is not known")
        return [len(message["content"]) for message in messages]

    def token_text(self, token_id: int) -> str:
        return f"<{token_id}>"

    def generate_each(
        self, prompts: Iterable[tuple[Prompt, SamplingParams]]
    ) -> Generator[tuple[int, RequestOutput], None, None]:
        """The second of two prompts is answered before the first, as an engine may do."""
        waiting: list[tuple[int, RequestOutput]] = []
        for place, (prompt, params) in enumerate(prompts):
            try:
                *_, output = self.stream(prompt, params)
            except CallerError as error:
                output = _make_output((), "", FinishReason.ERROR, error=str(error))
            waiting.append((place, output))
            if len(waiting) == 2:
                yield from reversed(waiting)
                waiting.clear()
        yield from waiting

    def close(self) -> None:
        self.is_closed = True

    def _stream(
        self, is_failing: bool, words: tuple[int, ...], params: SamplingParams
    ) -> Generator[RequestOutput, None, None]:
        try:
            text = ""
            pieces = self.pieces[: params.max_output_tokens]
            for number, piece in enumerate(pieces, start=1):
                self.before_piece(number)
                text += piece
                if is_failing and number == 2:
                    yield _make_output(words, text, FinishReason.ERROR, error="logits are not numbers")
                    return
                is_last = number == len(pieces)
                reason = FinishReason.STOP if len(pieces) == len(self.pieces) else FinishReason.LENGTH
                yield _make_output(
                    words, text, reason if is_last else None, delta=piece, num_tokens=number, logprobs=params.logprobs
                )
        finally:
            self.num_ended_streams += 1


def _make_output(
    words: tuple[int, ...],
    text: str,
    reason: FinishReason | None,
    *,
    delta: str = "",
    num_tokens: int = 0,
    error: str | None = None,
    logprobs: int | None = None,
) -> RequestOutput:
    token = SampledToken(token_id=5, logprob=-0.5, top_logprobs=((5, -0.5),) * (logprobs or 0))
    return RequestOutput(
        request_id=RequestId("r"),
        prompt_token_ids=words,
        text=text,
        delta=delta,
        token_ids=tuple(range(num_tokens)),
        finish_reason=reason,
        error=error,
        logprobs=(token,) * num_tokens if logprobs is not None else None,
    )


def run_ambidex(
    *args: str, llm: FakeLLM | None = None, stdin: str | bytes = b"", env: Mapping[str, str] | None = None
) -> Result:
    """Run a command line in this process against a fake engine."""
    services = Services(make_llm=(llm or FakeLLM()).make)
    return CliRunner(env=dict(env or {})).invoke(AmbidexCommand(), args, input=stdin, obj=services)
