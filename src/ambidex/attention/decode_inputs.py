"""`DecodeInputs`: what a decode step of fixed shape reads, at fixed places in memory.

A step of B rows (requests, then padding) is described by arrays of B numbers, one after the other in one buffer, so
that one copy brings them to the device:

    token_ids  sources  positions  slots  table_places       int64
    last_blocks  num_streamed  (first_key  num_keys) of each window        int32

and by two block tables [rows, M], which stay on the device: the accelerator's blocks, and those in DRAM that it
streams. A row's newest block is written into the first table by the step itself (`table_places`, `last_blocks`), so
that a context that grows costs no copy of its own. Padding has slot −1 (nothing is stored) and no keys.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_INT64_NAMES: Final = ("token_ids", "sources", "positions", "slots", "table_places")
_INT32_NAMES: Final = ("last_blocks", "num_streamed")
_ALIGNMENT: Final = 16
"""Bytes: kernels load from aligned pointers in wider pieces, and are compiled for one kind of pointer only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeRows:
    """The inputs of a step of B rows on the device; views that stay where they are."""

    token_ids: Tensor  # [B] int64
    sources: Tensor  # [B] int64, see `DecodeTokens`
    positions: Tensor  # [B] int64
    slots: Tensor  # [B] int64
    block_table: Tensor  # [B, M] int32
    first_key: Mapping[int | None, Tensor]  # by window: [B] int32
    num_keys: Mapping[int | None, Tensor]  # by window: [B] int32
    table_places: Tensor  # [B] int64, into the flattened table
    last_blocks: Tensor  # [B] int32
    stream_table: Tensor  # [B, M] int32
    num_streamed: Tensor  # [B] int32, keys of the blocks in it

    def extend_table(self) -> None:
        """Write each row's newest block into the table; the step does it before its first layer."""
        self.block_table.view(-1).index_copy_(0, self.table_places, self.last_blocks)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostRows:
    """The same on the host, to be filled in before `DecodeInputs.send`."""

    token_ids: NDArray[np.int64]
    sources: NDArray[np.int64]
    positions: NDArray[np.int64]
    slots: NDArray[np.int64]
    table_places: NDArray[np.int64]
    last_blocks: NDArray[np.int32]
    num_streamed: NDArray[np.int32]
    first_key: Mapping[int | None, NDArray[np.int32]]
    num_keys: Mapping[int | None, NDArray[np.int32]]


class DecodeTokens:
    """The tokens that a step computes: given by the host, or those that the step before has chosen, which the host need
    not know yet. `DecodeRows.sources` say which: row r of the last step, or `max_rows` + r for this step's own row r.

    Args:
        max_rows: of a step.
    """

    def __init__(self, *, max_rows: int, device: torch.device) -> None:
        self._max_rows = max_rows
        self._tokens = torch.zeros(
            2 * max_rows, dtype=torch.int64, device=device
        )  # chosen by the last step, then given

    def read(self, rows: DecodeRows) -> Tensor:
        """Token ids [B] of a step."""
        num_rows = len(rows.token_ids)
        self._tokens[self._max_rows : self._max_rows + num_rows].copy_(rows.token_ids)
        return self._tokens.index_select(0, rows.sources)

    def write(self, chosen: Tensor) -> None:
        """Keep the tokens [B] that a step has chosen; one that failed (−1) counts as 0, so that a step can follow."""
        torch.clamp(chosen, min=0, out=self._tokens[: len(chosen)])


