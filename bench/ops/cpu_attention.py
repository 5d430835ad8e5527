"""At what share of the memory's read rate does native attention over DRAM run?

    python bench/ops/cpu_attention.py [--gib 4] [--threads 1,2,8,16] [--out bench/results/cpu_attention.jsonl]

One call is one layer's decode step: one request with a long context, or 64 with short ones. K and V of `--gib` GiB, far
more than the caches hold, are cut into as many calls as fit and read through in turn, as a model's layers are; the
figure is bytes of K and V over seconds. Beside it stands what the same threads read plainly from the same memory in the
same run. The last line is one JSON record.
"""

import argparse
import mmap
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ambidex.hw.topology import read_topology
from ambidex.kernels.cpu import native
from harness import REPO, Quantiles, append_record, environment, measure_seconds, significant, watch_others

BLOCK_SIZE: Final = 64
NUM_KV_HEADS: Final = 8
NUM_RUNS: Final = 5
NUMBERS: Final = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "int8": torch.int8}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What is measured: number type of the pool, head_dim, query heads a KV head, requests of so many keys, threads."""

    number: str
    head_dim: int
    group: int
    num_requests: int
    context: int
    threads: int

    @property
    def call_bytes(self) -> int:
        """K, V and scales that one call reads."""
        row = self.head_dim * NUMBERS[self.number].itemsize + (4 if self.number == "int8" else 0)
        return 2 * NUM_KV_HEADS * self.num_requests * self.context * row


def main() -> int:
    """Measure, print, record."""
    options = parse_options()
    threads = [n for n in options.threads if n <= read_topology().num_usable_cores]
    pools = {n: native.ThreadPool(n) for n in threads}
    memory = huge_bytes(int(options.gib * 2**30))
    fill(memory)
    with watch_others() as others:
        before = {n: read_rate(pools[n], memory) for n in threads}
        print("plain read, GB/s:", ", ".join(f"{n} threads {rate / 1e9:.1f}" for n, rate in before.items()), flush=True)
        points = []
        for case in all_cases(threads, quick=options.quick):
            if case.call_bytes > memory.numel():
                print(f"left out, needs {case.call_bytes / 2**30:.1f} GiB: {case}")
                continue
            ceiling = read_rate(pools[case.threads], memory, num_runs=2)
            points.append(measure(case, pools[case.threads], memory, max(ceiling, before[case.threads])))
        after = {n: read_rate(pools[n], memory) for n in threads}
    record = environment() | {
        "bench": "cpu_attention",
        "isa": native.isa(),
        "bytes": memory.nbytes,
        "block_size": BLOCK_SIZE,
        "num_kv_heads": NUM_KV_HEADS,
        "read_bytes_per_s": {str(n): significant(max(before[n], after[n])) for n in threads},
        "points": points,
        "others": asdict(others),
    }
    print(append_record(options.out, record))
    return 0


def parse_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=4.0, help="memory that is read through, GiB")
    parser.add_argument("--threads", type=lambda s: [int(n) for n in s.split(",")], default=[1, 2, 8, 16])
    parser.add_argument("--quick", action="store_true", help="one context, one head_dim")
    parser.add_argument("--out", type=Path, default=REPO / "bench" / "results" / "cpu_attention.jsonl")
    return parser.parse_args()


def all_cases(threads: Sequence[int], *, quick: bool) -> Iterator[Case]:
    """Contexts at group 4 and 128 dims with every thread count; groups and head sizes at one context with the ends."""
    workloads = [(1, 32768)] if quick else [(1, 8192), (1, 32768), (1, 131072), (64, 1024)]
    for number in NUMBERS:
        for num_requests, context in workloads:
            for n in threads:
                yield Case(number=number, head_dim=128, group=4, num_requests=num_requests, context=context, threads=n)
        for head_dim, group in ((128, 1), (128, 7)) if quick else ((128, 1), (128, 7), (64, 1), (64, 4), (64, 7)):
            for n in sorted({threads[0], threads[-1]}):
                yield Case(number=number, head_dim=head_dim, group=group, num_requests=1, context=32768, threads=n)


def huge_bytes(num_bytes: int) -> Tensor:
    """A uint8 tensor in pages of 2 MiB where the system gives them."""
    area = mmap.mmap(-1, num_bytes)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        area.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(area, dtype=torch.uint8)


def fill(memory: Tensor) -> None:
    """Numbers that are finite in every type: bytes of which every fourth is that of a float near 1 (0x3f or 0xbf)."""
    piece = torch.randint(0, 256, (16 * 2**20,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    piece[1::2] = torch.where(piece[1::2] < 128, 0x3E, 0xBE).to(torch.uint8)
    for start in range(0, memory.numel(), piece.numel()):
        part = memory[start : start + piece.numel()]
        part.copy_(piece[: part.numel()])


def read_rate(pool: native.ThreadPool, memory: Tensor, *, num_runs: int = NUM_RUNS) -> float:
    """Bytes/s of plain reads with all of the pool's threads, the best run."""
    part = memory[: part_bytes(memory, pool.num_threads)]
    return part.numel() / min(measure_seconds(lambda: pool.read(part), num_warmups=1, num_runs=num_runs))


