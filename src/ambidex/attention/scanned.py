"""The scan lane of decode steps under the bounded policy: the accelerator scans a share of the keys in DRAM over the
link, and attends those that it keeps, while the CPU lane does the same with the others (docs/bounded.md).

The lanes share no threshold. What the accelerator's own keys hold counts for both, a part for each, so that the mass
left out of the whole softmax is at most the larger of what the lanes leave out of theirs.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ambidex.attention.decode_inputs import DecodeRows
from ambidex.attention.state import AttentionState
from ambidex.core.errors import InternalError
from ambidex.core.kv_spec import KVSpec
from ambidex.core.model_spec import ModelSpec
from ambidex.kernels import api
from ambidex.kernels.cuda.pinned_view import view_on_gpu
from ambidex.storage.scan_copy import ScanCopy


def why_no_scan_lane(kv: KVSpec) -> str | None:
    """Why the accelerator cannot scan keys in DRAM, which the CPU lane then scans alone; None if it can.

    Args:
        kv: the KV cache as DRAM keeps it.
    """
    if kv.row_size & (kv.row_size - 1):
        return f"the kernel scans no rows of {kv.row_size} numbers, which are no power of 2"
    return None


class _LaneLayer(NamedTuple):
    scanned: Tensor
    scales: Tensor
    rows: Tensor
    norms: Tensor


class ScanLane:
    """What the steps of one engine share: the scanned keys as the accelerator sees them.

    Args:
        spec: layers and head_dim (the scale is head_dim ** -0.5).
        copy: of the DRAM pool, whose numbers have 16 or 32 bits; pinned, unless the device is the CPU.
        device: the accelerator.
        max_mass: share of the softmax that may be left out.
        max_blocks: that a step scans, all requests together.
    """

    def __init__(
        self, spec: ModelSpec, copy: ScanCopy, device: torch.device, *, max_mass: float, max_blocks: int
    ) -> None:
        self.scale = spec.head_dim**-0.5
        self.max_mass = max_mass
        self.max_blocks = max_blocks
        self.max_keys = max_blocks * copy.block_size
        self.key_bytes, self.kept_bytes = copy.key_bytes, copy.kept_bytes
        is_cuda = device.type == "cuda"
        self.kept: Tensor | None = None
        """[N] int32 on the accelerator: keys of each block that a step has kept so far, of all layers and KV heads;
        None: nobody counts them."""
        self.shown_kept: Tensor | None = None
        """The same in host memory, of the last step that scanned, once it has ended."""
        self._shown_there: Tensor | None = None
        if copy.kept is not None:
            self.kept = torch.zeros_like(copy.kept, device=device)
            self.shown_kept = torch.zeros(copy.kept.shape, dtype=torch.int32, pin_memory=is_cuda)
            self._shown_there = view_on_gpu(self.shown_kept) if is_cuda else self.shown_kept
        self.layers: list[_LaneLayer] = []
        for layer_idx in range(spec.num_layers):
            layer = copy.layer(layer_idx)
            if layer.rows is None:
                raise InternalError("the scan lane is handed keys that are kept in 8 bits alone")
            parts = (layer.scanned, layer.scales, layer.rows, layer.norms)
            self.layers.append(_LaneLayer(*(view_on_gpu(part) if is_cuda else part for part in parts)))

    def show_kept(self) -> None:
        """Launch: bring the counts of a step to host memory."""
        if self.kept is not None and self._shown_there is not None:
            torch.add(self.kept, 0, out=self._shown_there)  # a kernel: the copy engine has others' blocks to bring


class ScannedAttention:
    """The scan lane's part of a step.

    Args:
        rows: which blocks each row scans (`stream_table`, their ids in the pool).
    """

    def __init__(self, lane: ScanLane, rows: DecodeRows) -> None:
        self._lane = lane
        self._rows = rows

    def begin(self) -> Tensor:
        """Launch what goes before the first layer.

        Returns:
            [B] fp32, log of the part of what is near that counts in what the CPU lane may leave out.
        """
        rows = self._rows
        if self._lane.kept is not None:
            self._lane.kept.zero_()
        num_dram = (rows.positions + 1 - rows.num_keys[None]).clamp(min=1)
        own = rows.num_streamed / num_dram  # of the keys in DRAM; the rest is the CPU lane's
        self._near_part = own.log()
        return torch.log1p(-own)

    def attend(self, layer_idx: int, q: Tensor, near_lse: Tensor) -> tuple[AttentionState, Tensor]:
        """The state of rotated queries [B, Hq, D] over the keys that were kept, and the figures of
        `kernels.api.attend_scanned`.

        Args:
            near_lse: [B, Hq] fp32 over the accelerator's own keys.
        """
        lane, layer = self._lane, self._lane.layers[layer_idx]
        out, lse, figures = api.attend_scanned(
            q, *layer, self._rows.stream_table, self._rows.num_streamed, near_lse, self._near_part,
            scale=lane.scale, max_mass=lane.max_mass, max_keys=lane.max_keys, kept=lane.kept,
        )  # fmt: skip
        return AttentionState(out, lse), figures

    def end(self) -> None:
        """Launch what follows the last layer."""
        self._lane.show_kept()
