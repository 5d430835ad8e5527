"""What a step of fixed form of a policy reads of its requests, and what it counts itself, at fixed places in memory:
`EarlyInputs`, `ChosenCounts`."""

from collections.abc import Mapping, Sequence
from dataclasses import fields

import torch
from torch import Tensor

from ambidex.attention.select.partial_keys import PartialKeys
from ambidex.kernels.early_rows import AlphaCount, BoxRows, EarlyRows, PartialRows, SumRows, WindowRows

_NAMES = tuple(item.name for item in fields(EarlyRows))
_SUM_NAMES = tuple(item.name for item in fields(SumRows))
_WINDOW_NAMES = tuple(item.name for item in fields(WindowRows))
_BOX_NAMES = ("boxes_address", "box_capacity", "num_pages", "num_taken", "bound_first")
_ROW_NAMES = _NAMES + _SUM_NAMES + _WINDOW_NAMES + _BOX_NAMES
_PARTIAL_NAMES = ("rows_address", "turn_address", "capacity")
_PADDING = {"near_slots": -1}
"""What padding has; 0 otherwise."""
_ALIGNED_ROWS = 2
"""Numbers of 8 bytes in 16: kernels are compiled for aligned pointers."""
_ALIGNED_COUNTS = 4
"""Of 4 bytes, likewise."""


class EarlyInputs:
    """The buffers of all steps of at most `max_rows` rows; steps of different sizes share them.

    Args:
        num_layers: of the model; each may have partial keys.
        device: where the step runs; on CUDA the host's side is pinned.
    """

    def __init__(self, *, max_rows: int, num_layers: int, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        shape = (len(_ROW_NAMES) + num_layers * len(_PARTIAL_NAMES), -(-max_rows // _ALIGNED_ROWS) * _ALIGNED_ROWS)
        self._host = torch.zeros(shape, dtype=torch.int64, pin_memory=is_cuda)
        self._device = torch.zeros(shape, dtype=torch.int64, device=device)
        self._arrays = self._host.numpy()  # the same memory
        self._rows: dict[int, EarlyRows] = {}
        self._sent = torch.cuda.Event() if is_cuda else None  # type: ignore[no-untyped-call]  # torch has no types here

    def device(self, num_rows: int) -> EarlyRows:
        """What a step of `num_rows` rows reads; views that stay where they are."""
        if num_rows not in self._rows:
            self._rows[num_rows] = EarlyRows(**self._parts(_NAMES, num_rows))
        return self._rows[num_rows]

    def sums(self, num_rows: int) -> SumRows:
        """What it reads of what keys have got; views, likewise."""
        return SumRows(**self._parts(_SUM_NAMES, num_rows))

    def windows(self, num_rows: int) -> WindowRows:
        """What it reads of the keys that windows hold; views, likewise."""
        return WindowRows(**self._parts(_WINDOW_NAMES, num_rows))

    def boxes(self, num_rows: int, *, page_tokens: int, first_layer: int) -> BoxRows:
        """What it reads of boxes of pages of so many keys, in layers from one on; views, likewise."""
        return BoxRows(**self._parts(_BOX_NAMES, num_rows), page_tokens=page_tokens, first_layer=first_layer)

    def partial(self, num_rows: int, layer_idx: int, num_columns: int) -> PartialRows:
        """What it reads of the partial keys of a layer, which have so many columns; views, likewise."""
        first = _first_partial(layer_idx)
        tables = self._device[first : first + len(_PARTIAL_NAMES), :num_rows]
        return PartialRows(**dict(zip(_PARTIAL_NAMES, tables, strict=True)), num_columns=num_columns)

    def _parts(self, names: Sequence[str], num_rows: int) -> dict[str, Tensor]:
        """Numbers that stand side by side, by name."""
        first = _ROW_NAMES.index(names[0])
        return dict(zip(names, self._device[first : first + len(names), :num_rows], strict=True))

    def send(
        self,
        num_rows: int,
        numbers: Mapping[str, Sequence[int]],
        partial: Mapping[int, Sequence[PartialKeys]],
    ) -> None:
        """Bring the numbers of a step's requests to the device, with padding up to `num_rows`.

        Args:
            numbers: by name; what the step does not read may be missing.
            partial: by layer, of each request; empty: the step reads none.
        Cost: one small copy; waits for the last one.
        """
        if self._sent is not None:
            self._sent.synchronize()
        for name, values in numbers.items():
            array = self._arrays[_ROW_NAMES.index(name)]
            array[: len(values)] = values
            array[len(values) : num_rows] = _PADDING.get(name, 0)
        for layer_idx, kept in partial.items():
            first = _first_partial(layer_idx)
            tables = self._arrays[first : first + len(_PARTIAL_NAMES)]
            tables[:, len(kept) : num_rows] = 0
            for row, (rows, turn) in enumerate(keys.buffers for keys in kept):
                tables[:, row] = rows.data_ptr(), turn.data_ptr(), rows.shape[1]
        self._device.copy_(self._host, non_blocking=True)
        if self._sent is not None:
            self._sent.record()


class ChosenCounts:
    """How many far keys were chosen, of each request and layer of the last step: by each KV head as many, or by each
    its own number.

    Args: as of `EarlyInputs`.
    """

    def __init__(self, *, max_rows: int, num_layers: int, num_kv_heads: int, device: torch.device) -> None:
        num_columns = -(-max_rows // _ALIGNED_COUNTS) * _ALIGNED_COUNTS
        self._num_kv_heads = num_kv_heads
        self._counts = torch.zeros(num_layers, num_columns, dtype=torch.int32, device=device)
        self._of_heads = torch.zeros(num_layers, num_columns, num_kv_heads, dtype=torch.int32, device=device)

    def of_layer(self, layer_idx: int, num_rows: int, alpha: float) -> AlphaCount:
        """What a step of `num_rows` rows counts by in a layer; a view that stays where it is."""
        return AlphaCount(alpha=alpha, num_chosen=self._counts[layer_idx, :num_rows])

    def of_heads(self, layer_idx: int, num_rows: int) -> Tensor:
        """Where a layer tells it of each KV head, [B, Hkv]; likewise."""
        return self._of_heads[layer_idx, :num_rows]

    def total(self, num_rows: int, first_layer: int) -> int:
        """Over the requests of a step, its layers from one on, and all KV heads, which chose as many.

        Cost: waits for the device.
        """
        return self._num_kv_heads * int(self._counts[first_layer:, :num_rows].sum())

    def total_of_heads(self, num_rows: int) -> int:
        """Over the requests of a step, its layers and their KV heads, each of which told its own.

        Cost: waits for the device.
        """
        return int(self._of_heads[:, :num_rows].sum())


def _first_partial(layer_idx: int) -> int:
    return len(_ROW_NAMES) + layer_idx * len(_PARTIAL_NAMES)
