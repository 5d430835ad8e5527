"""What a step of fixed form of a policy reads of its requests, and what it counts itself, at fixed places in memory:
`FixedInputs`, `ChosenCounts`. What all steps read is `EarlyRows`; what else there is, ways of choosing name."""

from collections.abc import Mapping, Sequence
from dataclasses import fields

import torch
from torch import Tensor

from ambidex.kernels.early_rows import EarlyRows

_NAMES = tuple(item.name for item in fields(EarlyRows))
_PADDING = {"near_slots": -1}
"""What padding has; 0 otherwise."""
_ALIGNED_ROWS = 2
"""Numbers of 8 bytes in 16: kernels are compiled for aligned pointers."""
_ALIGNED_COUNTS = 4
"""Of 4 bytes, likewise."""


class FixedInputs:
    """The buffers of all steps of at most `max_rows` rows; steps of different sizes share them.

    Args:
        num_layers: of the model.
        names: of numbers of each request, beside those of `EarlyRows`.
        layer_names: of numbers of each request in each layer.
        device: where the step runs; on CUDA the host's side is pinned.
    """

    def __init__(
        self,
        *,
        max_rows: int,
        num_layers: int,
        names: Sequence[str],
        layer_names: Sequence[str],
        device: torch.device,
    ) -> None:
        self._names, self._layer_names = tuple(names), tuple(layer_names)
        self._places = {name: place for place, name in enumerate(_NAMES + self._names)}
        is_cuda = device.type == "cuda"
        num_numbers = len(self._places) + num_layers * len(self._layer_names)
        shape = (num_numbers, -(-max_rows // _ALIGNED_ROWS) * _ALIGNED_ROWS)
        self._host = torch.zeros(shape, dtype=torch.int64, pin_memory=is_cuda)
        self._device = torch.zeros(shape, dtype=torch.int64, device=device)
        self._arrays = self._host.numpy()  # the same memory
        self._rows: dict[int, EarlyRows] = {}
        self._sent = torch.cuda.Event() if is_cuda else None  # type: ignore[no-untyped-call]  # torch has no types here

    def device(self, num_rows: int) -> EarlyRows:
        """What a step of `num_rows` rows reads; views that stay where they are."""
        if num_rows not in self._rows:
            self._rows[num_rows] = EarlyRows(**self._views(0, _NAMES, num_rows))
        return self._rows[num_rows]

    def own(self, num_rows: int) -> Mapping[str, Tensor]:
        """What it reads beside them, by name, each [B]; views, likewise."""
        return self._views(len(_NAMES), self._names, num_rows)

    def of_layer(self, num_rows: int, layer_idx: int) -> Mapping[str, Tensor]:
        """What it reads in a layer, by name; views, likewise."""
        return self._views(self._first_of(layer_idx), self._layer_names, num_rows)

    def _views(self, first: int, names: Sequence[str], num_rows: int) -> dict[str, Tensor]:
        """Numbers that stand side by side from a place on."""
        return dict(zip(names, self._device[first : first + len(names), :num_rows], strict=True))

    def _first_of(self, layer_idx: int) -> int:
        return len(self._places) + layer_idx * len(self._layer_names)

    def send(
        self,
        num_rows: int,
        numbers: Mapping[str, Sequence[int]],
        layer_numbers: Mapping[int, Sequence[Sequence[int]]],
    ) -> None:
        """Bring the numbers of a step's requests to the device, with padding up to `num_rows`.

        Args:
            numbers: by name, all of them.
            layer_numbers: by layer, of each request, in the order of their names; empty: the step reads none.
        Cost: one small copy; waits for the last one.
        """
        assert numbers.keys() == self._places.keys(), "what is missing would be another step's"
        if self._sent is not None:
            self._sent.synchronize()
        for name, values in numbers.items():
            array = self._arrays[self._places[name]]
            array[: len(values)] = values
            array[len(values) : num_rows] = _PADDING.get(name, 0)
        for layer_idx, of_requests in layer_numbers.items():
            first = self._first_of(layer_idx)
            tables = self._arrays[first : first + len(self._layer_names)]
            tables[:, len(of_requests) : num_rows] = 0
            for row, own in enumerate(of_requests):
                tables[:, row] = own
        self._device.copy_(self._host, non_blocking=True)
        if self._sent is not None:
            self._sent.record()


class ChosenCounts:
    """How many far keys were chosen, of each request and layer of the last step.

    Args:
        by_head: each KV head chooses its own number; else all of a request as many, which count once.
    Others as `FixedInputs`.
    """

    def __init__(
        self, *, max_rows: int, num_layers: int, num_kv_heads: int, by_head: bool, device: torch.device
    ) -> None:
        num_columns = -(-max_rows // _ALIGNED_COUNTS) * _ALIGNED_COUNTS
        num_counts = num_kv_heads if by_head else 1
        self._heads_of_count = num_kv_heads // num_counts
        self._counts = torch.zeros(num_layers, num_columns, num_counts, dtype=torch.int32, device=device)

    def of_layer(self, num_rows: int, layer_idx: int) -> Tensor:
        """Where a layer of a step of `num_rows` rows tells it, [B, Hkv or 1]; a view that stays where it is."""
        return self._counts[layer_idx, :num_rows]

    def total(self, num_rows: int) -> int:
        """Over the requests of a step, its layers and their KV heads.

        Cost: waits for the device.
        """
        return self._heads_of_count * int(self._counts[:, :num_rows].sum())
