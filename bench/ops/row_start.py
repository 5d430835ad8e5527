"""What does a request's first decode step pay for its rows beside the blocks, against a copy of as many bytes?

    python bench/ops/row_start.py [--device cuda] [--shape 40,40,128] [--tokens 1920] [--gpu-share 0.25]

Blocks of one request lie in rows on the accelerator (a sink and the newest tokens) and in tile order in DRAM, in any
order there. `RowStore` takes the memory of all rows (*take*), and requests follow each other in it, each with another
number of tokens that it may have: the first one meets pages that nobody has touched, unless they are pinned. The floor
is a copy of the rows' bytes in host memory by the same threads. The last line is one JSON record.
"""

import argparse
import random
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Final

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ambidex.attention.context_rows import ContextRows
from ambidex.attention.row_store import RowStore
from ambidex.core.dtypes import DType
from ambidex.core.ids import BlockId, RequestId, Tier
from ambidex.core.kv_spec import KVOrder, KVSpec
from ambidex.core.model_spec import Activation, ModelSpec
from ambidex.core.step import BlockRef
from ambidex.hw.topology import read_topology
from ambidex.kernels.cpu.native import AttentionPool, ThreadPool
from ambidex.storage.huge_pages import advise_huge_pages
from ambidex.storage.kv_pool import KVPool, RowKVPool
from ambidex.storage.tiled_pool import TiledKVPool
from harness import (
    REPO,
    Quantiles,
    append_record,
    environment,
    measure_seconds,
    significant,
    wait_until_quiet,
    watch_others,
)

BLOCK_SIZE: Final = 16
NUM_REQUESTS: Final = 8
NUM_OUTPUT: Final = 128
NUM_COPIES: Final = 5


def main() -> int:
    """Measure, print, record."""
    options = parse_options()
    torch.set_num_threads(options.threads)
    spec, pools = make_world(options)
    blocks = choose_blocks(pools)
    num_bytes = 2 * 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * options.tokens
    wait_until_quiet(longest_s=options.wait)
    with watch_others() as others:
        start = time.perf_counter()
        store = RowStore(spec, pools, max_rows=options.tokens + NUM_OUTPUT)
        take_s = time.perf_counter() - start
        if store.refusal is not None:
            sys.exit(f"no memory for rows: {store.refusal}")
        seconds = [start_rows(store, blocks, pools, options.tokens, most=NUM_OUTPUT - i) for i in range(NUM_REQUESTS)]
        copy_s = time_copy(num_bytes)
    steady = Quantiles.of(seconds[1:])
    print(
        f"{num_bytes / 1e9:.2f} GB of rows: taken in {take_s:.2f} s, first request {seconds[0]:.3f} s, others "
        f"{steady.median:.3f} s = {num_bytes / steady.median / 1e9:.1f} GB/s; a copy {copy_s:.3f} s"
    )
    record = environment() | {
        "bench": "row_start",
        "device": options.device,
        "shape": options.shape,
        "tokens": options.tokens,
        "gpu_share": options.gpu_share,
        "threads": options.threads,
        "bytes": num_bytes,
        "take_s": significant(take_s),
        "first_s": significant(seconds[0]),
        "others_s": steady.record(),
        "copy_s": significant(copy_s),
        "share_of_copy": significant(copy_s / steady.median, 3),
        "others": asdict(others),
    }
    print(append_record(options.out, record))
    return 0


def parse_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--shape",
        type=lambda s: [int(n) for n in s.split(",")],
        default=[40, 40, 128],
        help="layers, KV heads, head_dim",
    )
    parser.add_argument("--tokens", type=int, default=1920, help="a multiple of 64")
    parser.add_argument("--gpu-share", type=float, default=0.25, help="of the blocks, on the accelerator")
    parser.add_argument("--threads", type=int, default=read_topology().num_usable_cores)
    parser.add_argument("--wait", type=float, default=60.0, help="seconds, at most, for others to leave the cores")
    parser.add_argument("--out", type=Path, default=REPO / "bench" / "results" / "row_start.jsonl")
    return parser.parse_args()


def make_world(options: argparse.Namespace) -> tuple[ModelSpec, dict[Tier, KVPool]]:
    """A model's numbers, and pools that hold one request's blocks; numbers that were touched, whatever they are."""
    num_layers, num_heads, head_dim = options.shape
    spec = ModelSpec(
        architecture="llama",
        num_layers=num_layers,
        hidden_size=num_heads * head_dim,
        intermediate_size=num_heads * head_dim,
        num_q_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=head_dim,
        vocab_size=16,
        max_context_len=options.tokens + NUM_OUTPUT,
        norm_eps=1e-5,
        activation=Activation.SILU,
        rope=None,
        windows=(None,) * num_layers,
        tie_embeddings=True,
    )
    num_blocks = options.tokens // BLOCK_SIZE
    num_gpu = round(options.gpu_share * num_blocks)
    gpu, dram = (
        KVSpec.of(spec, dtype=DType.BF16, block_size=BLOCK_SIZE, order=order) for order in (KVOrder.ROWS, KVOrder.TILES)
    )
    native = AttentionPool(ThreadPool(options.threads))
    pools: dict[Tier, KVPool] = {
        Tier.GPU: RowKVPool(gpu, Tier.GPU, num_gpu, device=torch.device(options.device), pinned=False),
        Tier.DRAM: TiledKVPool(dram, Tier.DRAM, num_blocks - num_gpu, native=native, pinned=options.device == "cuda"),
    }
    for pool in pools.values():
        for part in pool.tensors:
            part.fill_(1)
    return spec, pools


def choose_blocks(pools: Mapping[Tier, KVPool]) -> list[BlockRef]:
    """The first eighth of those on the accelerator, those in DRAM in disorder, and the others."""
    num_gpu, num_dram = pools[Tier.GPU].num_blocks, pools[Tier.DRAM].num_blocks
    on_gpu = [BlockRef(Tier.GPU, BlockId(block_id)) for block_id in range(num_gpu)]
    ids = random.Random(0).sample(range(num_dram), num_dram)
    return [
        *on_gpu[: num_gpu // 8],
        *(BlockRef(Tier.DRAM, BlockId(block_id)) for block_id in ids),
        *on_gpu[num_gpu // 8 :],
    ]


def start_rows(
    store: RowStore, blocks: Sequence[BlockRef], pools: Mapping[Tier, KVPool], num_tokens: int, *, most: int
) -> float:
    """Seconds until a request's rows are there; it may have `most` tokens more, and ends."""
    name = RequestId("a")
    start = time.perf_counter()
    rows = store.prepare(
        name,
        num_tokens,
        0,
        max_tokens=num_tokens + most,
        make_context=lambda: ContextRows(blocks, num_tokens, pools=pools),
    )
    seconds = time.perf_counter() - start
    assert rows is not None, "there is memory for rows"
    store.forget(name)
    return seconds


def time_copy(num_bytes: int) -> float:
    """Seconds of the fastest of some copies of so many bytes in host memory."""
    source, to = (torch.empty(num_bytes // 8, dtype=torch.int64) for _ in range(2))
    for part in (source, to):
        advise_huge_pages(part)
        part.fill_(1)
    return min(measure_seconds(lambda: to.copy_(source), num_warmups=1, num_runs=NUM_COPIES))


if __name__ == "__main__":
    sys.exit(main())
