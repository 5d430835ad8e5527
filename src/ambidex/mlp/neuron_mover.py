"""`NeuronMover`: neurons of DRAM and of the accelerator change places, gathered into one piece each way.

    begin     DRAM's rows → pinned ──copy──▶ staging        reads alone: every neuron still lies where it lay
              the accelerator's rows → staging ──copy──▶ pinned
    commit    staging → the accelerator's rows,  pinned → DRAM's rows, and biases         between two steps

Any neurons make a piece: their rows are gathered by the CPU, so that a copy is as large as the budget allows whether
they are neighbours or not. One row a copy, as Q-Infer's code has it, reaches a fifth of the link's rate (Kairox).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ambidex.mlp.hot_neurons import Ids, NeuronMove
from ambidex.mlp.parts import Part
from ambidex.mlp.screen import Screen
from ambidex.storage.side_stream import SideStream


@dataclass(frozen=True, slots=True, kw_only=True)
class NeuronPlace:
    """An MLP some of whose neurons lie on the accelerator, and some in DRAM where the CPU multiplies them.

    Args:
        near: the accelerator's part.
        table: [R, E], all rows of the CPU's parts; rows: [M, n] int64, those of each neuron's row in each of the M
            matrices, the last one's column among them.
        biases: before the activation, [F] each, on the accelerator and in DRAM; the accelerator's neurons come first.
    """

    near: Part
    table: Tensor
    rows: Tensor
    biases: Sequence[Tensor]
    screen: Screen | None = None
    """The copy of the first matrix' rows in DRAM, which follows them."""

    @property
    def num_near(self) -> int:
        """Neurons on the accelerator."""
        return len(self.near.rows)

    @property
    def num_far(self) -> int:
        """Neurons in DRAM."""
        return self.rows.shape[1]

    @property
    def neuron_bytes(self) -> int:
        """Of all matrices."""
        return self.rows.shape[0] * self.table.shape[1] * self.table.element_size()

    def near_matrices(self) -> list[Tensor]:
        """The accelerator's [n, E] of each matrix, in the order of `rows`."""
        columns = self.near.numbers.columns
        assert columns is not None, "columns lie neuron by neuron"
        return [*(matrix for matrix in self.near.numbers.ins if isinstance(matrix, Tensor)), columns]


class NeuronMover:
    """Buffers for moves of up to `most_pairs` pairs, one at a time.

    Args:
        places: of one width and dtype.
    """

    def __init__(self, places: Sequence[NeuronPlace], most_pairs: int, *, device: torch.device) -> None:
        self._places = tuple(places)
        self._device = device
        first = places[0]
        shape = (first.rows.shape[0], most_pairs, first.table.shape[1])
        is_cuda = device.type == "cuda"
        self._arriving = torch.empty(shape, dtype=first.table.dtype, device=device)
        self._leaving = torch.empty_like(self._arriving)
        self._from_dram = torch.empty(shape, dtype=first.table.dtype, pin_memory=is_cuda)
        self._to_dram = torch.empty_like(self._from_dram, pin_memory=is_cuda)
        self._copies = SideStream(device)
        self._done: torch.cuda.Event | None = None
        if is_cuda:
            self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch has no types here

    @staticmethod
    def buffer_bytes(neuron_bytes: int, most_pairs: int) -> int:
        """On the accelerator, and as many in DRAM."""
        return 2 * neuron_bytes * most_pairs

    def begin(self, move: NeuronMove) -> None:
        """Copy the neurons beside what the accelerator computes; the last move has been committed or dropped.

        Cost: the calling thread gathers the rows of DRAM; does not wait.
        """
        place, num = self._places[move.layer], len(move)
        rows = place.rows[:, torch.from_numpy(move.far)]  # [M, k]
        for matrix, staged in zip(rows, self._from_dram, strict=True):
            torch.index_select(place.table, 0, matrix, out=staged[:num])
        near = self._on_device(move.near)
        self._copies.wait_for_current()
        with self._copies.active():
            for matrix, staged in zip(place.near_matrices(), self._leaving, strict=True):
                torch.index_select(matrix, 0, near, out=staged[:num])
            if self._done is not None:
                near.record_stream(torch.cuda.current_stream(self._device))
            for here, there in ((self._from_dram, self._arriving), (self._leaving, self._to_dram)):
                for source, target in zip(here, there, strict=True):
                    target[:num].copy_(source[:num], non_blocking=True)
            if self._done is not None:
                self._done.record(torch.cuda.current_stream(self._device))

    def is_done(self) -> bool:
        """Whether the copies of the last move have ended."""
        return self._done is None or self._done.query()  # type: ignore[no-untyped-call]

    def is_idle(self) -> bool:
        """Whether the accelerator has done all that it was given: nothing reads DRAM for it any more."""
        if self._device.type != "cuda":
            return True
        return bool(torch.cuda.current_stream(self._device).query())

    def commit(self, move: NeuronMove) -> None:
        """Let the neurons change places. The copies have ended, and the accelerator is idle.

        Cost: writes the neurons in DRAM by the calling thread; what the accelerator writes is launched.
        """
        place, num = self._places[move.layer], len(move)
        near, far = torch.from_numpy(move.near), torch.from_numpy(move.far)
        on_device = self._on_device(move.near)
        for matrix, staged in zip(place.near_matrices(), self._arriving, strict=True):
            matrix.index_copy_(0, on_device, staged[:num])
        for matrix_rows, staged in zip(place.rows[:, far], self._to_dram, strict=True):
            place.table.index_copy_(0, matrix_rows, staged[:num])
        if place.screen is not None:
            place.screen.write(far, self._to_dram[0, :num])
        for bias in place.biases:
            _exchange(bias, near.to(bias.device), far.to(bias.device) + place.num_near)
        self._copies.wait_for_current()  # the next move's copies come behind these writes

    def settle(self) -> None:
        """Wait for the copies of the last move."""
        if self._done is not None:
            self._done.synchronize()

    def _on_device(self, slots: Ids) -> Tensor:
        return torch.from_numpy(slots).to(self._device)


def _exchange(values: Tensor, some: Tensor, others: Tensor) -> None:
    kept = values[some]
    values[some] = values[others]
    values[others] = kept
