"""`ChosenCopy`: the tokens that a step has chosen, on their way to the host."""

from collections.abc import Mapping

import torch
from torch import Tensor

from ambidex.core.ids import Lane
from ambidex.core.step import SelectionFigures


class ChosenCopy:
    """Brings a step's chosen tokens to the host while the device goes on; for one step at a time.

    Args:
        max_rows: of a step.
    """

    def __init__(self, max_rows: int, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        self._host = torch.empty(max_rows, dtype=torch.int64, pin_memory=is_cuda)
        self._copied = torch.cuda.Event() if is_cuda else None  # type: ignore[no-untyped-call]  # torch has no types here
        self._num_rows = 0
        self.lane_bytes: Mapping[Lane, int] = {}
        self.selection: SelectionFigures | None = None

    def begin(
        self, chosen: Tensor, lane_bytes: Mapping[Lane, int], selection: SelectionFigures | None = None
    ) -> "ChosenCopy":
        """Copy tokens [B] behind what was sent to the device; waits for nothing."""
        self._num_rows, self.lane_bytes, self.selection = len(chosen), lane_bytes, selection
        self._host[: len(chosen)].copy_(chosen, non_blocking=True)
        if self._copied is not None:
            self._copied.record()
        return self

    def wait_here(self) -> None:
        """Wait until they have come."""
        if self._copied is not None:
            self._copied.synchronize()

    def wait(self) -> list[int]:
        """The tokens."""
        self.wait_here()
        tokens: list[int] = self._host[: self._num_rows].tolist()
        return tokens
