"""`Teacher`: runs known text through an engine and reads what it would have said after each token.

The tokens behind a prompt are handed over as an answer that is known already. The engine computes them as it does
after a preemption: several in a step, each one a decode query with the keys that the policy chooses for it. A text that
is all prompt attends all keys, whatever the policy: that is the exact run.

Under the bounded policy in its native form that is another computation than a decode step's, so there, if it is asked
for, each known token has a step of its own, of the very form that answers are made in: what the step chose is put aside
for the token that is known.
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
from ambidex.core.policy import PolicyName
from ambidex.core.request import Request, SamplingParams
from ambidex.core.selection import SelectionSetting
from ambidex.core.step import SelectionFigures, StepPlan
from ambidex.engine.compose import build_engine
from ambidex.engine.engine import Engine
from ambidex.models.base import AttentionOp, CausalLM
from ambidex.runner.decode import DecodeForm, DecodeOutput
from ambidex.runner.input_batch import InputBatch
from ambidex.runner.runner import ModelRunner, call_model

Progress = Callable[[int, int], None]


class Teacher:
    """An engine that answers what it is told to.

    Args:
        progress: called with (bytes read, bytes in all) while weights load.
        as_answered: under `policy` exact and bounded, decode queries are computed in the steps that answers are made
            in, where these have a form of their own; where keys lie is then a part of what is measured. Else, and for
            other policies, op by op.
        verify_every: of so many of its choices one is computed again, if `config.verify` is set; None: as it is by
            default.
    Raises:
        ConfigError, ModelError: the settings or the model cannot be used.
        MachineError: the machine has not what they need.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        progress: Progress | None = None,
        as_answered: bool = False,
        verify_every: int | None = None,
    ) -> None:
        self._wanted = slice(0, 0)
        self._logprobs: list[Tensor] = []
        self._num_told = 0
        self._chunk = config.max_tokens_per_step
        self._numbers = itertools.count()
        may_decode = as_answered and config.policy in (PolicyName.EXACT, PolicyName.BOUNDED)
        # else a step that is replayed does not come by here
        config = config if may_decode else replace(config, graphs=Graphs.OFF)
        self.engine: Engine = build_engine(
            config,
            progress=progress,
            forward=self._forward,
            watch_decode=self._take,
            verify_every=verify_every,
        )
        has_form = self.engine.report.value("compute", "decode") != DecodeForm.ORDINARY
        self._decodes = self.engine.figures.scans_keys or (
            may_decode and config.policy is PolicyName.EXACT and has_form
        )

    @property
    def form(self) -> str:
        """How decode queries are computed: `native`, or `op by op`."""
        return "native" if self._decodes else "op by op"

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
        """Log-probabilities of the token behind each of `token_ids[first:]`, all keys attended: [n, V] fp32.

        Raises:
            ConfigError: its last chunk has one token, which a policy would take for an answer's.
        """
        if self.engine.figures.scans_keys and len(token_ids) > 1 and len(token_ids) % self._chunk == 1:
            raise ConfigError(
                f"a text of {len(token_ids)} tokens leaves one token to the last chunk (`max_tokens_per_step` "
                f"{self._chunk}), which would be attended as an answer is: take a token more or less"
            )
        return self._run(token_ids, num_prompt=len(token_ids), first=first)

    def with_policy(
        self, token_ids: Sequence[int], *, num_prompt: int, first: int | None = None
    ) -> tuple[Tensor, SelectionFigures | None]:
        """The same for each token behind the first `num_prompt`, a decode query under the engine's policy, and what the
        policy chose; None: it is `exact`.

        Args:
            first: read from this token on instead; what lies in the prompt was computed with all keys.
        """
        first = num_prompt if first is None else first
        if self._decodes:
            return self._decode(token_ids, num_prompt=num_prompt, first=first)
        self.engine.core.stats.selection = None
        logprobs = self._run(token_ids, num_prompt=num_prompt, first=first)
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

    def _decode(
        self, token_ids: Sequence[int], *, num_prompt: int, first: int
    ) -> tuple[Tensor, SelectionFigures | None]:
        """Each token behind the prompt in a step of its own.

        Raises:
            RequestFailedError: the engine could not compute it, or not in the form that it has for such steps.
        """
        core = self.engine.core
        request = _request(next(self._numbers), token_ids, num_prompt)
        request.output_token_ids.clear()
        self._wanted, self._logprobs = slice(first, num_prompt), []
        figures: SelectionFigures | None = None
        core.scheduler.add(request)
        while request.num_computed_tokens < len(token_ids) and request.error is None:
            num_told, plan = self._num_told, core.scheduler.schedule()
            result = core.executor.execute(plan)
            core.scheduler.update(plan, result)
            if result.selection is not None:
                figures = result.selection if figures is None else figures.join(result.selection)
            num_known = num_prompt + len(request.output_token_ids)
            if result.tokens and num_known <= len(token_ids):
                request.output_token_ids[-1] = token_ids[num_known - 1]
            is_decode = any(chunk.start >= num_prompt for chunk in plan.requests)
            if not is_decode and self._num_told > num_told and first >= num_prompt:
                self._logprobs.pop()  # a last chunk of one token takes that form, too, and nobody asked for it
            if is_decode and self._num_told == num_told and request.error is None:
                request.error = "a decode step took the ordinary path, where all keys are attended"
        self._end(request)
        return torch.cat(self._logprobs)[max(0, first - num_prompt) :], figures

    def _take(self, output: DecodeOutput) -> None:
        """Read what a decode step of a form of its own gave, before the next one overwrites it."""
        self._num_told += 1
        self._logprobs.append(torch.log_softmax(output.logits[:1], dim=-1))

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
        if not isinstance(attention, TieredAttention | SelectiveAttention):  # `_take` is told of these steps
            return hidden
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
