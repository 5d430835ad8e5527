"""At what share of the memory's read rate does a GPU attend over blocks in tile order, by head_dim?

    python bench/ops/gpu_tiles.py [--gib 4] [--head-dims 64,80,96,128] [--out bench/results/gpu_tiles.jsonl]
    python bench/ops/gpu_tiles.py --device cpu --gib 0.02 --context 512      # to try it: no kernel, no record

One call is one layer's decode step over streamed keys: of one request with a long context, or of 16 with shorter ones.
K and V of `--gib` GiB are cut into as many calls as fit, which one CUDA graph makes one after another. They lie in GPU
memory, where the stream lane brings them, or in pinned host memory, which the kernel then reads over the link. The
figure is bytes of K and V, padding of rows included, over seconds; beside it stands what torch's sum reads of the same
memory in the same run. The last line is one JSON record.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ambidex.kernels import api
from ambidex.kernels.cuda.pinned_view import view_on_gpu
from ambidex.kernels.reference.kv_tiles import padded_dim
from harness import REPO, Quantiles, append_record, environment, measure_seconds, significant

BLOCK_SIZE: Final = 64
NUM_KV_HEADS: Final = 8
NUM_RUNS: Final = 20
NUM_REQUESTS: Final = (1, 16)
DTYPES: Final = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What is measured: where K and V lie, head_dim, query heads a KV head, requests of so many keys each."""

    place: str
    head_dim: int
    group: int
    num_requests: int
    context: int

    @property
    def row_size(self) -> int:
        """Numbers of a row, padding included."""
        return padded_dim(self.head_dim)

    @property
    def part_numbers(self) -> int:
        """Numbers of K, or of V, that one call reads."""
        return NUM_KV_HEADS * self.num_requests * self.context * self.row_size


