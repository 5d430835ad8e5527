"""At what share of the memory's read rate do native matrix products of small steps run?

    python bench/ops/cpu_linear.py [--gib 0.5] [--threads 1,2] [--out bench/results/cpu_linear.jsonl]
    python bench/ops/cpu_linear.py --gib 4 --threads 15 --numbers bf16,Q4_0 --shapes 7168x28672,28672x7168 \
        --tokens 1,4,8,16,32,64,128 --isas amx,avx512bf16 --no-prefill      # one form against another
    python bench/ops/cpu_linear.py --gib 4 --threads 15 --numbers Q4_0 --shapes 8192x28672,28672x8192 \
        --tokens 1,4,8,16,32,64 --isas amx+tiles,amx --round-x --no-prefill      # 4 bits in tiles, in vectors

Weights of `--gib` GiB, far more than the caches hold, are cut into as many matrices as fit and multiplied in turn, as a
model's layers are; the figure is bytes of weights over seconds. Beside it stands what the same threads read plainly
from the same memory right before, and the time of a call whose work is nothing. For many tokens torch's fp32 product of
fp32 weights stands beside it, which 16-bit and quantised weights must not fall behind, and for quantised ones the time
that dequantising them first would take. The last line is one JSON record.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from cpu_attention import fill, huge_bytes, read_rate

from ambidex.hw.topology import read_topology
from ambidex.kernels.cpu import native
from ambidex.kernels.cpu.linear import LinearPool, Matrices
from ambidex.kernels.cpu.quantized import BLOCKS, GROUP_ROWS, QuantizedMatrix, packed_bytes
from ambidex.kernels.linear import LinearContext, LinearOp
from harness import REPO, Quantiles, append_record, environment, measure_seconds, significant, watch_others

NUM_RUNS: Final = 5
NUMBERS: Final = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
FORMATS: Final = (*NUMBERS, *BLOCKS)
SHAPES: Final = ((576, 3072), (1536, 576), (4096, 4096))
"""Columns and rows: gate and up together, and down, of SmolLM2-135M; one of an 8B model."""
PREFILL_TOKENS: Final = (128, 512)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What is measured: number type, columns K and rows N of a matrix, tokens of a step, threads."""

    number: str
    num_in: int
    num_out: int
    tokens: int
    threads: int
    isa: str = native.isa()
    tiles: bool = False
    rounds_x: bool = False

    @property
    def call_bytes(self) -> int:
        """Weights that one call reads."""
        if self.number in BLOCKS:
            return packed_bytes(self.number, (self.num_out, self.num_in))
        return self.num_in * self.num_out * NUMBERS[self.number].itemsize

    @property
    def is_whole(self) -> bool:
        """Whether rows are whole blocks."""
        return self.num_in % BLOCKS.get(self.number, (1, 0))[0] == 0


def main() -> int:
    """Measure, print, record."""
    options = parse_options()
    counts = [n for n in options.threads if n <= read_topology().num_usable_cores]
    memory = huge_bytes(int(options.gib * 2**30))
    fill(memory)
    points, prefill, calls = [], [], {}
    with watch_others() as others:
        for count in counts:
            threads = native.ThreadPool(count)
            calls[str(count)] = measure_call(threads)
            points += [measure(case, threads, memory) for case in all_cases(options, count)]
            if options.prefill:
                prefill += [measure_prefill(case, threads) for case in prefill_cases(options, count)]
    record = environment() | {
        "bench": "cpu_linear",
        "isa": native.isa(),
        "bytes": memory.nbytes,
        "call_s": calls,
        "points": points,
        "prefill": prefill,
        "others": asdict(others),
    }
    print(append_record(options.out, record))
    return 0


def parse_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=0.5, help="weights that are read through, GiB")
    parser.add_argument("--threads", type=numbers, default=[1, 2, 8, 16])
    parser.add_argument("--numbers", type=lambda s: s.split(","), default=FORMATS, help=f"of {', '.join(FORMATS)}")
    parser.add_argument("--shapes", type=shapes, default=SHAPES, help="columns x rows, such as 576x3072,1536x576")
    parser.add_argument("--tokens", type=numbers, default=[1, 4, 16], help="of a decode step")
    parser.add_argument(
        "--isas",
        type=lambda s: s.split(","),
        default=[native.isa()],
        help="forms, one after the other; amx+tiles: 4-bit weights in tiles, too",
    )
    parser.add_argument("--round-x", action="store_true", help="x holds bf16 numbers, as where a GPU sends it")
    parser.add_argument("--no-prefill", dest="prefill", action="store_false", help="decode steps only")
    parser.add_argument("--out", type=Path, default=REPO / "bench" / "results" / "cpu_linear.jsonl")
    return parser.parse_args()


def numbers(text: str) -> list[int]:
    """Whole numbers between commas."""
    return [int(word) for word in text.split(",")]


def shapes(text: str) -> list[tuple[int, ...]]:
    """Columns and rows, such as 576x3072."""
    return [tuple(int(n) for n in word.split("x")) for word in text.split(",")]


