"""`Answer`: the choices of one HTTP request while they run; `Answers`: all that are open, by their id."""

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from ambidex.core.errors import AmbidexError, EngineLostError, InternalError, RequestFailedError
from ambidex.core.request import FinishReason, Request
from ambidex.engine.client import EngineClient, Reply
from ambidex.engine.outputs import RequestOutput
from ambidex.server.errors import unavailable
from ambidex.server.metrics import Metrics
from ambidex.server.service import EngineService

logger = logging.getLogger(__name__)

Push = Callable[[int, RequestOutput], bool]
"""Shows what came to a choice; False if it cannot now."""

PROGRESS_S: Final = 1.0
"""How long a stream waits for the engine to say how far its prompt is."""


@dataclass(slots=True)
class _Choice:
    """One choice; `latest` is what has come since the reader last looked, `held` the text of those it came after."""

    request: Request
    latest: RequestOutput | None = None
    held: str = ""
    last_token_s: float | None = None
    num_tokens: int = 0
    is_finished: bool = False


class _News:
    """An event that one task waits for, with a time-out that costs no timer for each wait.

    `asyncio.wait_for` makes a task and a timer each time: 40 µs, for each token of each stream.
    """

    def __init__(self) -> None:
        self._is_set = False
        self._waiter: asyncio.Future[None] | None = None
        self._since_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_set(self) -> bool:
        """There is news that nobody has taken yet."""
        return self._is_set

    def touch(self) -> None:
        """Something came that is no news for who waits: the time-out begins anew."""
        self._since_s = asyncio.get_running_loop().time()

    def set(self) -> None:
        """There is news."""
        self._is_set = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def wait(self, timeout_s: float | None) -> bool:
        """Wait for news and take it; false after `timeout_s` without any, or a little later."""
        if not self._is_set:
            loop = asyncio.get_running_loop()
            self._waiter, self._since_s = loop.create_future(), loop.time()
            if timeout_s is not None and self._timer is None:
                self._timer = loop.call_later(timeout_s, self._look, timeout_s)
            try:
                await self._waiter
            finally:
                self._waiter = None
        is_set, self._is_set = self._is_set, False
        return is_set

    def close(self) -> None:
        """Nobody waits any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self, timeout_s: float) -> None:
        """The timer: it runs on while there is news, and ends a wait that has lasted too long."""
        loop = asyncio.get_running_loop()
        left_s = self._since_s + timeout_s - loop.time() if self._waiter is not None else timeout_s
        if left_s <= 0 and self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
        self._timer = loop.call_later(left_s if left_s > 0 else timeout_s, self._look, timeout_s)


class Answer:
    """One or more choices that are generated side by side.

    Outputs that come faster than they are read are joined, so that a client that reads slowly costs no memory.

    Args:
        requests: checked requests, one a choice.
        is_stream: what has been read is sent at once: an answer of which something was read cannot begin anew.
    """

    def __init__(
        self,
        answer_id: str,
        service: EngineService,
        requests: Sequence[Request],
        metrics: Metrics,
        *,
        is_stream: bool = False,
    ) -> None:
        self.id = answer_id
        self.begun_s = time.monotonic()
        self.first_token_s: float | None = None
        self.finish_reasons: list[str] = ["open"] * len(requests)
        self._service = service
        self._metrics = metrics
        self._choices = [_Choice(request) for request in requests]
        self._num_unfinished = len(self._choices)
        self._leave: list[Callable[[], None]] = []
        self._news = _News()
        self._error: AmbidexError | None = None
        self._is_stream = is_stream
        self._has_shown = False
        self._push: Push | None = None
        self._llm: EngineClient | None = None
        self._restart: asyncio.Task[None] | None = None

    @property
    def is_finished(self) -> bool:
        """Every choice has ended and been read."""
        return self._num_unfinished == 0

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompts, each counted once for each choice."""
        return sum(len(choice.request.prompt_token_ids) for choice in self._choices)

    @property
    def num_output_tokens(self) -> int:
        """Tokens of all choices so far."""
        return sum(choice.num_tokens for choice in self._choices)

    async def progress(self) -> tuple[int, int]:
        """Prompt tokens that are computed, and in all."""
        prompts = {choice.request.request_id: len(choice.request.prompt_token_ids) for choice in self._choices}
        computed = [0] * len(prompts)
        if self._llm is not None:
            with contextlib.suppress(TimeoutError, AmbidexError):  # a stalled or lost engine has computed nothing
                computed = await asyncio.wait_for(self._llm.num_computed_tokens(list(prompts)), PROGRESS_S)
        return sum(map(min, computed, prompts.values())), sum(prompts.values())

    def start(self) -> None:
        """Queue all choices.

        Raises:
            RefusedError: the engine is not ready.
        """
        self._submit(self._service.engine())

    async def next(self, timeout_s: float | None = None) -> list[tuple[int, RequestOutput]]:
        """What has come since the last call, for each choice that has news; nothing after `timeout_s` without any.

        Raises:
            RequestFailedError: a choice failed inside the engine.
            AmbidexError: the engine failed, or the server ends.
        """
        while True:
            if not await self._news.wait(timeout_s):
                return []
            if isinstance(self._error, InternalError | EngineLostError) and not self._has_shown:
                self._begin_again()
                continue
            if self._error is not None:
                raise self._error
            news = []
            for idx, choice in enumerate(self._choices):
                output, choice.latest = choice.latest, None
                if output is None:
                    continue
                if choice.held:
                    output, choice.held = replace(output, delta=choice.held + output.delta), ""
                if output.finish_reason is FinishReason.ERROR:
                    raise RequestFailedError(output.error or "the engine gave no reason")
                if output.finish_reason is not None and not choice.is_finished:
                    choice.is_finished = True
                    self._num_unfinished -= 1
                news.append((idx, output))
            if news:
                self._has_shown = self._is_stream
                return news

    def push_to(self, push: Push) -> None:
        """Let what comes from now on be shown where it comes, without waking the reader, who is told of the end, of
        errors, and of what could not be shown."""
        self._push = push

    def end(self) -> None:
        """Nobody reads any more: whatever still runs is ended and frees its memory."""
        self._push = None
        self._news.close()
        if self._restart is not None:
            self._restart.cancel()
        self._leave_all()

    def _leave_all(self) -> None:
        for choice, leave in zip(self._choices, self._leave, strict=False):
            if not choice.is_finished:
                leave()
        self._leave.clear()

    def fail(self, error: AmbidexError) -> None:
        """Let the reader see an error instead of what still would come."""
        self._error, self._has_shown = error, True
        self._news.set()

    async def abort(self) -> None:
        """End every choice; the reader sees finish reason `abort`."""
        if self._restart is not None and not self._restart.done():
            self._restart.cancel()
            for idx, choice in enumerate(self._choices):
                if not choice.is_finished:
                    self._put(idx, _aborted(choice.request))
        if self._llm is not None:
            for choice in self._choices:
                await self._llm.abort(choice.request.request_id)

    def _submit(self, llm: EngineClient) -> None:
        self._llm = llm
        for idx, choice in enumerate(self._choices):
            if not choice.is_finished:
                self._leave.append(llm.submit(choice.request, functools.partial(self._put, idx)))

    def _begin_again(self) -> None:
        """Queue the choices at the engine that is built in place of the failed one, when it is there: nothing has been
        sent yet. Meanwhile the reader waits as for any news."""
        self._error = None
        self._leave_all()
        self._llm = None
        if self._restart is not None:
            self._restart.cancel()
        self._restart = asyncio.get_running_loop().create_task(self._start_again())

    async def _start_again(self) -> None:
        try:
            llm = await self._service.wait()
            for choice in self._choices:
                old = choice.request
                choice.request = llm.text.make_request(
                    old.prompt_token_ids,
                    old.params,
                    tenant=old.tenant,
                    cache_salt=old.cache_salt,
                    priority=old.priority,
                )
                choice.latest, choice.held = None, ""
                choice.last_token_s, choice.num_tokens = None, 0
            logger.warning("answer %s is queued again", self.id)
            self._submit(llm)
        except AmbidexError as error:
            self._error = error
            self._news.set()

    def _put(self, idx: int, reply: Reply) -> None:
        if isinstance(reply, AmbidexError):
            self._error = reply
        else:
            choice = self._choices[idx]
            self._note_time(idx, reply)
            is_between = reply.finish_reason is None and not self._news.is_set
            if is_between and self._push is not None and self._show(self._push, idx, reply):
                return
            if choice.latest is not None:
                choice.held += choice.latest.delta
            choice.latest = reply
        self._news.set()

    def _show(self, push: Push, idx: int, output: RequestOutput) -> bool:
        """Show what came now; False leaves it to the reader. What goes wrong is this answer's affair alone."""
        try:
            is_shown = push(idx, output)
        except Exception as error:
            logger.exception("answer %s cannot be written", self.id)
            self._push = None
            self._error = RequestFailedError(f"the answer cannot be written: {type(error).__name__}")
            return False
        if is_shown:
            self._news.touch()
        return is_shown

    def _note_time(self, idx: int, output: RequestOutput) -> None:
        choice, now = self._choices[idx], time.monotonic()
        if choice.last_token_s is not None:
            self._metrics.token_gap_s.observe(now - choice.last_token_s)
        elif output.token_ids:
            self._metrics.first_token_s.observe(now - self.begun_s)
            self.first_token_s = self.first_token_s or now
        choice.last_token_s, choice.num_tokens = now, len(output.token_ids)
        if output.finish_reason is not None:
            self.finish_reasons[idx] = output.finish_reason.value


