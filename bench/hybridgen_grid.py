"""How near does HybridGen's feedback come to the best fixed setting, and how fast does it follow when CPU threads go?

    .venv/bin/python bench/hybridgen_grid.py                              # Llama-3.1-8B's shape, random weights, bf16
    .venv/bin/python bench/hybridgen_grid.py --shape tiny --device cpu --dtype fp32 --points 1x300 --keys 8,64 \
        --threads 2,1 --near 32 --recent 64 --exact-layers 1 --steps 3 --follow 12                     # to try it

At each point (BATCHxCONTEXT) and number of threads all fixed settings are measured: each number of selected keys, after
all scores (post) and by the predictor (pre). The best is the fastest; the smallest number is the feedback's floor. Then
feedback sets out from the floor and runs some steps; what it settled on is the median of the last third. At last, with
all threads, half of those that score are taken away for real in the middle of its run, and `followed_in` counts the
steps until the mean of five is within 10 % of the best fixed setting with so many threads. K and V are random and
prompts are not computed. Appends one JSON line to bench/results/hybridgen_grid.jsonl.
"""

import argparse
import dataclasses
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

import decode_gpu
import decode_hybrid
from ambidex import EngineConfig
from ambidex.attention.selective import SelectiveAttention
from ambidex.bench.workload import end
from ambidex.core.config import DeviceKind, Graphs, LoadFormat
from ambidex.core.errors import AmbidexError
from ambidex.core.policy import HybridGenMode
from ambidex.core.selection import SelectionDecision, SelectionSetting
from ambidex.engine.compose import build_engine
from ambidex.engine.engine import Engine
from ambidex.models.base import AttentionOp, CausalLM
from ambidex.runner.input_batch import InputBatch
from ambidex.runner.runner import ModelRunner, call_model
from ambidex.sched.feedback import SelectionFeedback
from harness import append_record, environment, significant

NUM_WARMUP: Final = 2
"""Steps of each fixed setting that are not counted."""
NEAR_ENOUGH: Final = 1.1
"""Times the best fixed setting's step, within which feedback should be."""
NUM_MEAN: Final = 5
"""Steps whose mean says that it has followed."""


class RandomKeys:
    """Calls the model for decode steps alone; prompts get K and V that the pools were filled with at the first."""

    def __init__(self, width: int) -> None:
        self._width = width
        self._is_filled = False

    def __call__(self, model: CausalLM, batch: InputBatch, attention: AttentionOp) -> Tensor:
        if not isinstance(attention, SelectiveAttention) or not attention.has_prompts:
            return call_model(model, batch, attention)
        if not self._is_filled:
            self._is_filled = True
            decode_hybrid.fill_pools(attention, key_std=decode_hybrid.DUMMY_STD * self._width**0.5)
        attention.skip_prompts()
        dtype = next(model.parameters()).dtype
        return torch.zeros(len(batch.token_ids), self._width, dtype=dtype, device=batch.token_ids.device)


