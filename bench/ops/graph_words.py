"""What do words cost by which a captured CUDA graph meets the host: stream memory operations, or kernels of one warp?

    python bench/ops/graph_words.py [--layers 32] [--products 12] [--out bench/results/graph_words.jsonl]

A graph of `--layers` layers, each of so many products of a 4096 × 4096 matrix with a vector and so many words (waits
for words that are set, and writes of others, in turn): seconds of its launch, and of the GPU. Then meetings one behind
the other: the GPU writes a word and waits for another, which a native thread of the host writes when it has seen the
first. The last line is one JSON record; needs a CUDA GPU.
"""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ambidex.kernels.cpu.native import WORD_STRIDE, AttentionPool, AttentionScript, KeyBatch, ThreadPool
from ambidex.storage.words import KernelWords, StreamWords, Words
from harness import REPO, Quantiles, append_record, environment, significant

WIDTH: Final = 4096
NUM_RUNS: Final = 40
NUM_MEETINGS: Final = 256
WORDS_A_LAYER: Final = (2, 5)
"""All keys travel; the CPU answers besides."""


def main() -> int:
    """Measure, print, record; exit code 2: there is no GPU."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--products", type=int, default=12, help="of a layer")
    parser.add_argument("--out", type=Path, default=REPO / "bench" / "results" / "graph_words.jsonl")
    args = parser.parse_args()
    if min(args.layers, args.products) < 1:
        parser.error("--layers and --products must be at least 1")
    if not torch.cuda.is_available():
        print("this benchmark captures CUDA graphs, and no GPU is seen", file=sys.stderr)
        return 2
    opening = environment()
    kinds: dict[str, Words] = {"stream memory operations": StreamWords(), "kernels": KernelWords()}
    points = [measure_graph(args, None, 0, "none")]
    points += [measure_graph(args, words, num, name) for num in WORDS_A_LAYER for name, words in kinds.items()]
    meetings = {name: measure_meetings(words) for name, words in kinds.items()}
    for name, took in meetings.items():
        print(f"a meeting by {name}: {took.median * 1e6:.2f} µs")
    record = {
        "bench": "graph_words", **opening,
        "settings": {"layers": args.layers, "products": args.products, "width": WIDTH, "runs": NUM_RUNS},
        "points": points, "meeting_s": {name: took.record() for name, took in meetings.items()},
    }  # fmt: skip
    print(append_record(args.out, record))
    return 0


def measure_graph(args: argparse.Namespace, words: Words | None, num: int, name: str) -> dict[str, Any]:
    """Launch and GPU time of a graph with so many words a layer."""
    matrix = torch.randn(WIDTH, WIDTH, dtype=torch.bfloat16, device="cuda")
    x = torch.randn(WIDTH, dtype=torch.bfloat16, device="cuda")
    y = torch.empty_like(x)
    flags = torch.ones(max(num, 1), args.layers, WORD_STRIDE, dtype=torch.int32, pin_memory=True)

    def body() -> None:
        for layer_idx in range(args.layers):
            for _ in range(args.products):
                torch.mv(matrix, x, out=y)
            for place in range(num):
                assert words is not None, "there are words"
                (words.write if place % 2 else words.wait)(flags[place, layer_idx, :1])

    replay = capture(body)
    launches, runs = [], []
    for _ in range(NUM_RUNS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        begin.record()
        start = time.perf_counter()
        replay()
        launches.append(time.perf_counter() - start)
        end.record()
        torch.cuda.synchronize()
        runs.append(float(begin.elapsed_time(end)) / 1e3)
    launch, run = Quantiles.of(launches), Quantiles.of(runs)
    print(f"{num} words a layer, {name}: launched in {launch.median * 1e3:.3f} ms, ran for {run.median * 1e3:.3f} ms")
    return {
        "words_a_layer": num, "kind": name, "launch_s": launch.record(), "run_s": run.record(),
        "seconds_a_word": None if not num else significant(run.median / num / args.layers, 3),
    }  # fmt: skip


def measure_meetings(words: Words) -> Quantiles:
    """Seconds of a meeting with a native thread that has nothing else to do."""
    flags = torch.zeros(3, NUM_MEETINGS, WORD_STRIDE, dtype=torch.int32, pin_memory=True)
    script, batch = make_script(flags)

    def body() -> None:
        for place in range(NUM_MEETINGS):
            words.write(flags[0, place, :1])
            words.wait(flags[1, place, :1])

    flags.fill_(1)  # captured ones wait for nothing, nor do those that load kernels
    replay = capture(body)
    samples = []
    for _ in range(NUM_RUNS):
        torch.cuda.synchronize()
        flags.zero_()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        replay()
        end.record()
        script.run([batch] * NUM_MEETINGS, limit_s=10)
        torch.cuda.synchronize()
        samples.append(float(begin.elapsed_time(end)) / 1e3 / NUM_MEETINGS)
    return Quantiles.of(samples)


def make_script(flags: Tensor) -> tuple[AttentionScript, KeyBatch]:
    """The CPU lane's script for layers without a key."""
    script = AttentionScript(AttentionPool(ThreadPool(1)), *flags)
    q, out, lse = torch.zeros(1, 1, 32), torch.zeros(1, 1, 32), torch.zeros(1, 1)
    pool = torch.zeros(1, 1, 16, 32)
    for _ in range(flags.shape[1]):
        script.add_layer(q, pool, pool, scale=1.0, k_scales=None, v_scales=None, out=out, lse=lse)
    none = torch.zeros(1, dtype=torch.int64)
    batch = KeyBatch(none[:0], torch.zeros(2, dtype=torch.int64), none, none, torch.arange(2), block_size=16)
    return script, batch


def capture(body: Callable[[], None]) -> Callable[[], None]:
    """A graph of what the body launches, which has run once before."""
    body()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        body()
    return graph.replay


if __name__ == "__main__":
    sys.exit(main())
