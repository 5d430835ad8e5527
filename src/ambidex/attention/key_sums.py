"""`KeySums`: what the keys of the requests have got so far, where steps of fixed form keep it on the accelerator.

    two copies   sums and flags of a request, all layers; a step reads one and writes the other, which its end makes the
                 one that is read

So a step that breaks off is computed again from what was before. Selectors are told where it lies (`PlacedSums`); steps
of other forms take it from there and keep tensors of their own, which the next step of fixed form first copies back.
"""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch

from ambidex.attention.select.accumulated import Accumulated, PlacedSums
from ambidex.attention.ways.way import DecodeWork
from ambidex.core.ids import RequestId
from ambidex.core.kv_spec import SUM_COPIES
from ambidex.core.model_spec import ModelSpec


@dataclass(slots=True)
class _Copies:
    """Those of one request. `placed`: the one that is read, as the last step of fixed form has left it; None: there has
    been none."""

    parts: Sequence[PlacedSums]
    current: int = 0
    placed: PlacedSums | None = None


class KeySums:
    """Sums and flags of each request, with room for all its tokens from its first step of fixed form until it ends.

    Args:
        spec: layers and KV heads.
        device: where they lie.
    """

    def __init__(self, spec: ModelSpec, device: torch.device) -> None:
        self._shape = (spec.num_layers, spec.num_kv_heads)
        self._device = device
        self._kept: dict[RequestId, _Copies] = {}

    @property
    def num_bytes(self) -> int:
        """Of all requests now."""
        return sum(part.num_bytes for copies in self._kept.values() for part in copies.parts)

    def forget(self, request_id: RequestId) -> None:
        """Drop those of a request that ended."""
        self._kept.pop(request_id, None)

    def plan(self, works: Sequence[DecodeWork]) -> Mapping[str, Sequence[int]]:
        """Prepare for a step with one new token of each request: what `SumRows` says of each.

        Cost: a request's first step, and one behind steps of another form, copies sums and flags layer by layer.
        """
        numbers: dict[str, list[int]] = {}
        for work in works:
            copies = self._prepare(work)
            read, written = (copies.parts[(copies.current + turn) % SUM_COPIES] for turn in (0, 1))
            plan = cast("Accumulated", work.selectors[0]).plan_sums(work.start + 1)
            own = {
                "sums_from": read.sums.data_ptr(),
                "sums_to": written.sums.data_ptr(),
                "held_from": read.held.data_ptr(),
                "held_to": written.held.data_ptr(),
                "recent_first": plan.recent_first,
                "drop_end": plan.drop_end,
                "tau": _bits(plan.tau),
            }
            for name, number in own.items():
                numbers.setdefault(name, []).append(number)
        return numbers

    def keep_new(self, works: Sequence[DecodeWork]) -> None:
        """The step that was planned is at its end: selectors are told where it has left what they keep."""
        for work in works:
            copies = self._kept[work.request_id]
            copies.current = (copies.current + 1) % SUM_COPIES
            part = copies.parts[copies.current]
            copies.placed = PlacedSums(part.sums, part.held, work.start + 1)
            for layer_idx, selector in enumerate(work.selectors):
                cast("Accumulated", selector).place(copies.placed, layer_idx)

    def _prepare(self, work: DecodeWork) -> _Copies:
        """The copies of a request, the one that is read with what its selectors keep now."""
        copies = self._kept.get(work.request_id)
        if copies is None:
            shape = (*self._shape, work.max_tokens)
            copies = self._kept[work.request_id] = _Copies(
                [
                    PlacedSums(
                        torch.empty(shape, dtype=torch.float32, device=self._device),
                        torch.empty(shape, dtype=torch.uint8, device=self._device),
                        0,
                    )
                    for _ in range(SUM_COPIES)
                ]
            )
        part = copies.parts[copies.current]
        for layer_idx, selector in enumerate(work.selectors):
            own = cast("Accumulated", selector)
            if own.placed is None or own.placed is not copies.placed:
                own.copy_to(part.sums[layer_idx], part.held[layer_idx])
        return copies


def _bits(number: float) -> int:
    """Those of a number in fp32."""
    return int(struct.unpack("i", struct.pack("f", number))[0])