class Bench:
    """An engine whose setting is held or left to feedback."""

    def __init__(self, options: decode_gpu.Options, args: argparse.Namespace, folder: str) -> None:
        self._options = options
        self._args = args
        width = decode_gpu.shape_number(options.shape, "hidden_size")
        self.engine: Engine = build_engine(make_config(folder, options, args), forward=RandomKeys(width))
        runner, feedback = self.engine.core.executor, self.engine.core.scheduler.feedback
        assert isinstance(runner, ModelRunner), "no setting of this engine puts another in its place"
        assert runner.selective is not None, "hybridgen chooses keys step by step"
        assert runner.selective.early is not None, "one token a request is a step of its fast form"
        assert feedback is not None, "it is asked for"
        self.feedback: SelectionFeedback = feedback
        self._early = runner.selective.early

    def run(self, point: decode_gpu.Point) -> dict[str, Any]:
        """Search, follow, take threads away."""
        requests, fill_s = decode_gpu.fill(self.engine, point, self._options)
        args, found = self._args, []
        for threads in args.threads:
            self._early.set_num_threads(threads)
            found.append(self._search_and_follow(point, threads))
        self._early.set_num_threads(args.threads[0])
        loss = self._lose_half(point, found) if len(args.threads) > 1 else None
        end(self.engine, requests)
        return {
            "batch": point.batch, "context": point.context, "fill_s": significant(fill_s, 3), "threads": found,
            "loss": loss,
        }  # fmt: skip

    def _search_and_follow(self, point: decode_gpu.Point, threads: int) -> dict[str, Any]:
        fixed = []
        for mode in (HybridGenMode.POST, HybridGenMode.PRE):
            for num_selected in self._args.keys:
                self.feedback.hold(SelectionSetting(num_selected=num_selected, mode=mode))
                seconds = self._steps(point, NUM_WARMUP + self._args.steps)[NUM_WARMUP:]
                fixed.append({"num_selected": num_selected, "mode": mode.value,
                              "step_s": significant(statistics.median(seconds))})  # fmt: skip
        best = min(fixed, key=lambda setting: float(setting["step_s"]))  # type: ignore[arg-type]
        self.feedback.follow(SelectionSetting(num_selected=self.feedback.limits.floor))
        seconds, trace = self._followed(point, self._args.follow)
        settled = statistics.median(seconds[-max(1, len(seconds) // 3) :])
        end = self.feedback.setting
        return {
            "threads": threads, "fixed": fixed, "best": best,
            "feedback": {
                "settled_s": significant(settled),
                "times_best": significant(settled / float(best["step_s"]), 3),  # type: ignore[arg-type]
                "num_selected": end.num_selected, "mode": end.mode.value,
                "steps_s": [significant(second, 3) for second in seconds], "trace": trace,
            },
        }  # fmt: skip

    def _lose_half(self, point: decode_gpu.Point, found: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Feedback settles with all threads, then has half of them."""
        self.feedback.follow(SelectionSetting(num_selected=self.feedback.limits.floor))
        before, _ = self._followed(point, self._args.follow)
        self._early.set_num_threads(self._args.threads[1])
        seconds, trace = self._followed(point, self._args.follow)
        best = float(found[1]["best"]["step_s"])
        means = [statistics.fmean(seconds[place : place + NUM_MEAN]) for place in range(len(seconds) - NUM_MEAN + 1)]
        near = [place for place, mean in enumerate(means) if mean <= NEAR_ENOUGH * best]
        return {
            "from": self._args.threads[0], "to": self._args.threads[1], "best_s": best,
            "before_s": significant(statistics.median(before[-max(1, len(before) // 3) :])),
            "followed_in": near[0] if near else None,
            "settled_s": significant(statistics.median(seconds[-max(1, len(seconds) // 3) :])),
            "steps_s": [significant(second, 3) for second in seconds], "trace": trace,
        }  # fmt: skip

    def _followed(self, point: decode_gpu.Point, num_steps: int) -> tuple[list[float], list[list[Any]]]:
        """Seconds of steps, and for each what was measured and decided: accelerator, scores, transfer, keys, mode."""
        trace: list[list[Any]] = []

        def tell(decision: SelectionDecision) -> None:
            times, after = decision.times, decision.after
            seconds = [significant(second, 3) for second in (times.gpu_s, times.cpu_s, times.transfer_s)]
            trace.append([*seconds, after.num_selected, after.mode.value])

        self.feedback.tell_to(tell)
        seconds = self._steps(point, num_steps)
        self.feedback.tell_to(None)
        return seconds, trace

    def _steps(self, point: decode_gpu.Point, num_steps: int) -> list[float]:
        seconds = []
        for _ in range(num_steps):
            start = time.perf_counter()
            decode_gpu.step(self.engine, point)
            seconds.append(time.perf_counter() - start)
        return seconds


def main() -> int:
    """Measure, print, record."""
    options, args = parse_options()
    opening = environment()
    try:
        with tempfile.TemporaryDirectory() as folder:
            decode_gpu.make_model_folder(Path(folder), options.shape)
            bench = Bench(options, args, folder)
            points = []
            for point in options.points:
                points.append(bench.run(point))
                print_point(points[-1])
    except AmbidexError as error:
        print(error, file=sys.stderr)
        return 2
    ratios = [run["feedback"]["times_best"] for point in points for run in point["threads"]]
    followed = [point["loss"]["followed_in"] for point in points if point["loss"] is not None]
    print(f"feedback: {sum(ratio <= NEAR_ENOUGH for ratio in ratios)} of {len(ratios)} within 10 % of the best fixed "
          f"setting, at most {max(ratios):.2f} times it; steps until it followed the loss of threads: {followed}",
          flush=True)  # fmt: skip
    record = {
        "bench": "hybridgen_grid", **opening,
        "settings": {"shape": options.shape, "dtype": options.dtype.value, "steps": args.steps, "keys": args.keys,
                     "threads": args.threads, "near": args.near, "recent": args.recent, "follow": args.follow,
                     "policy": bench.engine.report.value("compute", "policy"),
                     "prompts": "not computed: random K and V"},
        "points": points,
    }  # fmt: skip
    append_record(options.output, record)
    return 0


def parse_options() -> tuple[decode_gpu.Options, argparse.Namespace]:
    """Read the command line; ends the program with code 2 if it is wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0],
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)  # fmt: skip
    decode_gpu.add_model_options(parser, output="hybridgen_grid.jsonl")
    parser.add_argument("--points", default="1x4096,1x16384,4x4096", help="BATCHxCONTEXT, in this order")
    parser.add_argument("--keys", default="128,512,2048", help="numbers of selected keys; the least is the floor")
    parser.add_argument("--threads", default="15,7", help="that score; the second is what is left after the loss")
    parser.add_argument("--steps", type=int, default=6, help="measured steps of each fixed setting")
    parser.add_argument("--follow", type=int, default=40, help="steps of each run of the feedback")
    parser.add_argument("--near", type=int, default=960, help="newest keys that are attended with true scores")
    parser.add_argument("--exact-layers", type=int, default=2, help="first layers that do not look ahead")
    parser.add_argument("--recent", type=int, default=1024, help="last tokens on the GPU")
    args = parser.parse_args()
    try:
        points = tuple(decode_gpu.Point.parse(word) for word in args.points.split(","))
        args.keys, args.threads = ([int(word) for word in text.split(",")] for text in (args.keys, args.threads))
    except ValueError as error:
        parser.error(f"{error}: give --points as 1x2048,4x4096 and --keys and --threads as 128,512")
    if min(*args.keys, args.steps, args.recent) < 2 or min(args.threads) < 1 or args.near < 0:
        parser.error("--keys, --steps and --recent must be at least 2, --threads at least 1, --near at least 0")
    if args.follow < 2 * NUM_MEAN:
        parser.error(f"--follow must be at least {2 * NUM_MEAN}")
    num_steps = len(args.threads) * (2 * len(args.keys) * (NUM_WARMUP + args.steps) + args.follow) + 2 * args.follow
    options = decode_gpu.Options(
        shape=args.shape, points=points, steps=num_steps, chunk=max(p.batch * p.context for p in points),
        device=args.device, dtype=args.dtype, graphs=Graphs.AUTO, profile=False, output=args.output,
    )  # fmt: skip
    return options, args


def make_config(folder: str, options: decode_gpu.Options, args: argparse.Namespace) -> EngineConfig:
    """An engine whose DRAM tier holds the largest point, and whose GPU tier holds the recent windows."""
    args.sink, args.kv_dtype, args.stream_percent, args.hot = 64, decode_hybrid.KVDTypeChoice.AUTO, None, 0
    args.policy, args.max_dropped_mass = decode_hybrid.PolicyName.EXACT, 0.0
    config = decode_hybrid.make_config(folder, options, args)
    assert config.max_context_len is not None, "that of the largest point"
    assert config.dram_memory is not None, "that of the largest point"
    most_tokens = config.max_running_requests * (config.max_context_len + 2 * decode_gpu.BLOCK_SIZE)
    kept = decode_hybrid.kept_row_bytes(options, most_tokens + (config.kv_gpu_tokens or 0))
    return dataclasses.replace(
        config,
        dram_memory=config.dram_memory + kept,
        load_format=LoadFormat.DUMMY,
        policy=decode_hybrid.PolicyName.HYBRIDGEN,
        near_tokens=args.near,
        exact_layers=args.exact_layers,
        hybridgen_feedback="full",  # type: ignore[arg-type]  # read as the command line is
        min_selected_tokens=min(args.keys),
        num_threads=None if options.device is DeviceKind.CUDA else max(args.threads),
    )


def print_point(figures: dict[str, Any]) -> None:
    """Lines for a point."""
    print(f"{figures['batch']} x {figures['context']}, filled in {figures['fill_s']} s")
    for run in figures["threads"]:
        fixed = ", ".join(f"{one['mode']} {one['num_selected']}: {1e3 * one['step_s']:.2f}" for one in run["fixed"])
        own = run["feedback"]
        print(f"  {run['threads']} threads: {fixed} ms; feedback {1e3 * own['settled_s']:.2f} ms "
              f"({own['times_best']} times the best) with {own['num_selected']} keys, {own['mode']}")  # fmt: skip
    loss = figures["loss"]
    if loss is not None:
        print(f"  {loss['from']} to {loss['to']} threads: {1e3 * loss['before_s']:.2f} ms, then "
              f"{1e3 * loss['settled_s']:.2f} (best fixed {1e3 * loss['best_s']:.2f}), followed in "
              f"{loss['followed_in']} steps", flush=True)  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
