"""What memories and links deliver: DRAM by number of threads, GPU memory, and copies between the two."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from ambidex.bench.figures import Quantiles
from ambidex.bench.floor import Rates
from ambidex.bench.memory_rate import gpu_read_rate, native_read_rate, probe_bytes, read_bandwidth
from ambidex.calibrate.copies import copy_rate, copy_seconds, thread_counts
from ambidex.core.errors import MachineError
from ambidex.core.units import KIB, MIB, format_size
from ambidex.hw.topology import check_num_threads, read_topology
from ambidex.kernels.cpu.native import ThreadPool
from ambidex.kernels.cpu.native import isa as native_isa

COLUMNS: Final = ("link", "median", "20 %", "80 %")
LARGE_COPY_BYTES: Final = 256 * MIB
"""Of a copy whose rate is the link's: its fixed cost, some 10 µs, is below 1 % at 64 GB/s."""
SMALL_COPY_BYTES: Final = (4 * KIB, 64 * KIB, MIB, 16 * MIB)
"""From the query of one layer to a block of KV."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """Rates in bytes/s, and seconds of small copies; what needs a GPU is empty without one.

    `dram_read` is by number of threads; `copies` by memory (`pinned`, `pageable`) and way (`to_gpu`, `from_gpu`);
    `small_copies` are pinned, by way and bytes.
    """

    dram_bytes: int
    dram_read: Mapping[int, Quantiles]
    gpu_read: Quantiles | None = None
    copies: Mapping[tuple[str, str], Quantiles] | None = None
    small_copies: Mapping[tuple[str, int], Quantiles] | None = None

    def rates(self) -> Rates:
        """What floors are taken from: DRAM read by the most threads, GPU memory, the slower way of pinned copies."""
        copies = [rate.median for (memory, _), rate in (self.copies or {}).items() if memory == "pinned"]
        return Rates(
            dram=self.dram_read[max(self.dram_read)].median,
            gpu=None if self.gpu_read is None else self.gpu_read.median,
            link=min(copies) if copies else None,
        )

    def record(self) -> dict[str, Any]:
        """The figures for a JSON record."""
        return {
            "unit": "bytes/s",
            "dram_buffer_bytes": self.dram_bytes,
            "dram_read": {str(num): rate.record() for num, rate in self.dram_read.items()},
            "gpu_read": None if self.gpu_read is None else self.gpu_read.record(),
            "copies": {f"{memory}_{way}": rate.record() for (memory, way), rate in (self.copies or {}).items()},
            "small_copies_s": {f"{way}_{size}": s.record() for (way, size), s in (self.small_copies or {}).items()},
        }

    def rows(self) -> list[tuple[str, str, str, str]]:
        """(what, median, 20 % quantile, 80 % quantile) of each figure, for people."""
        rows = [_rate_row(f"DRAM read, {num} thread{'s' * (num != 1)}", r) for num, r in self.dram_read.items()]
        if self.gpu_read is not None:
            rows.append(_rate_row("GPU memory read", self.gpu_read))
        for (memory, way), rate in (self.copies or {}).items():
            rows.append(_rate_row(f"{memory} copy {way.replace('_', ' ')}", rate))
        for (way, size), seconds in (self.small_copies or {}).items():
            cells = [f"{value * 1e6:.1f} µs" for value in (seconds.median, seconds.q20, seconds.q80)]
            rows.append((f"pinned copy {way.replace('_', ' ')}, {format_size(size)}", *cells))  # type: ignore[arg-type]
        return rows


def measure_links(*, num_threads: int | None = None) -> Links:
    """Measure all that this machine has, with 1, 2, 4, … and all `num_threads` threads (None: of the usable cores).

    Raises:
        ConfigError: more threads are asked for than can run at once.
        NativeModuleError: the compiled module, which reads DRAM, is missing.
        MachineError: there is too little free memory to measure anything.
    Cost: seconds; takes `probe_bytes()` of DRAM and up to 4 GiB of GPU memory, and gives both back.
    """
    if num_threads is not None:
        check_num_threads(num_threads)
    most = num_threads or read_topology().num_usable_cores
    buffer = _make_buffer()
    dram_read = {num: native_read_rate(ThreadPool(num), buffer) for num in thread_counts(most)}
    dram_bytes = buffer.nbytes
    del buffer
    if not torch.cuda.is_available():
        return Links(dram_bytes=dram_bytes, dram_read=dram_read)
    device = torch.device("cuda", torch.cuda.current_device())
    return Links(
        dram_bytes=dram_bytes,
        dram_read=dram_read,
        gpu_read=gpu_read_rate(device),
        copies={
            (memory, way): copy_rate(device, memory=memory, way=way, num_bytes=LARGE_COPY_BYTES)
            for memory in ("pinned", "pageable")
            for way in ("to_gpu", "from_gpu")
        },
        small_copies={
            (way, size): Quantiles.of(copy_seconds(device, memory="pinned", way=way, num_bytes=size))
            for way in ("to_gpu", "from_gpu")
            for size in SMALL_COPY_BYTES
        },
    )


def measure_rates(device: torch.device, *, num_threads: int) -> Links:
    """What a floor needs: DRAM read by so many threads, and on a GPU its memory's read rate and pinned copies.

    Raises:
        MachineError: there is too little free memory to measure anything.
    Cost: as `measure_links`, a part of it.
    """
    dram_read = {num_threads: dram_read_rate(num_threads)}
    if device.type != "cuda":
        return Links(dram_bytes=probe_bytes(), dram_read=dram_read)
    copies = {
        ("pinned", way): copy_rate(device, memory="pinned", way=way, num_bytes=LARGE_COPY_BYTES)
        for way in ("to_gpu", "from_gpu")
    }
    return Links(dram_bytes=probe_bytes(), dram_read=dram_read, gpu_read=gpu_read_rate(device), copies=copies)


def dram_read_rate(num_threads: int) -> Quantiles:
    """Bytes/s at which so many threads read DRAM: native ones, and torch's where there is no compiled module."""
    if has_native():
        return native_read_rate(ThreadPool(num_threads), _make_buffer())
    return read_bandwidth(num_threads=num_threads, num_bytes=probe_bytes())


def has_native() -> bool:
    """The compiled module is there."""
    try:
        native_isa()
    except MachineError:
        return False
    return True


def _make_buffer() -> Tensor:
    num_bytes = probe_bytes()
    if num_bytes < MIB:
        raise MachineError(f"only {format_size(num_bytes)} of memory may be used to measure DRAM: stop other programs")
    return torch.ones(num_bytes, dtype=torch.uint8)


def _rate_row(name: str, rate: Quantiles) -> tuple[str, str, str, str]:
    median, q20, q80 = (f"{value / 1e9:.1f} GB/s" for value in (rate.median, rate.q20, rate.q80))
    return name, median, q20, q80
