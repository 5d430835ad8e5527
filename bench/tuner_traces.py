"""What does the tuner do when traffic or the machine changes? On a simulated machine, whose rates it does not know.

    .venv/bin/python bench/tuner_traces.py            # writes docs/tuner/*.jsonl and prints a line for each decision

The model is OPT-30B's shape in bf16 (60 GB) on a card of 32 GB with eight channels of DDR5 (presets); steps take the
cost model's times under the true coefficients, with noise. A line of a trace is a step: its seconds with the tuner,
with the placement that the run began with, and with the best one for the phase, all without noise.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final

from ambidex.core.dtypes import DType
from ambidex.core.model_spec import Activation, ModelSpec, OptSpec
from ambidex.cost.units import Coefficients
from ambidex.cost.weights import PLAIN, count_weights
from ambidex.cost.workload import Workload
from ambidex.hw.presets import make_profile
from ambidex.sched.plan_world import PlanWorld
from ambidex.sched.simulated import Phase, SimulatedStep, simulate
from ambidex.sched.tuner import Where, bucket_of
from ambidex.solver.planning import PlanRequest

OPT_30B: Final = ModelSpec(
    architecture="opt", num_layers=48, hidden_size=7168, intermediate_size=28672, num_q_heads=56, num_kv_heads=56,
    head_dim=128, vocab_size=50272, max_context_len=2048, norm_eps=1e-5, activation=Activation.RELU, rope=None,
    windows=(None,) * 48, tie_embeddings=True, qkv_bias=True, out_bias=True, mlp_bias=True, dtype=DType.BF16,
    opt=OptSpec(word_embed_dim=7168, norm_before=True, final_norm=True),
)  # fmt: skip
HALF_THE_THREADS: Final = Coefficients(cpu_weights=2.0, cpu_attention=2.0)
BUSY_LINK: Final = Coefficients(link=2.5)
SCENARIOS: Final[Mapping[str, Sequence[Phase]]] = {
    "batch": [Phase(num_steps=50, batch=batch, context=256) for batch in (1, 64, 1)],
    "threads": [
        Phase(num_steps=40, batch=8, context=512), Phase(num_steps=50, batch=8, context=512, true=HALF_THE_THREADS),
    ],
    "link": [
        Phase(num_steps=40, batch=16, context=512), Phase(num_steps=50, batch=16, context=512, true=BUSY_LINK),
        Phase(num_steps=50, batch=16, context=512),
    ],
}  # fmt: skip
"""Batch 1, then 64, then 1; half of the CPU's threads vanish; a busy copy slows the link, and ends."""
NOISE: Final = 0.03
"""Relative standard deviation of what is measured of a step."""
SEED: Final = 3
FOLDER: Final = Path(__file__).resolve().parent.parent / "docs" / "tuner"


@cache
def world() -> PlanWorld:
    """The model on the machine."""
    return PlanWorld(
        PlanRequest(
            spec=OPT_30B, weights=count_weights(OPT_30B, residence=PLAIN), dtype=DType.BF16,
            profile=make_profile("rtx5090", "ddr5-8ch", "pcie4x16"),
            workload=Workload(batch=1, context=256, prompt=256, chunk=512), gpu_bytes=32 * 10**9, most_batch=64,
        )
    )  # fmt: skip


def best(batch: int, context: int, coefficients: Coefficients | None = None) -> Where:
    """The placement that the solver finds for a workload, on a machine as the presets have it or otherwise."""
    return world().solve(bucket_of(batch, context), coefficients or Coefficients())


@cache
def run(name: str) -> tuple[SimulatedStep, ...]:
    """The steps of a scenario, which begins with the best placement for its first phase."""
    phases = SCENARIOS[name]
    start = best(phases[0].batch, phases[0].context)
    return tuple(simulate(world(), phases, start=start, noise=NOISE, seed=SEED))


def line_of(idx: int, step: SimulatedStep) -> dict[str, Any]:
    """A step as a line of a trace; seconds."""
    found = {
        "step": idx, "batch": step.step.batch, "context": step.step.context, "tuned_s": round(step.tuned_s, 5),
        "start_s": round(step.start_s, 5), "best_s": round(step.best_s, 5), "is_moving": step.step.is_moving,
    }  # fmt: skip
    decision = step.decision
    if decision is None:
        return found
    names = ("predicted_s", "before_s", "measured_s", "move_s")
    seconds = {name: getattr(decision, name) for name in names}
    return found | {
        "decision": decision.kind.value,
        "why": decision.why,
        **{name: None if value is None else round(value, 5) for name, value in seconds.items()},
        "coefficients": [round(value, 3) for value in decision.coefficients.as_tuple()],
    }


def main() -> int:
    """Write the traces."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name in SCENARIOS:
        lines = [line_of(idx, step) for idx, step in enumerate(run(name))]
        (FOLDER / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        for line in lines:
            if "decision" in line:
                print(f"{name} step {line['step']}: {line['decision']}: {line['why']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
