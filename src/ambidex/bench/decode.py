"""`measure_decode`: seconds of a decode step at a context and batch size, beside the floor that the machine allows."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from ambidex.bench.figures import Quantiles, significant
from ambidex.bench.floor import Rates, StepBytes, decode_floor, link_bytes, step_weights
from ambidex.bench.workload import (
    Point,
    Prompts,
    check_point,
    decode_once,
    end,
    fill,
    most_warmup_steps,
    num_answer_tokens,
    warm_up,
)
from ambidex.core.config import EngineConfig
from ambidex.core.ids import Lane, Tier
from ambidex.core.units import format_size
from ambidex.engine.engine import Engine
from ambidex.runner.device import activation_dtype

COLUMNS: Final = (
    "context", "batch", "floor ms", "bound by", "ms a step", "20 %", "80 %", "tokens/s", "share", "KV held", "KV read",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeFigures:
    """What was measured at one point.

    `step` are bytes of a step and `moved_bytes` those of blocks that went from tier to tier in it, both on average;
    `kv_bytes` are held on each tier at the end. `rates` are what the floor is taken from. `num_warmup` steps
    before were not counted.
    """

    point: Point
    fill_s: float
    step_s: Quantiles
    step: StepBytes
    rates: Rates
    moved_bytes: int
    kv_bytes: Mapping[Tier, int]
    sections_s: Mapping[str, float]
    num_replayed_steps: int
    num_warmup: int

    @property
    def lane_floor_s(self) -> dict[str, float]:
        """Seconds that each lane needs for its bytes; see `decode_floor`."""
        return decode_floor(self.step, self.rates)

    @property
    def floor_s(self) -> float:
        """Seconds of a step at least."""
        return max(self.lane_floor_s.values())

    @property
    def tokens_per_s(self) -> float:
        """Tokens of all requests together, by the median step."""
        return self.point.batch / self.step_s.median

    @property
    def share_of_floor(self) -> float:
        """Floor over median step: 1 is as fast as memory allows."""
        return self.floor_s / self.step_s.median

    def record(self) -> dict[str, Any]:
        """For a JSON record; seconds and bytes of one step."""
        return {
            "context": self.point.context,
            "batch": self.point.batch,
            "fill_s": significant(self.fill_s, 3),
            "floor_s": significant(self.floor_s),
            "lane_floor_s": {lane: significant(seconds) for lane, seconds in self.lane_floor_s.items()},
            "step_s": self.step_s.record(),
            "tokens_per_s": significant(self.tokens_per_s),
            "share_of_floor": significant(self.share_of_floor, 3),
            "weight_bytes": self.step.weights,
            "lane_bytes": dict(self.step.kv),
            "link_bytes": self.step.link,
            "moved_bytes": self.moved_bytes,
            "kv_bytes": dict(self.kv_bytes),
            "sections_s": {name: significant(seconds, 3) for name, seconds in self.sections_s.items()},
            "num_replayed_steps": self.num_replayed_steps,
            "num_warmup": self.num_warmup,
        }

    def row(self) -> tuple[str, ...]:
        """For people; see `COLUMNS`."""
        milliseconds = (self.floor_s, self.step_s.median, self.step_s.q20, self.step_s.q80)
        floor, median, q20, q80 = (f"{value * 1e3:.3g}" for value in milliseconds)
        bound = max(self.lane_floor_s.items(), key=lambda item: item[1])[0]
        return (
            str(self.point.context), str(self.point.batch), floor, bound, median, q20, q80,
            f"{self.tokens_per_s:.1f}", f"{self.share_of_floor:.2f}",
            ", ".join(f"{tier} {format_size(size)}" for tier, size in self.kv_bytes.items()),
            ", ".join(f"{lane} {format_size(size)}" for lane, size in self.step.kv.items()),
        )  # fmt: skip


def check_decode(
    engine: Engine, config: EngineConfig, points: Sequence[Point], prompts: Prompts, *, steps: int
) -> None:
    """See to it before anything runs that all points can be measured.

    Raises:
        ConfigError: one cannot; says what is in the way.
    """
    prompts.check(max(point.context for point in points))
    for point in points:
        num_answer = _num_answer(engine, config, point, steps)
        check_point(engine, config, point, num_answer=num_answer, flag="--contexts")


def measure_decode(
    engine: Engine, config: EngineConfig, point: Point, prompts: Prompts, *, steps: int, rates: Rates
) -> DecodeFigures:
    """Fill the contexts, warm up, time `steps` steps from the scheduler to the chosen tokens, and end the requests.

    Raises:
        RequestFailedError: a request failed or had to wait.
    """
    num_answer = _num_answer(engine, config, point, steps)
    requests, fill_s = fill(engine, prompts.make(point), num_answer=num_answer)
    num_warmup = warm_up(engine, lambda: decode_once(engine, requests))
    stats = engine.stats
    lanes, sections = dict(stats.lane_bytes), dict(stats.seconds)
    num_moves, num_replayed = stats.num_moves, stats.num_replayed_steps
    seconds = []
    for _ in range(steps):
        start = time.perf_counter()
        decode_once(engine, requests)
        seconds.append(time.perf_counter() - start)
    stats = engine.stats
    lane_bytes = {lane: (size - lanes.get(lane, 0)) // steps for lane, size in stats.lane_bytes.items()}
    moved = int((stats.num_moves - num_moves) / steps * engine.figures.kv[Tier.DRAM].bytes_per_block)
    step = _step_bytes(engine, point, lane_bytes, moved)
    figures = DecodeFigures(
        point=point,
        fill_s=fill_s,
        step_s=Quantiles.of(seconds),
        step=step,
        rates=rates,
        moved_bytes=moved,
        kv_bytes=dict(stats.kv_bytes),
        sections_s={name: (total - sections.get(name, 0.0)) / steps for name, total in stats.seconds.items()},
        num_replayed_steps=stats.num_replayed_steps - num_replayed,
        num_warmup=num_warmup,
    )
    end(engine, requests)
    return figures


def _num_answer(engine: Engine, config: EngineConfig, point: Point, steps: int) -> int:
    """Tokens of each answer, with the steps that are not counted."""
    num_steps = most_warmup_steps(engine) + steps
    return num_answer_tokens(point, num_steps=num_steps, max_tokens_per_step=config.max_tokens_per_step)


def _step_bytes(engine: Engine, point: Point, lane_bytes: Mapping[Lane, int], moved: int) -> StepBytes:
    """Bytes of a step of this engine: its weights, what its lanes read, what crosses the link."""
    built = engine.figures
    device = torch.device(built.device)
    link = link_bytes(
        built.spec,
        batch=point.batch,
        kv_in_dram=lane_bytes.get(Lane.CPU, 0),
        moved=moved,
        number_bytes=activation_dtype(built.dtype, device).num_bytes,
    )
    weights = step_weights(built.spec, built.dtype, device, keeps_quantized=built.keeps_quantized)
    return StepBytes(weights=weights.num_bytes, kv=lane_bytes, link=link)
