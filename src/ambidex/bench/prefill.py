"""`measure_prefill`: seconds from a prompt to its first token, beside the floor of its operations."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from ambidex.bench.figures import Quantiles, measure_seconds, significant
from ambidex.bench.floor import Rates, StepWeights, prefill_floor, prefill_flops, step_weights
from ambidex.bench.workload import Point, Prompts, check_point, end, fill
from ambidex.core.config import EngineConfig
from ambidex.core.dtypes import DType
from ambidex.core.model_spec import ModelSpec
from ambidex.engine.engine import Engine
from ambidex.engine.report import EngineFigures
from ambidex.runner.device import TORCH_DTYPES

COLUMNS: Final = ("prompt", "floor ms", "ms", "20 %", "80 %", "tokens/s", "share")
NUM_GEMM_RUNS: Final = 5
NUM_ANSWER_TOKENS: Final = 2
"""The first ends the measurement, the second would be the next step's: so the request has not ended by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmRate:
    """Operations/s of the fastest matrix product that torch has for the model's MLP, and its number format."""

    dtype: DType
    flops_per_s: Quantiles

    def record(self) -> dict[str, Any]:
        """For a JSON record."""
        return {"unit": "flop/s", "dtype": self.dtype, **self.flops_per_s.record()}


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillFigures:
    """What was measured for one length of prompt. `rates` and `flops_per_s` are what the floor is taken from."""

    num_tokens: int
    num_steps: int
    seconds: Quantiles
    spec: ModelSpec
    weights: StepWeights
    rates: Rates
    flops_per_s: float

    @property
    def flops(self) -> int:
        """Operations that the prompt needs."""
        return prefill_flops(self.spec, self.weights, num_tokens=self.num_tokens)

    @property
    def floor_s(self) -> float:
        """Seconds of the prefill at least."""
        return prefill_floor(
            self.flops,
            self.weights,
            num_steps=self.num_steps,
            flops_per_s=self.flops_per_s,
            bytes_per_s=self.rates.dram if self.rates.gpu is None else self.rates.gpu,
        )

    @property
    def tokens_per_s(self) -> float:
        """Tokens of the prompt over the median."""
        return self.num_tokens / self.seconds.median

    @property
    def share_of_floor(self) -> float:
        """Floor over median: 1 is as fast as the measured matrix product allows."""
        return self.floor_s / self.seconds.median

    def record(self) -> dict[str, Any]:
        """For a JSON record."""
        return {
            "prompt": self.num_tokens,
            "num_steps": self.num_steps,
            "flops": self.flops,
            "floor_s": significant(self.floor_s),
            "seconds": self.seconds.record(),
            "tokens_per_s": significant(self.tokens_per_s),
            "share_of_floor": significant(self.share_of_floor, 3),
        }

    def row(self) -> tuple[str, ...]:
        """For people; see `COLUMNS`."""
        milliseconds = (self.floor_s, self.seconds.median, self.seconds.q20, self.seconds.q80)
        floor, median, q20, q80 = (f"{value * 1e3:.3g}" for value in milliseconds)
        speed, share = f"{self.tokens_per_s:.1f}", f"{self.share_of_floor:.2f}"
        return str(self.num_tokens), floor, median, q20, q80, speed, share


def check_prefill(engine: Engine, config: EngineConfig, lengths: Sequence[int], prompts: Prompts) -> None:
    """See to it before anything runs that all prompts fit.

    Raises:
        ConfigError: one does not; says what is in the way.
    """
    prompts.check(max(lengths))
    for length in lengths:
        check_point(engine, config, Point(context=length, batch=1), num_answer=NUM_ANSWER_TOKENS, flag="--prompts")


def measure_prefill(
    engine: Engine,
    config: EngineConfig,
    num_tokens: int,
    prompts: Prompts,
    *,
    rounds: int,
    rates: Rates,
    gemm: GemmRate,
) -> PrefillFigures:
    """Compute one prompt alone `rounds` times, after one time that is not counted.

    Raises:
        RequestFailedError: the request failed.
    """
    built = engine.figures
    (prompt,) = prompts.make(Point(context=num_tokens, batch=1))
    seconds = []
    for _ in range(1 + rounds):
        requests, fill_s = fill(engine, [prompt], num_answer=NUM_ANSWER_TOKENS)
        end(engine, requests)
        seconds.append(fill_s)
    return PrefillFigures(
        num_tokens=num_tokens,
        num_steps=-(-num_tokens // config.max_tokens_per_step),
        seconds=Quantiles.of(seconds[1:]),
        spec=built.spec,
        weights=step_weights(
            built.spec, built.dtype, torch.device(built.device), keeps_quantized=built.keeps_quantized
        ),
        rates=rates,
        flops_per_s=gemm.flops_per_s.median,
    )


def gemm_rate(built: EngineFigures, *, num_tokens: int) -> GemmRate:
    """Measure torch's product of the MLP's shape, [T, E] · [E, F], in the weights' format, and in fp32 on a CPU too.

    Args:
        num_tokens: T, the tokens of a step.
    """
    device = torch.device(built.device)
    formats = {built.dtype} if device.type == "cuda" else {built.dtype, DType.FP32}
    rates = [GemmRate(dtype=dtype, flops_per_s=_measure(built, dtype, device, num_tokens)) for dtype in sorted(formats)]
    return max(rates, key=lambda rate: rate.flops_per_s.median)


def _measure(built: EngineFigures, dtype: DType, device: torch.device, num_tokens: int) -> Quantiles:
    size, width = built.spec.hidden_size, built.spec.intermediate_size
    x = torch.ones(num_tokens, size, dtype=TORCH_DTYPES[dtype], device=device)
    weight = torch.ones(width, size, dtype=TORCH_DTYPES[dtype], device=device)
    num_products = max(1, int(2e9 // (2 * num_tokens * size * width)))  # enough work for the clock, also of tiny models

    def multiply() -> None:
        for _ in range(num_products):
            torch.nn.functional.linear(x, weight)
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    seconds = measure_seconds(multiply, num_warmups=1, num_runs=NUM_GEMM_RUNS)
    return Quantiles.of([2 * num_tokens * size * width * num_products / s for s in seconds])
