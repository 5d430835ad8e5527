"""What does moving weights at run time bring when the traffic changes?

    .venv/bin/ambidex calibrate && .venv/bin/python bench/tuner_run.py       # OPT-30B's layers, batch 1, 64, 1; a GPU
    .venv/bin/python bench/tuner_run.py --quick                              # a tiny shape on the CPU, to try it

One engine with `--tune-weights` answers phases of so many requests each; then each batch runs in an engine of its own
whose placement was solved for it and stays (the best static choice that the model knows). Per phase: the median of the
first five steps, of those behind the thirtieth (or the last third), the static engine's, and what was decided. The
layers are of a real shape, fewer than the model has; prompts are not computed (random K and V). Appends one JSON line
to bench/results/tuner_run.jsonl.
"""

import argparse
import gc
import logging
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import torch

from ambidex import EngineConfig
from ambidex.bench.workload import end
from ambidex.core.config import DTypeChoice, LoadFormat
from ambidex.core.errors import AmbidexError
from ambidex.core.model_spec import ModelSpec
from ambidex.core.units import parse_size
from ambidex.cost.units import BLOCK_SIZE
from ambidex.engine.compose import build_engine
from ambidex.engine.engine import Engine
from ambidex.models.site_plans import RingSizes
from ambidex.runner.decode import DecodeForm
from harness import REPO, append_record, environment, significant
from planned import CHUNK, Configuration, PromptsOnDemand, Settings, fill, make_model, make_settings, step

SETTLED: Final = 30
"""Steps of a phase after which the tuner should have found its place."""


def main() -> int:
    """Measure, print, record."""
    args = parse_args()
    opening = environment()
    logging.basicConfig(level=logging.WARNING)
    logging.getLogger("ambidex.engine.weight_tuner").setLevel(logging.INFO)
    try:
        settings = make_settings(args)
        tuned = run_tuned(args, settings)
        static = {batch: run_static(args, settings, batch) for batch in dict.fromkeys(args.phases)}
    except AmbidexError as error:
        print(error, file=sys.stderr)
        return 2
    for phase in tuned["phases"]:
        phase["static_s"] = static[phase["batch"]]
        if phase["settled_s"] is not None:
            phase["times_static"] = significant(phase["settled_s"] / phase["static_s"], 3)
        print(phase, flush=True)
    record = {
        "bench": "tuner_run", **opening,
        "settings": {"shape": args.shape, "layers": args.layers, "gpu_memory": args.gpu_memory, "context": args.context,
                     "phases": args.phases, "steps": args.steps, "device": settings.device.value,
                     "profile": {"source": settings.profile.source, "date": settings.profile.date}},
        **tuned,
    }  # fmt: skip
    append_record(args.output, record)
    return 0


