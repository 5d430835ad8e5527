"""The stream lane of decode steps: the accelerator attends over blocks of DRAM that travel to it meanwhile
(`storage/step_stream.py`). How large its share is follows from the rates at which both lanes read, and then from how
steps went (`attention/lane_share.py`)."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from ambidex.attention.decode_inputs import DecodeRows
from ambidex.attention.state import AttentionState
from ambidex.core.ids import Tier
from ambidex.core.kv_spec import KVOrder, KVSpec
from ambidex.core.model_spec import ModelSpec
from ambidex.kernels import api, tiles
from ambidex.kernels.cuda.pinned_view import view_on_gpu
from ambidex.storage.step_stream import StepStream
from ambidex.storage.tiled_pool import TiledKVPool

_PROBE_BYTES: Final = 512 * 2**20
"""Larger than the caches of a server CPU's cores, which would answer instead of DRAM."""
_NUM_PROBES: Final = 3


class StreamedAttention:
    """Attention over the streamed keys of a step.

    Args:
        spec: head_dim (the scale is head_dim ** -0.5).
        stream: brings each layer's blocks.
        rows: which of them each row sees.
    """

    def __init__(self, spec: ModelSpec, stream: StepStream, rows: DecodeRows) -> None:
        self._scale = spec.head_dim**-0.5
        self._stream = stream
        self._rows = rows
        self._first_key = torch.zeros_like(rows.num_streamed)

    def attend(self, layer_idx: int, q: Tensor) -> AttentionState:
        """The state of rotated queries [B, Hq, D], once the layer's blocks have arrived; `out` is fp32."""
        self._stream.wait(layer_idx)
        k, v, *scales = self._stream.layer(layer_idx)
        table, num_keys = self._rows.stream_table, self._rows.num_streamed
        if self._stream.rows is None:
            out, lse = api.attend_tiles(q, k, v, table, num_keys, scale=self._scale)
            self._stream.free(layer_idx)
            return AttentionState(out, lse)
        k_scales, v_scales = scales
        tiles.unpack_blocks(k, v, *self._stream.rows, k_scales=k_scales, v_scales=v_scales)
        self._stream.free(layer_idx)
        k_rows, v_rows = (rows.view(*k.shape[:3], -1) for rows in self._stream.rows)  # [Hkv, n, P, D]
        out, lse = api.attend_paged(
            q, k_rows, v_rows, table, self._first_key, num_keys, scale=self._scale, out_dtype=torch.float32
        )
        return AttentionState(out, lse)


def why_no_stream(spec: ModelSpec, kv: Mapping[Tier, KVSpec]) -> str | None:
    """Why the stream lane cannot serve a model's decode steps; None if it can.

    Args:
        kv: the KV cache as each tier keeps it.
    """
    gpu, dram = kv[Tier.GPU], kv[Tier.DRAM]
    if dram.order is not KVOrder.TILES:
        return "K and V in DRAM are not in tile order"
    if not dram.dtype.has_scales and (dram.dtypes != gpu.dtypes or dram.dtype.num_bits != 16):
        return f"K and V in DRAM are {dram.dtypes}: the kernel reads 16-bit numbers of the accelerator's format"
    if set(spec.windows) != {None}:
        return "some layers have a sliding window"
    return None


@dataclass(frozen=True, slots=True)
class LaneRates:
    """Bytes/s at which the GPU reads DRAM over the link, and the CPU lane's threads read it; 0: not at all."""

    link: float
    dram: float

    @property
    def share(self) -> float:
        """Of the keys in DRAM, what the GPU should read so that both end together: link / (link + dram)."""
        return self.link / (self.link + self.dram)

    def __str__(self) -> str:
        link, dram = self.link / 1e9, self.dram / 1e9
        return f"the GPU reads DRAM at {link:.1f} GB/s over the link, the CPU lane at {dram:.1f} GB/s"


def measure_lane_rates(pool: TiledKVPool, *, reads_link: bool) -> LaneRates:
    """The rates at which the GPU and the CPU's threads read a pool.

    Args:
        reads_link: the GPU does; the pool is pinned.
    Cost: reads up to half a GiB a few times each way: tens of milliseconds.
    """
    flat = pool.k.view(-1).view(torch.uint8)[:_PROBE_BYTES]
    flat = flat[: flat.numel() // 8 * 8]
    there = view_on_gpu(flat).view(torch.int64) if reads_link else None
    link, dram = 0.0, 0.0
    for _ in range(_NUM_PROBES):
        if there is not None:
            torch.cuda.synchronize()
            start = time.perf_counter()
            there.sum()
            torch.cuda.synchronize()
            link = max(link, flat.numel() / (time.perf_counter() - start))
        start = time.perf_counter()
        pool.native.threads.read(flat)
        dram = max(dram, flat.numel() / (time.perf_counter() - start))
    return LaneRates(link, dram)