def all_cases(options: argparse.Namespace, threads: int) -> Iterator[Case]:
    """Every shape, format and form, decode steps."""
    for number, (num_in, num_out), tokens, form in product(
        options.numbers, options.shapes, options.tokens, options.isas
    ):
        isa, plus, _ = form.partition("+tiles")
        case = Case(
            number=number, num_in=num_in, num_out=num_out, tokens=tokens, threads=threads, isa=isa, tiles=bool(plus),
            rounds_x=options.round_x,
        )  # fmt: skip
        if case.is_whole:
            yield case


def prefill_cases(options: argparse.Namespace, threads: int) -> Iterator[Case]:
    """Chunks of a prompt."""
    for num_in, num_out in options.shapes:
        for number in options.numbers:
            for tokens in PREFILL_TOKENS:
                case = Case(number=number, num_in=num_in, num_out=num_out, tokens=tokens, threads=threads)
                if case.is_whole:
                    yield case


def measure_call(threads: native.ThreadPool) -> float:
    """Seconds of a call for one token and 16 x 16 weights: what a call costs besides its work."""
    pool, matrices = LinearPool(threads), Matrices([torch.zeros(16, 16)], [None])
    x = torch.zeros(1, 16)

    def run() -> None:
        for _ in range(1000):
            pool.multiply(matrices, x)

    return significant(min(measure_seconds(run, num_warmups=1, num_runs=NUM_RUNS)) / 1000)


def measure(case: Case, threads: native.ThreadPool, memory: Tensor) -> dict[str, object]:
    """Time passes over the memory and print the line of a case."""
    part = memory if case.tokens == 1 else memory[: memory.numel() // 4]
    ceiling = read_rate(threads, part, num_runs=2)
    weights = cut(part, case)
    pool = LinearPool(threads, tiles_from=1 if case.tiles else None)
    x = torch.randn(case.tokens, case.num_in)
    if case.rounds_x:
        x = x.bfloat16().float()

    def run() -> None:
        for matrices in weights:
            pool.multiply(matrices, x, isa=case.isa)

    seconds = measure_seconds(run, num_warmups=1, num_runs=NUM_RUNS)
    ceiling = max(ceiling, read_rate(threads, part, num_runs=2))
    num_bytes = len(weights) * case.call_bytes
    best = num_bytes / min(seconds)
    form = f"{case.isa}+tiles" if case.tiles else case.isa
    print(
        f"{case.number} {case.num_out:5} x {case.num_in:4}, {case.tokens:2} tokens, {case.threads:2} threads, "
        f"{form}: {best / 1e9:6.1f} GB/s of weights, {best / ceiling:.0%} of plain reads ({ceiling / 1e9:.1f}); "
        f"{min(seconds) / len(weights) * 1e6:6.0f} µs a call",
        flush=True,
    )
    return asdict(case) | {
        "bytes_per_s": Quantiles.of([num_bytes / s for s in seconds]).record(),
        "best_bytes_per_s": significant(best),
        "read_bytes_per_s": significant(ceiling),
        "share": significant(best / ceiling, 3),
    }


def cut(memory: Tensor, case: Case) -> Sequence[Matrices]:
    """As many matrices as the memory holds."""
    pieces = [piece for piece in memory.split(case.call_bytes) if piece.numel() == case.call_bytes]
    return [Matrices([weight_in(piece, case)], [None]) for piece in pieces]


def weight_in(piece: Tensor, case: Case) -> Tensor | QuantizedMatrix:
    """A matrix of the case whose memory is that piece."""
    if case.number in BLOCKS:
        shape = (case.num_out, case.num_in)
        return QuantizedMatrix(case.number, shape, piece.view(-(-case.num_out // GROUP_ROWS), -1))
    return piece.view(NUMBERS[case.number]).view(case.num_out, case.num_in)


def measure_prefill(case: Case, threads: native.ThreadPool) -> dict[str, object]:
    """Time of a large product as the engine computes it, and of torch's in fp32, taken in turn."""
    torch.set_num_threads(case.threads)
    x, weight = torch.randn(case.tokens, case.num_in), torch.randn(case.num_out, case.num_in)
    op = LinearOp(LinearContext(threads))
    stored: Tensor | QuantizedMatrix
    if case.number in BLOCKS:
        stored = weight_in(torch.randint(0, 0x3C, (case.call_bytes,), dtype=torch.uint8), case)  # scales are finite
    else:
        stored = weight.to(NUMBERS[case.number])
    ours, plain, widening = [], [], []
    for _ in range(2 * NUM_RUNS):
        ours += measure_seconds(lambda: op(x, [stored], [None]), num_warmups=1, num_runs=1)
        plain += measure_seconds(lambda: torch.nn.functional.linear(x, weight), num_warmups=1, num_runs=1)
        if isinstance(stored, QuantizedMatrix):
            widening += measure_seconds(stored.dense, num_warmups=1, num_runs=1)
    figures = {"s": significant(min(ours)), "torch_fp32_s": significant(min(plain))}
    if widening:
        figures["dequantize_s"] = significant(min(widening))
    also = f", dequantising in one thread {min(widening) * 1e6:6.0f} µs" if widening else ""
    print(
        f"{case.number} {case.num_out:5} x {case.num_in:4}, {case.tokens} tokens, {case.threads:2} threads: "
        f"{min(ours) * 1e6:6.0f} µs, torch in fp32 {min(plain) * 1e6:6.0f} µs{also}",
        flush=True,
    )
    return asdict(case) | figures


if __name__ == "__main__":
    sys.exit(main())
