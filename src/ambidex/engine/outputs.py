"""From token ids to what the user sees: text, why it ended, log-probabilities."""

from dataclasses import dataclass

from ambidex.core.ids import RequestId
from ambidex.core.request import FinishReason, Request, SamplingParams
from ambidex.core.step import SampledToken
from ambidex.text.detokenize import Detokenizer
from ambidex.text.guided import Guide
from ambidex.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """State of an answer. `delta` is the text that came since the last output, `text` all of it.

    `token_ids` include the token that ended the answer; `text` does not show it. `logprobs` has one entry a token when
    asked for. `num_cached_tokens` of the prompt came from the prefix cache. `error` says why a request failed
    (`finish_reason` is then `error`).
    """

    request_id: RequestId
    prompt_token_ids: tuple[int, ...]
    text: str
    delta: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    error: str | None = None
    logprobs: tuple[SampledToken, ...] | None = None
    num_cached_tokens: int = 0

    @property
    def is_finished(self) -> bool:
        """No more will come."""
        return self.finish_reason is not None


class AnswerText:
    """Grows the text of one answer as its tokens come; `guide` is the grammar that it is held to."""

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, guide: Guide | None = None) -> None:
        self.guide = guide
        self._detokenizer = Detokenizer(tokenizer, params.stop, include_stop=params.include_stop)
        self._params = params
        self._text = ""
        self._num_seen = 0
        self._logprobs: list[SampledToken] = []

    @property
    def is_stopped(self) -> bool:
        """A stop string came: the answer is over."""
        return self._detokenizer.stopped

    def advance(self, request: Request, sampled: SampledToken | None) -> RequestOutput:
        """Take in what a step gave to the request."""
        if sampled is not None and self._params.logprobs is not None:
            self._logprobs.append(sampled)
        shown = self._shown_ids(request)
        num_free = max(self._num_seen, min(self._params.min_output_tokens, len(shown)))
        delta = ""
        if num_free > self._num_seen:
            delta = self._detokenizer.push(shown[self._num_seen : num_free], may_stop=False)
        delta += self._detokenizer.push(shown[num_free:])
        self._num_seen = len(shown)
        if self.is_stopped or request.finish_reason is not None:
            delta += self._detokenizer.finish()
        self._text += delta
        return self.snapshot(request, delta=delta)

    def snapshot(self, request: Request, *, delta: str = "") -> RequestOutput:
        """The answer as it stands."""
        return RequestOutput(
            request_id=request.request_id,
            prompt_token_ids=request.prompt_token_ids,
            text=self._text,
            delta=delta,
            token_ids=tuple(request.output_token_ids),
            finish_reason=FinishReason.STOP if self.is_stopped else request.finish_reason,
            error=request.error,
            logprobs=tuple(self._logprobs) if self._params.logprobs is not None else None,
            num_cached_tokens=request.num_cached_tokens,
        )

    def _shown_ids(self, request: Request) -> list[int]:
        ids = request.output_token_ids
        is_ended_by_token = request.finish_reason is FinishReason.STOP and bool(ids) and ids[-1] in request.stop_ids
        return ids[:-1] if is_ended_by_token and not self._params.include_stop else ids
