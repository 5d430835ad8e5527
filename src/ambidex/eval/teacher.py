"""`Teacher`: runs known text through an engine and reads what it would have said after each token.

The tokens behind a prompt are handed over as an answer that is known already. The engine computes them as it does
after a preemption: several in a step, each one a decode query with the keys that the policy chooses for it. A text that
is all prompt attends all keys, whatever the policy: that is the exact run.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ambidex.attention.selective import SelectiveAttention
from ambidex.attention.tiered import TieredAttention
from ambidex.core.config import EngineConfig, Graphs
from ambidex.core.errors import ConfigError, RequestFailedError
from ambidex.core.ids import RequestId
from ambidex.core.request import Request, SamplingParams
from ambidex.core.selection import SelectionSetting
from ambidex.core.step import SelectionFigures, StepPlan
from ambidex.engine.compose import build_engine
from ambidex.engine.engine import Engine
from ambidex.models.base import AttentionOp, CausalLM
from ambidex.runner.input_batch import InputBatch
from ambidex.runner.runner import ModelRunner, call_model

Progress = Callable[[int, int], None]


class Teacher:
    """An engine that answers what it is told to.

    Args:
        progress: called with (bytes read, bytes in all) while weights load.
    Raises:
        ConfigError, ModelError: the settings or the model cannot be used.
        MachineError: the machine has not what they need.
    """

    def __init__(self, config: EngineConfig, *, progress: Progress | None = None) -> None:
        self._wanted = slice(0, 0)
        self._logprobs: list[Tensor] = []
        self._numbers = itertools.count()
        ordinary = replace(config, graphs=Graphs.OFF)  # a step that is replayed does not come by here
        self.engine: Engine = build_engine(ordinary, progress=progress, forward=self._forward)

    def check_length(self, num_tokens: int, *, flag: str) -> None:
        """See to it that a text of so many tokens can be run.

        Raises:
            ConfigError: it is longer than the context limit.
        """
        if num_tokens >= self.engine.max_context_len:
            raise ConfigError(
                f"{flag} {num_tokens} needs a context limit above it: it is {self.engine.max_context_len} "
                f"({self.engine.report.why('kv', 'max_context_len')}): lower {flag}, or raise --max-context-len or the "
                f"KV budgets"
            )

    def exact(self, token_ids: Sequence[int], *, first: int) -> Tensor:
        """Log-probabilities of the token behind each of `token_ids[first:]`, all keys attended: [n, V] fp32."""
        return self._run(token_ids, num_prompt=len(token_ids), first=first)

    def with_policy(
        self, token_ids: Sequence[int], *, num_prompt: int, first: int | None = None
    ) -> tuple[Tensor, SelectionFigures | None]:
        """The same for each token behind the first `num_prompt`, a decode query under the engine's policy, and what the
        policy chose; None: it is `exact`.

        Args:
            first: read from this token on instead; what lies in the prompt was computed with all keys.
        """
        self.engine.core.stats.selection = None
        logprobs = self._run(token_ids, num_prompt=num_prompt, first=num_prompt if first is None else first)
        return logprobs, self.engine.core.stats.selection

    def with_settings(
        self, token_ids: Sequence[int], *, num_prompt: int, first: int, settings: Sequence[SelectionSetting]
    ) -> list[tuple[Tensor, SelectionFigures]]:
        """`with_policy` under each of several settings of a policy that they steer; the prompt is computed once.

        Raises:
            RequestFailedError: the engine could not compute it, or keys moved between tiers meanwhile, so that steps
                cannot be computed again.
        """
        core, runner = self.engine.core, self.engine.core.executor
        assert isinstance(runner, ModelRunner), "no setting of this engine puts another in its place"
        assert runner.selective is not None, "a policy chooses keys"
        request = _request(next(self._numbers), token_ids, num_prompt, num_more=2)  # it does not end by itself
        self._wanted, self._logprobs = slice(first, len(token_ids)), []
        core.scheduler.add(request)
        plans: list[StepPlan] = []
        begin, kept, figures = 0, None, SelectionFigures()
        while request.num_computed_tokens < len(token_ids) and request.error is None:
            plan = core.scheduler.schedule()
            (chunk,) = plan.requests
            if chunk.start + len(chunk.token_ids) > num_prompt:
                if not plans:
                    begin = len(self._logprobs)
                    kept = runner.selective.keep(request.request_id) if chunk.start else None
                plans.append(plan)
            result = runner.execute(replace(plan, selection=settings[0]))
            figures = figures.join(result.selection or SelectionFigures())
            core.scheduler.update(plan, result)
        found = [(torch.cat(self._logprobs), figures)] if request.error is None else []
        if any(plan.moves for plan in plans):
            request.error = request.error or "keys moved between tiers while it was computed: leave out `kv_gpu_tokens`"
        head = self._logprobs[:begin]
        for setting in settings[1:] if request.error is None else ():
            self._logprobs, figures = list(head), SelectionFigures()
            if kept is not None:
                runner.selective.restore(request.request_id, kept)
            for plan in plans:
                again = replace(plan, selection=setting, new_requests=(), finished_requests=())
                result = runner.execute(again)
                request.error = request.error or next(iter(result.failures.values()), None)
                figures = figures.join(result.selection or SelectionFigures())
            found.append((torch.cat(self._logprobs), figures))
        self._end(request)
        return found

    def _run(self, token_ids: Sequence[int], *, num_prompt: int, first: int) -> Tensor:
        """Raises: RequestFailedError: the engine could not compute it."""
        request = _request(next(self._numbers), token_ids, num_prompt)
        self._wanted, self._logprobs = slice(first, len(token_ids)), []
        core = self.engine.core
        core.scheduler.add(request)
        while request.num_computed_tokens < len(token_ids) and request.error is None:
            core.step()
        self._end(request)
        return torch.cat(self._logprobs)

    def _end(self, request: Request) -> None:
        """Give back what a request holds. Raises: RequestFailedError: it had failed."""
        core, error = self.engine.core, request.error
        core.scheduler.abort(request.request_id)
        while core.scheduler.has_work:
            core.step()
        if error is not None:
            raise RequestFailedError(error)

    def _forward(self, model: CausalLM, batch: InputBatch, attention: AttentionOp) -> Tensor:
        hidden = call_model(model, batch, attention)
        assert isinstance(attention, TieredAttention | SelectiveAttention), "steps take the ordinary path"
        wanted = (batch.positions >= self._wanted.start) & (batch.positions < self._wanted.stop)
        self._logprobs.append(torch.log_softmax(model.logits(hidden[wanted]), dim=-1))
        return hidden


def _request(number: int, token_ids: Sequence[int], num_prompt: int, *, num_more: int = 1) -> Request:
    """A request whose answer is known already, but for its last `num_more` tokens."""
    return Request(
        request_id=RequestId(f"eval-{number}"),
        prompt_token_ids=tuple(token_ids[:num_prompt]),
        params=SamplingParams(
            max_output_tokens=len(token_ids) - num_prompt + num_more, temperature=0.0, ignore_eos=True
        ),
        max_total_tokens=len(token_ids) + num_more,
        output_token_ids=list(token_ids[num_prompt:]),
    )