def part_bytes(memory: Tensor, threads: int) -> int:
    """What one pass reads: all, but with few threads only so much that it takes a tenth of a second or two."""
    return min(memory.numel(), 2**30 * max(1, threads // 2))


def measure(case: Case, threads: native.ThreadPool, memory: Tensor, ceiling: float) -> dict[str, object]:
    """Time passes over the memory and print the line of a case."""
    calls = make_calls(case, memory[: max(part_bytes(memory, case.threads), 2 * case.call_bytes)])
    scale = case.head_dim**-0.5
    pool = native.AttentionPool(threads)

    def run() -> None:
        for q, k, v, scales, batch in calls:
            pool.attend_blocks(q, k, v, batch, scale=scale, k_scales=scales, v_scales=scales)

    seconds = measure_seconds(run, num_warmups=1, num_runs=NUM_RUNS)
    num_bytes = len(calls) * case.call_bytes
    rates = Quantiles.of([num_bytes / s for s in seconds])
    best = num_bytes / min(seconds)
    print(
        f"{case.number:5} D {case.head_dim:3} group {case.group} {case.num_requests:2} x {case.context:6} keys "
        f"{case.threads:2} threads: {best / 1e9:6.1f} GB/s of K and V (median {rates.median / 1e9:.1f}), "
        f"{best / ceiling:.0%} of plain reads; {min(seconds) / len(calls) * 1e6:8.0f} µs a call",
        flush=True,
    )
    return asdict(case) | {
        "bytes_per_s": rates.record(),
        "best_bytes_per_s": significant(best),
        "read_bytes_per_s": significant(ceiling),
        "share": significant(best / ceiling, 3),
    }


Call = tuple[Tensor, Tensor, Tensor, Tensor | None, native.KeyBatch]


def make_calls(case: Case, memory: Tensor) -> list[Call]:
    """As many layers as the memory holds, each with K and V of its own and its blocks in disorder."""
    dtype = NUMBERS[case.number]
    blocks_per_request = case.context // BLOCK_SIZE
    num_blocks = blocks_per_request * case.num_requests
    part = NUM_KV_HEADS * num_blocks * BLOCK_SIZE * case.head_dim * dtype.itemsize
    shape = (NUM_KV_HEADS, num_blocks, BLOCK_SIZE, case.head_dim)
    ids = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(1))
    requests = torch.arange(case.num_requests + 1)
    batch = native.KeyBatch(
        ids,
        requests * blocks_per_request,
        torch.zeros(case.num_requests, dtype=torch.int64),
        torch.full((case.num_requests,), case.context),
        requests,
        block_size=BLOCK_SIZE,
    )
    q = torch.randn((case.num_requests, NUM_KV_HEADS * case.group, case.head_dim)).to(
        torch.float32 if dtype == torch.int8 else dtype
    )
    calls: list[Call] = []
    for start in range(0, memory.numel() - 2 * part + 1, 2 * part):
        k, v = (memory[start + i * part : start + (i + 1) * part].view(dtype).view(shape) for i in range(2))
        scales = torch.full(shape[:3], 0.01) if dtype == torch.int8 else None
        calls.append((q, k, v, scales, batch))
    return calls


if __name__ == "__main__":
    sys.exit(main())