def parse_args() -> argparse.Namespace:
    """Read the command line; ends the program with code 2 if it is wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0],
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="a tiny shape on the CPU, with rates of data sheets")
    parser.add_argument("--shape", default="opt-30b", help="of the model")
    parser.add_argument("--layers", type=int, default=12, help="of the model")
    parser.add_argument("--gpu-memory", type=parse_size, default="8GiB", help="budget of the GPU")
    parser.add_argument("--phases", default="1,64,1", help="requests of each phase")
    parser.add_argument("--context", type=int, default=128, help="tokens of each prompt")
    parser.add_argument("--steps", type=int, default=60, help="of each phase")
    parser.add_argument("--profile", type=Path, help="rates of this machine; default: what `ambidex calibrate` wrote")
    parser.add_argument("--output", type=Path, default=REPO / "bench/results/tuner_run.jsonl", help="gets a line")
    args = parser.parse_args()
    try:
        args.phases = [int(word) for word in args.phases.split(",")]
    except ValueError:
        parser.error(f"--phases {args.phases!r} are not numbers such as 1,64,1")
    if min(*args.phases, args.layers, args.context) < 1 or args.steps < 6:
        parser.error("--phases, --layers and --context must be at least 1, --steps at least 6")
    if args.quick:
        args.shape, args.layers, args.gpu_memory = "tiny", 3, parse_size("7MiB")
        args.phases = [min(phase, 4) for phase in args.phases]
    return args


def run_tuned(args: argparse.Namespace, settings: Settings) -> dict[str, Any]:
    """All phases in one engine whose weights move."""
    engine, spec = make_engine(args, settings, max(args.phases), tunes=True)
    assert spec.num_layers == args.layers, "the folder's config is the model's"
    tuner, phases = engine.tuner, []
    for batch in args.phases:
        num_before = len(tuner.decisions) if tuner is not None else 0
        seconds = run_phase(engine, batch, args)
        settled = seconds[SETTLED:] if len(seconds) > SETTLED + 5 else seconds[-(len(seconds) // 3) :]
        phases.append({
            "batch": batch,
            "first_s": significant(statistics.median(seconds[:5])),
            "settled_s": significant(statistics.median(settled)) if settled else None,
            "steps_s": [significant(second, 3) for second in seconds],
            "decisions": [
                {"step": decision.step_idx, "kind": decision.kind.value, "why": decision.why,
                 "before_s": significant(decision.before_s), "predicted_s": significant(decision.predicted_s),
                 "measured_s": None if decision.measured_s is None else significant(decision.measured_s),
                 "coefficients": [significant(value, 3) for value in decision.coefficients.as_tuple()]}
                for decision in (tuner.decisions[num_before:] if tuner is not None else ())
            ],
        })  # fmt: skip
    found = {"phases": phases, "num_failed_moves": 0 if tuner is None else tuner.num_failed_moves,
             "num_graph_failures": engine.stats.num_graph_failures, "has_tuner": tuner is not None}  # fmt: skip
    if tuner is not None:
        tuner.close()
    return found


def run_static(args: argparse.Namespace, settings: Settings, batch: int) -> float:
    """Median seconds of a step in an engine that was solved for this batch."""
    gc.collect()  # the engine before needs its memory no more
    if settings.is_cuda:
        torch.cuda.empty_cache()
    engine, _ = make_engine(args, settings, batch, tunes=False)
    return significant(statistics.median(run_phase(engine, batch, args)[5:]))


def make_engine(args: argparse.Namespace, settings: Settings, batch: int, *, tunes: bool) -> tuple[Engine, ModelSpec]:
    """An engine whose placement is solved for a batch."""
    longest = longest_context(args, batch)
    with tempfile.TemporaryDirectory() as name:
        spec = make_model(Path(name), args.shape, args.layers)
        config = EngineConfig(
            model=name,
            device=settings.device,
            dtype=DTypeChoice(settings.dtype.value),
            load_format=LoadFormat.DUMMY,
            block_size=BLOCK_SIZE,
            max_context_len=longest,
            max_tokens_per_step=CHUNK if settings.is_cuda else 64,
            max_running_requests=batch,
            gpu_memory=args.gpu_memory,
            kv_gpu_tokens=batch * (-(-longest // BLOCK_SIZE)) * BLOCK_SIZE,
            prefix_cache_percent=0,
            placement="auto",
            tune_weights=tunes,
        )
        engine = build_engine(
            config,
            forward=PromptsOnDemand(spec.hidden_size),
            decode_form=None if settings.is_cuda else DecodeForm.FIXED,
            weight_ring=None if settings.is_cuda else RingSizes(chunk_bytes=1 << 17, num_slots=2),
            profile=settings.profile,
        )
    return engine, spec


def longest_context(args: argparse.Namespace, batch: int) -> int:
    """Tokens that a request has at most."""
    return int(args.context + 2 * batch * -(-args.context // 64) + args.steps + 8)


def run_phase(engine: Engine, batch: int, args: argparse.Namespace) -> list[float]:
    """Seconds of each step of so many requests."""
    configuration = Configuration(
        shape=args.shape, layers=args.layers, batch=batch, context=args.context, gpu_memory=args.gpu_memory
    )
    requests = fill(engine, configuration, longest_context(args, batch))
    seconds = []
    for _ in range(args.steps):
        start = time.perf_counter()
        step(engine, configuration)
        seconds.append(time.perf_counter() - start)
    end(engine, requests)
    return seconds


if __name__ == "__main__":
    sys.exit(main())
