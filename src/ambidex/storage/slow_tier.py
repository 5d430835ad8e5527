"""`SlowTier`: makes reads and copies of a part of host memory take as long as they would from slower memory.

For a machine that has no CXL memory: what would lie there lies in DRAM, and whoever reads it waits until the time is up
that the bytes would take. What is read in one go from both memories takes the time that its fast share took, and for
the rest the longer of the time that it took and of that which the slow memory needs.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import torch
from torch import Tensor

from ambidex.core.ids import KVPart
from ambidex.core.kv_mapping import HostLayout, SlowMemory
from ambidex.core.kv_spec import KVSpec

SPUN_S: Final = 200e-6
"""Of a wait, at its end: the system wakes a sleeper some 50 to 100 µs late."""


class SlowTier:
    """Which rows of a pool count as lying in the slow memory, and waits for reads of them.

    Args:
        spec, layout: of the pool in host memory.
        device: the accelerator; on a GPU its clock and its copies are measured.
    """

    def __init__(self, slow: SlowMemory, spec: KVSpec, layout: HostLayout, device: torch.device) -> None:
        self.slow = slow
        self._spec = spec
        self._layout = layout
        self._stream_delay = StreamDelay(device) if device.type == "cuda" else None

    def bytes_of_rows(self, part: KVPart, layer_idx: int, block_ids: Tensor, rows_per_block: float) -> float:
        """Slow bytes of K or V rows of a layer.

        Args:
            block_ids: [n] int64 on the host, repeated as often as their rows are read.
            rows_per_block: rows, of all KV heads that are read, for each of the ids.
        """
        num_spilled = int((block_ids >= self._layout.num_near).sum()) if self._layout.num_spilled else 0
        num_near = len(block_ids) - num_spilled
        share = self._layout.cxl_share(part, layer_idx)
        return (num_near * share + num_spilled) * rows_per_block * self._spec.row_bytes(part)

    def bytes_of_blocks(self, layer_idx: int, block_ids: Sequence[int]) -> float:
        """Slow bytes of K and V of whole blocks of a layer."""
        num_spilled = sum(block_id >= self._layout.num_near for block_id in block_ids)
        num_near = len(block_ids) - num_spilled
        return sum(
            (num_near * self._layout.cxl_share(part, layer_idx) + num_spilled)
            * self._spec.part_bytes_per_block(part)
            / self._spec.num_layers
            for part in KVPart
        )

    def bytes_of_block(self, block_id: int) -> float:
        """Slow bytes of K and V of one block in all layers."""
        return sum(self.bytes_of_blocks(layer_idx, [block_id]) for layer_idx in range(self._spec.num_layers))

    @contextmanager
    def reading(self, slow_bytes: float, num_bytes: float) -> Iterator[None]:
        """Do a read on the host within this: it ends no sooner than slow memory would have given its share.

        Args:
            slow_bytes: of all `num_bytes` that are read.
        """
        start = time.perf_counter()
        yield
        if slow_bytes > 0:
            wait_until(self.read_end(slow_bytes, num_bytes, start, time.perf_counter()))

    def read_end(self, slow_bytes: float, num_bytes: float, start: float, end: float) -> float:
        """When a read that lasted from `start` to `end` would have ended, in the same clock; see `reading`."""
        took, share = end - start, slow_bytes / num_bytes
        return start + took * (1 - share) + max(took * share, self.slow.seconds(slow_bytes))

    @contextmanager
    def copying(self, slow_bytes: float, num_bytes: float) -> Iterator[None]:
        """Launch a copy to or from the accelerator within this; without a GPU it is a read on the host.

        Args:
            slow_bytes: of all `num_bytes` that are copied.
        """
        if self._stream_delay is None:
            with self.reading(slow_bytes, num_bytes):
                yield
        else:
            yield
            self.delay_stream(slow_bytes)

    def delay_stream(self, slow_bytes: float) -> None:
        """Behind a copy to or from a GPU that the current stream was just given: hold the stream for as long as slow
        memory would have taken longer than this machine's.

        Cost: one launch, which a graph may capture. Nothing without a GPU: there `reading` is for copies, too.
        """
        if self._stream_delay is not None and slow_bytes > 0:
            self._stream_delay.hold(self.slow.seconds(slow_bytes) - slow_bytes / self._stream_delay.copied_bytes_per_s)


class StreamDelay:
    """Holds a stream of a GPU for a time, by a kernel that counts clock cycles.

    Attributes:
        copied_bytes_per_s: at which this machine's copies from pinned memory arrive, measured.
    """

    def __init__(self, device: torch.device) -> None:
        cycles, size = 20_000_000, 16 << 20
        _sleep(cycles)  # brings the clock up
        self._cycles_per_s = cycles / _measure(device, lambda: _sleep(cycles))
        source = torch.empty(size, dtype=torch.uint8, pin_memory=True).fill_(1)
        target = torch.empty(size, dtype=torch.uint8, device=device)
        self.copied_bytes_per_s = size / _measure(device, lambda: target.copy_(source, non_blocking=True))

    def hold(self, seconds: float) -> None:
        """Launch the wait on the current stream; nothing if it is none."""
        if seconds > 0:
            _sleep(int(seconds * self._cycles_per_s))


def _sleep(cycles: int) -> None:
    """Launch a kernel that counts cycles of a multiprocessor's clock."""
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]  # torch has no types here


def _measure(device: torch.device, launch: Callable[[], object]) -> float:
    """Median of the seconds that some launches take on the device."""
    seconds: list[float] = []
    for _ in range(5):
        torch.cuda.synchronize(device)
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]  # torch has no types here
        events[0].record()
        launch()
        events[1].record()
        events[1].synchronize()
        seconds.append(events[0].elapsed_time(events[1]) / 1e3)
    return sorted(seconds)[2]


def wait_until(end: float) -> None:
    """Return at a time of `time.perf_counter`, at once if it is over."""
    left = end - time.perf_counter()
    if left > SPUN_S:
        time.sleep(left - SPUN_S)
    while time.perf_counter() < end:
        pass
