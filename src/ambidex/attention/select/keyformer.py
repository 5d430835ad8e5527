"""`keyformer`: H2O's scheme with noise and temperature in the scores. Source: arXiv:2403.09054;
github.com/d-matrix-ai/keyformer-llm.

A key's score is the sum, over the queries that saw it, of softmax((x + ζ) / τ) over the keys attended, x being q·k ·
scale and ζ Gumbel noise, new for each query and key; τ goes from `tau_start` at the prompt to `tau_end` at the longest
answer, in equal steps. After the prompt, and after each decode step, the newest `recent` keys are kept and those of the
rest with the largest sums; the others are dropped for good. What is attended is weighed by the ordinary softmax.

Differences from the authors' code: one score a KV head, the sum over the query heads that share it; one score a request
(theirs adds up the batch); in theirs the mask is one longer than the scores, so the key between recent ones and the
rest is always lost and the step's own key counts as a recent one: here none is lost, and the own key comes on top; a
request without a limit of its answer raises τ by 0.01 a step, their configuration's fallback. The noise is a hash of
the engine's seed, layer, position, head and key, so that it depends neither on other requests, nor on how a prompt is
cut, nor on the device. Positions are the original ones, as in their main program.
"""

from typing import Final

from ambidex.attention.select.accumulated import BudgetPolicy, NewestAndBest, SumPlan
from ambidex.attention.select.policy import PolicyRequest, Selector
from ambidex.core.model_spec import ModelSpec
from ambidex.core.policy import PolicySettings
from ambidex.kernels.early_rows import SumRule
from ambidex.kernels.noise import Noise

TAU_STEP_WITHOUT_LIMIT: Final = 0.01


class Keyformer(BudgetPolicy):
    """Largest accumulated noisy probabilities and the newest keys."""

    def __init__(self, settings: PolicySettings, spec: ModelSpec) -> None:
        super().__init__(settings, spec)
        assert settings.tau_start is not None, "keyformer has a temperature"
        assert settings.tau_end is not None, "keyformer has a temperature"
        self._tau = (settings.tau_start, settings.tau_end)

    def open(self, request: PolicyRequest, layer_idx: int) -> Selector:
        budget, num_recent = self._divide(request)
        first, last = self._tau
        limit = request.max_output_tokens
        return _Noisy(
            self.spec.num_kv_heads,
            budget,
            num_recent=num_recent,
            num_prompt=request.num_prompt_tokens,
            tau=first,
            tau_step=(last - first) / limit if limit is not None else TAU_STEP_WITHOUT_LIMIT,
            noise_seed=noise_seed(self.settings.seed, layer_idx),
        )


class _Noisy(NewestAndBest):
    def __init__(
        self,
        num_kv_heads: int,
        budget: int,
        *,
        num_recent: int,
        num_prompt: int,
        tau: float,
        tau_step: float,
        noise_seed: int,
    ) -> None:
        super().__init__(num_kv_heads, budget, num_recent=num_recent)
        self._num_prompt = num_prompt
        self._tau = tau
        self._tau_step = tau_step
        self._noise_seed = noise_seed

    def noise_of(self, num_keys: int) -> Noise:
        return Noise(self._noise_seed, self._tau_of(num_keys))

    @property
    def rule(self) -> SumRule:
        return SumRule(drops_first=self.drops_first, noise_seed=self._noise_seed)

    def plan_sums(self, num_keys: int) -> SumPlan:
        return super().plan_sums(num_keys)._replace(tau=self._tau_of(num_keys))

    def _tau_of(self, num_keys: int) -> float:
        """The temperature of a query that sees so many keys; queries of the prompt come before all others."""
        return self._tau + max(0, num_keys - self._num_prompt) * self._tau_step


def noise_seed(seed: int, layer_idx: int) -> int:
    """The seed of a layer's noise."""
    return (seed * 1_000_003 + layer_idx) % 2**40