def _aborted(request: Request) -> RequestOutput:
    """The last output of a request that is ended before an engine has it."""
    return RequestOutput(
        request_id=request.request_id,
        prompt_token_ids=request.prompt_token_ids,
        text="",
        delta="",
        token_ids=(),
        finish_reason=FinishReason.ABORT,
        logprobs=None if request.params.logprobs is None else (),
    )


class Answers:
    """The open answers of a server.

    Args:
        limit: choices that may be open at the same time.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._open: dict[tuple[str, str], Answer] = {}
        self._num_choices = 0
        self._closing: AmbidexError | None = None

    @property
    def num_open(self) -> int:
        """Answers that have not ended."""
        return len(set(map(id, self._open.values())))

    @property
    def num_choices(self) -> int:
        """Their choices."""
        return self._num_choices

    def check_room(self, num_choices: int) -> None:
        """See whether so many choices may come in.

        Raises:
            RefusedError: the queue is full; 429.
        """
        if self._closing is not None:
            raise unavailable("the server is shutting down", code="engine_closed")
        if self._num_choices + num_choices > self._limit:
            raise unavailable(
                f"the queue is full: {self._num_choices} answers are open, {num_choices} are asked for, at most "
                f"{self._limit} may be: try again later",
                code="queue_full",
                status=429,
            )

    def add(self, answer: Answer, names: Sequence[tuple[str, str]], num_choices: int) -> None:
        """Enter an answer under its names: (client, id)."""
        self._num_choices += num_choices
        for name in names:
            self._open.setdefault(name, answer)

    def remove(self, answer: Answer, names: Sequence[tuple[str, str]], num_choices: int) -> None:
        """Strike an answer out, with the names under which it was entered."""
        self._num_choices -= num_choices
        for name in names:
            if self._open.get(name) is answer:
                del self._open[name]

    def find(self, client: str, name: str) -> Answer | None:
        """The open answer of that name, if any."""
        return self._open.get((client, name))

    def close(self) -> None:
        """Take no more; those that are open go on."""
        self._closing = unavailable("the server is shutting down", code="engine_closed")

    def fail_all(self) -> None:
        """End what is still open with a clean error."""
        self.close()
        for answer in set(self._open.values()):
            answer.fail(unavailable("the server is shutting down", code="engine_closed"))
