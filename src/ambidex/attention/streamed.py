"""The stream lane of decode steps: the accelerator attends over blocks in pinned host memory, which it reads over the
link where they lie. How large its share is follows from the rates at which both lanes read."""

import time
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from ambidex.attention.decode_inputs import DecodeRows
from ambidex.attention.state import AttentionState
from ambidex.core.model_spec import ModelSpec
from ambidex.kernels import api
from ambidex.kernels.cuda.pinned_view import view_on_gpu
from ambidex.storage.tiled_pool import TiledKVPool

_PROBE_BYTES: Final = 512 * 2**20
"""Larger than the caches of a server CPU's cores, which would answer instead of DRAM."""
_NUM_PROBES: Final = 3


class StreamPool:
    """The layers of a DRAM pool as the accelerator sees them: the same memory.

    Args:
        pool: pinned, unless the accelerator is the CPU.
    """

    def __init__(self, pool: TiledKVPool, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        k, v = (view_on_gpu(part) if is_cuda else part for part in (pool.k, pool.v))
        self.layers: Sequence[tuple[Tensor, Tensor]] = tuple(zip(k, v, strict=True))  # each [Hkv, N, P, row_size]


class StreamedAttention:
    """Attention over the streamed keys of a step.

    Args:
        spec: head_dim (the scale is head_dim ** -0.5).
        rows: which blocks each row streams.
    """

    def __init__(self, spec: ModelSpec, pool: StreamPool, rows: DecodeRows) -> None:
        self._scale = spec.head_dim**-0.5
        self._pool = pool
        self._rows = rows

    def attend(self, layer_idx: int, q: Tensor) -> AttentionState:
        """The state of rotated queries [B, Hq, D]; `out` is fp32."""
        k, v = self._pool.layers[layer_idx]
        out, lse = api.attend_tiles(q, k, v, self._rows.stream_table, self._rows.num_streamed, scale=self._scale)
        return AttentionState(out, lse)


def can_stream(spec: ModelSpec, pool: TiledKVPool, *, dtype: torch.dtype) -> str | None:
    """Why the stream lane cannot serve a model's decode steps; None if it can.

    Args:
        dtype: of the accelerator's own pool.
    """
    if pool.k.dtype != dtype or pool.k.element_size() != 2:
        return f"K and V in DRAM are {pool.spec.dtype}: the kernel reads 16-bit numbers of the accelerator's format"
    if pool.spec.row_size & (pool.spec.row_size - 1):
        return f"rows of {pool.spec.row_size} numbers are no power of 2"
    if set(spec.windows) != {None}:
        return "some layers have a sliding window"
    return None


def measure_stream_share(pool: TiledKVPool) -> tuple[float, str]:
    """Which share of the keys in DRAM the stream lane should take, so that both lanes end together, and why.

    Formula: link / (link + dram), the rates at which the GPU and the CPU's threads read the pool.
    Cost: reads up to half a GiB a few times each way: tens of milliseconds.
    """
    flat = pool.k.view(-1).view(torch.uint8)[:_PROBE_BYTES]
    flat = flat[: flat.numel() // 8 * 8]
    there = view_on_gpu(flat).view(torch.int64)
    link, dram = 0.0, 0.0
    for _ in range(_NUM_PROBES):
        torch.cuda.synchronize()
        start = time.perf_counter()
        there.sum()
        torch.cuda.synchronize()
        link = max(link, flat.numel() / (time.perf_counter() - start))
        start = time.perf_counter()
        pool.native.threads.read(flat)
        dram = max(dram, flat.numel() / (time.perf_counter() - start))
    share = link / (link + dram)
    return share, f"the GPU reads DRAM at {link / 1e9:.1f} GB/s over the link, the CPU lane at {dram / 1e9:.1f} GB/s"