class DecodeInputs:
    """The buffers of all steps of at most `max_rows` rows; steps of different sizes share them.

    Args:
        max_blocks: columns M of the block table.
        windows: distinct sliding windows of the layers, None for full attention.
        device: where the step runs; on CUDA the host's side is pinned.
    """

    def __init__(self, *, max_rows: int, max_blocks: int, windows: Sequence[int | None], device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        self.max_rows = max_rows
        self.max_blocks = max_blocks
        self.windows = tuple(windows)
        self._host = torch.zeros(self._num_bytes(max_rows), dtype=torch.uint8, pin_memory=is_cuda)
        self._device = torch.zeros(self._num_bytes(max_rows), dtype=torch.uint8, device=device)
        self._host_table = torch.zeros(max_rows, max_blocks, dtype=torch.int32, pin_memory=is_cuda)
        self._device_table = torch.zeros(max_rows, max_blocks, dtype=torch.int32, device=device)
        self._host_stream_table = torch.zeros(max_rows, max_blocks, dtype=torch.int32, pin_memory=is_cuda)
        self._device_stream_table = torch.zeros(max_rows, max_blocks, dtype=torch.int32, device=device)
        self._host_rows: dict[int, HostRows] = {}
        self._device_rows: dict[int, DecodeRows] = {}
        self._sent = torch.cuda.Event() if is_cuda else None  # type: ignore[no-untyped-call]  # torch has no types here

    def wait_sent(self) -> None:
        """Wait until the last `send` has read the host's buffers, so that they may be filled again."""
        if self._sent is not None:
            self._sent.synchronize()

    def host(self, num_rows: int) -> HostRows:
        """Where to write a step of `num_rows` rows."""
        if num_rows not in self._host_rows:
            arrays = self._cut(self._host, num_rows)
            self._host_rows[num_rows] = HostRows(
                **{name: arrays[name].numpy() for name in (*_INT64_NAMES, *_INT32_NAMES)},
                first_key={window: arrays[f"first_key {window}"].numpy() for window in self.windows},
                num_keys={window: arrays[f"num_keys {window}"].numpy() for window in self.windows},
            )
        return self._host_rows[num_rows]

    def host_table(self) -> NDArray[np.int32]:
        """Where to write rows of the block table, [max_rows, M]."""
        table: NDArray[np.int32] = self._host_table.numpy()
        return table

    def host_stream_table(self) -> NDArray[np.int32]:
        """Where to write rows of the table of streamed blocks, [max_rows, M]."""
        table: NDArray[np.int32] = self._host_stream_table.numpy()
        return table

    def device(self, num_rows: int) -> DecodeRows:
        """What a step of `num_rows` rows reads."""
        if num_rows not in self._device_rows:
            arrays = self._cut(self._device, num_rows)
            self._device_rows[num_rows] = DecodeRows(
                **{name: arrays[name] for name in (*_INT64_NAMES, *_INT32_NAMES)},
                block_table=self._device_table[:num_rows],
                stream_table=self._device_stream_table[:num_rows],
                first_key={window: arrays[f"first_key {window}"] for window in self.windows},
                num_keys={window: arrays[f"num_keys {window}"] for window in self.windows},
            )
        return self._device_rows[num_rows]

    def send(self, num_rows: int, *, table_rows: range, stream_rows: range) -> None:
        """Bring a step's arrays, and the named rows of the tables, to the device.

        Cost: one small copy, and one more for each table of which there are rows; waits for none.
        """
        num_bytes = self._num_bytes(num_rows)
        self._device[:num_bytes].copy_(self._host[:num_bytes], non_blocking=True)
        for named, device, host in (
            (table_rows, self._device_table, self._host_table),
            (stream_rows, self._device_stream_table, self._host_stream_table),
        ):
            if named:
                device[named.start : named.stop].copy_(host[named.start : named.stop], non_blocking=True)
        if self._sent is not None:
            self._sent.record()

    def _cut(self, buffer: Tensor, num_rows: int) -> dict[str, Tensor]:
        arrays, start = {}, 0
        for name, dtype in self._arrays():
            stop = start + num_rows * dtype.itemsize
            arrays[name] = buffer[start:stop].view(dtype)
            start = _align(stop)
        return arrays

    def _num_bytes(self, num_rows: int) -> int:
        return sum(_align(num_rows * dtype.itemsize) for _, dtype in self._arrays())

    def _arrays(self) -> list[tuple[str, torch.dtype]]:
        int32_names = [*_INT32_NAMES, *(f"{name} {w}" for w in self.windows for name in ("first_key", "num_keys"))]
        return [(name, torch.int64) for name in _INT64_NAMES] + [(name, torch.int32) for name in int32_names]


def _align(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