def main() -> int:
    """Measure, print, record; exit code 2: there is no GPU."""
    options = parse_options()
    is_cuda = options.device == "cuda"
    if is_cuda and not torch.cuda.is_available():
        print("this benchmark needs a CUDA GPU, and none is seen: --device cpu tries it without one", file=sys.stderr)
        return 2
    opening = environment()
    points = []
    for place in options.places if is_cuda else ["cpu"]:
        host, memory = make_memory(place, int(options.gib * 2**30) // 2, DTYPES[options.dtype])
        ceiling = read_rate(memory)
        print(f"{place}: plainly read at {ceiling.median / 1e9:.1f} GB/s", flush=True)
        points += [measure(case, memory, ceiling) for case in all_cases(place, options) if fits(case, memory)]
        del memory, host
    if not is_cuda:
        return 0
    record = {
        "bench": "gpu_tiles", **opening,
        "settings": {"gib": options.gib, "dtype": options.dtype, "block_size": BLOCK_SIZE,
                     "num_kv_heads": NUM_KV_HEADS, "runs": NUM_RUNS},
        "points": points,
    }  # fmt: skip
    print(append_record(options.out, record))
    return 0


def parse_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--gib", type=float, default=4.0, help="K and V that a pass reads, GiB")
    parser.add_argument("--head-dims", type=numbers, default=[64, 80, 96, 112, 128, 160, 192, 256])
    parser.add_argument("--groups", type=numbers, default=[1, 4], help="query heads a KV head")
    parser.add_argument("--context", type=int, default=32768, help="keys of one request; of 16 a sixteenth each")
    parser.add_argument("--places", type=lambda s: s.split(","), default=["gpu", "link"], help="where K and V lie")
    parser.add_argument("--dtype", choices=list(DTYPES), default="bf16")
    parser.add_argument("--out", type=Path, default=REPO / "bench" / "results" / "gpu_tiles.jsonl")
    options = parser.parse_args()
    if options.context % (max(NUM_REQUESTS) * BLOCK_SIZE) and options.device == "cuda":
        parser.error(f"--context must be a multiple of {max(NUM_REQUESTS) * BLOCK_SIZE}")
    if options.context % BLOCK_SIZE or options.context < BLOCK_SIZE or min(options.head_dims + options.groups) < 1:
        parser.error(f"--context must be whole blocks of {BLOCK_SIZE}, --head-dims and --groups at least 1")
    if set(options.places) - {"gpu", "link"}:
        parser.error("--places are gpu, link or both")
    return options


def numbers(text: str) -> list[int]:
    """Whole numbers between commas."""
    return [int(part) for part in text.split(",")]


def all_cases(place: str, options: argparse.Namespace) -> Iterator[Case]:
    """One request with every head_dim and group; then as many keys of several requests."""
    for num_requests in NUM_REQUESTS:
        context = max(BLOCK_SIZE, options.context // num_requests)
        for head_dim in options.head_dims:
            for group in options.groups:
                yield Case(place=place, head_dim=head_dim, group=group, num_requests=num_requests, context=context)


def fits(case: Case, memory: Tensor) -> bool:
    """Whether a pass holds at least one call of it; says so where none."""
    if 2 * case.part_numbers <= memory.numel():
        return True
    print(f"left out, needs {4 * case.part_numbers / 2**30:.2f} GiB: {case}")
    return False


def make_memory(place: str, num_numbers: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Random numbers [n], and the same as the device sees them: in its own memory, with `link` in pinned host memory,
    where the first must outlive the second."""
    memory = torch.empty(
        num_numbers, dtype=dtype, device="cuda" if place == "gpu" else "cpu", pin_memory=place == "link"
    )
    piece = torch.randn(min(num_numbers, 2**22), generator=torch.Generator().manual_seed(0)).to(memory)
    for start in range(0, num_numbers, len(piece)):
        part = memory[start : start + len(piece)]
        part.copy_(piece[: len(part)])
    return memory, view_on_gpu(memory) if place == "link" else memory


def read_rate(memory: Tensor) -> Quantiles:
    """Bytes/s of plain reads: torch's sum over words of 8 bytes."""
    words = memory[: memory.numel() // 4 * 4].view(torch.int64)
    seconds = measure_seconds(lambda: (words.sum(), wait(memory)), num_warmups=2, num_runs=NUM_RUNS)
    return Quantiles.of([words.nbytes / s for s in seconds])


def measure(case: Case, memory: Tensor, ceiling: Quantiles) -> dict[str, object]:
    """Time passes over the memory and print the line of a case."""
    attend, num_calls = make_pass(case, memory)
    replay = capture(attend) if memory.device.type == "cuda" else attend
    seconds = measure_seconds(lambda: (replay(), wait(memory)), num_warmups=2, num_runs=NUM_RUNS)
    num_bytes = num_calls * 2 * case.part_numbers * memory.element_size()
    rates = Quantiles.of([num_bytes / s for s in seconds])
    call = Quantiles.of([s / num_calls for s in seconds])
    print(
        f"{case.place:4} D {case.head_dim:3} (rows of {case.row_size:3}) group {case.group} {case.num_requests:2} x "
        f"{case.context:6} keys: {rates.median / 1e9:7.1f} GB/s of K and V, {rates.median / ceiling.median:.0%} of "
        f"plain reads; {call.median * 1e6:8.1f} µs a call",
        flush=True,
    )
    return asdict(case) | {
        "row_size": case.row_size,
        "calls": num_calls,
        "bytes_per_s": rates.record(),
        "call_s": call.record(),
        "read_bytes_per_s": significant(ceiling.median),
        "share": significant(rates.median / ceiling.median, 3),
    }


def make_pass(case: Case, memory: Tensor) -> tuple[Callable[[], None], int]:
    """What attends over K and V of as many layers as the memory holds, and how many these are."""
    device = memory.device
    blocks_each = case.context // BLOCK_SIZE
    num_blocks = case.num_requests * blocks_each
    shape = (NUM_KV_HEADS, num_blocks, BLOCK_SIZE, case.row_size)
    pools = [
        tuple(memory[start + i * case.part_numbers :][: case.part_numbers].view(shape) for i in range(2))
        for start in range(0, memory.numel() - 2 * case.part_numbers + 1, 2 * case.part_numbers)
    ]
    table = torch.arange(num_blocks, dtype=torch.int32, device=device).view(case.num_requests, blocks_each)
    num_keys = torch.full((case.num_requests,), case.context, dtype=torch.int32, device=device)
    q = torch.randn(case.num_requests, NUM_KV_HEADS * case.group, case.head_dim).to(memory)

    def attend() -> None:
        for k, v in pools:
            api.attend_tiles(q, k, v, table, num_keys, scale=case.head_dim**-0.5)

    return attend, len(pools)


def capture(body: Callable[[], None]) -> Callable[[], None]:
    """A graph of what the body launches, which has run once before."""
    body()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        body()
    return graph.replay


def wait(memory: Tensor) -> None:
    """Until the device has done what it was given."""
    if memory.device.type == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    sys.exit(main())
