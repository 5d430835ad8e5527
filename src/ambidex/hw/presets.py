"""Profiles of hardware that is not here, from published data sheets, for `ambidex plan`.

    rate = what the data sheet says × an efficiency

The efficiencies are those that one machine reached with this engine (an H200, 16 Xeon cores with AMX, PCIe 5 x16;
records in bench/results/): other hardware may reach more or less, and `ambidex calibrate` measures it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, TypeVar

from ambidex.core.dtypes import WEIGHT_BLOCKS
from ambidex.core.errors import ConfigError
from ambidex.core.units import GIB
from ambidex.hw.profile import CpuRates, Curve, GpuRates, HardwareProfile, LinkRates, Products

_T = TypeVar("_T")

GPU_READ: Final = 0.89
"""Of the data sheet's bytes/s: 4.29 of 4.8 TB/s, torch's sum over 4 GiB (decode_hybrid, median of 17 records)."""
GPU_PRODUCT_READ: Final = 0.77
"""The same for the weights of a product of one token: fitted to decode_gpu; kernels alone 15.0 GB in 4.0 ms."""
GPU_FLOPS: Final = 0.78
"""Of dense 16-bit operations/s with fp32 sums: 775 of 989 TFLOPS (prefill_gpu)."""
GPU_ATTENTION: Final = 0.62
"""Of the data sheet's bytes/s: 1.88 GB of keys and values more took 0.62 ms (decode_gpu, 2K, 16K tokens)."""
GPU_LAYER_S: Final = 15e-6
"""Of a recorded step with one token: (4.88 ms − products 4.0 − attention's reads − scheduling) / 32 layers."""
LAUNCH_S: Final = 0.9e-3
"""Of a layer of a prompt's chunk whose keys lie on the GPU: with keys in DRAM, twice the launches, the host was busy
for 224 to 235 ms of prompts of 8K, which have 128 layers of chunks (prefill_gpu); 301 ms where cores were slower."""
DRAM_READ: Final = 0.80
"""Of channels × transfers/s × 8 bytes: what plain reads by all cores of a desktop or server reach. The machine of the
records is a share of a larger one, so that its data sheet says nothing of it; this figure is an assumption."""
CPU_PRODUCT_READ: Final = 0.9
"""Of the read rate, products of one token: cpu_linear, 4096 x 4096 (0.81 to 0.94)."""
CPU_ATTENTION: Final = {"fp32": 1.0, "bf16": 1.0, "fp16": 0.9, "int8": 0.7, "int4": 0.2}
"""Of the read rate, by the format of K and V: cpu_attention, 15 threads, groups of 4. That of int4 from
its rate beside int8's on one core with AVX2 (docs/kv_formats.md); `ambidex calibrate` measures it."""
CPU_FLOPS: Final = 0.25
"""Of cores × clock × operations a cycle: cpu_linear, 16 tokens, fp32, two AVX2 cores (50 of 200 GFLOPS)."""
LINK: Final = 0.88
"""Of the data sheet's bytes/s: 55.5 of 63 GB/s, pinned copies."""
HANDOVER_S: Final = 52e-6
"""GPU → CPU → GPU within a layer, waking threads and the ends of short native calls included: fitted to decode_hybrid,
contexts of 2K and more. The words alone take 9.8 µs."""
STEP_S: Final = 0.3e-3
REQUEST_S: Final = 8e-6
"""Scheduling and sampling: 4.9 ms a step of which kernels are 4.6; 7.06 of which they are 6.27 with 64 requests."""
CPU_LAYER_S: Final = 20e-6
"""Norms, activation and rotation of a token on a CPU."""
TOKENS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
"""Where the curves of products have their points."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSheet:
    """A data sheet: memory in GiB, bytes/s, dense 16-bit operations/s with fp32 sums, and where they are from."""

    memory_gib: int
    bytes_per_s: float
    flops_per_s: float
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuSheet:
    """DRAM's bytes/s by channels and transfers, cores, and operations/s of one core by format."""

    bytes_per_s: float
    cores: int
    core_flops_per_s: Mapping[str, float]
    source: str


_AMPERE: Final = "NVIDIA GA102 whitepaper V2"
_ADA: Final = "NVIDIA Ada architecture whitepaper V2"
GPUS: Final[Mapping[str, GpuSheet]] = {
    "rtx2080ti": GpuSheet(memory_gib=11, bytes_per_s=616e9, flops_per_s=53.8e12, source="NVIDIA Turing whitepaper"),
    "rtx3060-12g": GpuSheet(
        memory_gib=12, bytes_per_s=360e9, flops_per_s=25.5e12, source=f"{_AMPERE}, 112 tensor cores of 128 operations "
        f"a cycle at 1.78 GHz"),
    "rtx3080-10g": GpuSheet(memory_gib=10, bytes_per_s=760e9, flops_per_s=59.5e12, source=_AMPERE),
    "rtx3090": GpuSheet(memory_gib=24, bytes_per_s=936e9, flops_per_s=71e12, source=_AMPERE),
    "rtx4060ti-16g": GpuSheet(
        memory_gib=16, bytes_per_s=288e9, flops_per_s=44.1e12, source=f"{_ADA}, 136 tensor cores of 128 operations a "
        f"cycle at 2.54 GHz"),
    "rtx4070": GpuSheet(
        memory_gib=12, bytes_per_s=504e9, flops_per_s=58.3e12, source=f"{_ADA}, 184 tensor cores of 128 operations a "
        f"cycle at 2.48 GHz"),
    "rtx4080": GpuSheet(memory_gib=16, bytes_per_s=716.8e9, flops_per_s=97.5e12, source=_ADA),
    "rtx4090": GpuSheet(memory_gib=24, bytes_per_s=1008e9, flops_per_s=165.2e12, source=_ADA),
    "rtx5090": GpuSheet(
        memory_gib=32, bytes_per_s=1792e9, flops_per_s=209.5e12, source="NVIDIA RTX Blackwell whitepaper"),
    "a100-40g": GpuSheet(memory_gib=40, bytes_per_s=1555e9, flops_per_s=312e12, source="NVIDIA A100 data sheet"),
    "a100-80g": GpuSheet(memory_gib=80, bytes_per_s=1935e9, flops_per_s=312e12, source="NVIDIA A100 data sheet, PCIe"),
    "l40s": GpuSheet(memory_gib=48, bytes_per_s=864e9, flops_per_s=362e12, source="NVIDIA L40S data sheet"),
    "h100": GpuSheet(memory_gib=80, bytes_per_s=3350e9, flops_per_s=989e12, source="NVIDIA H100 data sheet, SXM"),
    "h200": GpuSheet(memory_gib=141, bytes_per_s=4800e9, flops_per_s=989e12, source="NVIDIA H200 data sheet"),
}  # fmt: skip


def _vector_core(ghz: float, lanes: int) -> dict[str, float]:
    """Operations/s of a core with two fused multiply-add units of so many fp32 lanes; other formats are widened."""
    return {"fp32": ghz * 1e9 * lanes * 2 * 2}


CPUS: Final[Mapping[str, CpuSheet]] = {
    "ddr4-2ch": CpuSheet(bytes_per_s=2 * 3200e6 * 8, cores=8, core_flops_per_s=_vector_core(4.0, 8),
                         source="DDR4-3200, 2 channels; 8 cores with AVX2 at 4.0 GHz"),
    "ddr4-4ch": CpuSheet(bytes_per_s=4 * 3200e6 * 8, cores=16, core_flops_per_s=_vector_core(3.5, 8),
                         source="DDR4-3200, 4 channels; 16 cores with AVX2 at 3.5 GHz"),
    "ddr4-8ch": CpuSheet(bytes_per_s=8 * 3200e6 * 8, cores=32, core_flops_per_s=_vector_core(2.8, 8),
                         source="DDR4-3200, 8 channels; 32 cores with AVX2 at 2.8 GHz"),
    "ddr5-2ch": CpuSheet(bytes_per_s=2 * 5600e6 * 8, cores=8, core_flops_per_s=_vector_core(4.5, 8),
                         source="DDR5-5600, 2 channels; 8 cores with AVX2 at 4.5 GHz"),
    "ddr5-4ch": CpuSheet(bytes_per_s=4 * 5200e6 * 8, cores=24, core_flops_per_s=_vector_core(3.5, 16),
                         source="DDR5-5200, 4 channels; 24 cores with AVX-512 at 3.5 GHz"),
    "ddr5-8ch": CpuSheet(bytes_per_s=8 * 4800e6 * 8, cores=32, core_flops_per_s=_vector_core(2.6, 16),
                         source="DDR5-4800, 8 channels; 32 cores with AVX-512 at 2.6 GHz"),
    "ddr5-12ch": CpuSheet(bytes_per_s=12 * 4800e6 * 8, cores=64, core_flops_per_s=_vector_core(2.6, 16),
                          source="DDR5-4800, 12 channels; 64 cores with AVX-512 at 2.6 GHz"),
}  # fmt: skip

LINKS: Final[Mapping[str, float]] = {
    "pcie3x8": 7.88e9, "pcie3x16": 15.75e9, "pcie4x8": 15.75e9, "pcie4x16": 31.5e9, "pcie5x8": 31.5e9,
    "pcie5x16": 63.0e9,
}  # fmt: skip
"""Bytes/s each way. Source: PCI Express base specifications 3.0 to 5.0 (8, 16, 32 GT/s a lane, 128b/130b)."""


def make_profile(gpu: str, cpu: str, link: str) -> HardwareProfile:
    """A profile of presets.

    Raises:
        ConfigError: a name is unknown; lists the known ones.
    """
    sheet, host = _find("--gpu", gpu, GPUS), _find("--cpu", cpu, CPUS)
    return HardwareProfile(
        machine=None,
        date="",
        source=f"data sheets: {gpu} ({sheet.source}); {cpu} ({host.source}); {link}",
        cpu=cpu_rates(cpu),
        gpu=gpu_rates(gpu),
        link=link_rates(link, dram_bytes_per_s=DRAM_READ * host.bytes_per_s),
    )


def gpu_rates(name: str) -> GpuRates:
    """Rates of a GPU by its preset.

    Raises:
        ConfigError: the name is unknown.
    """
    sheet = _find("--gpu", name, GPUS)
    flops = {kind: GPU_FLOPS * sheet.flops_per_s / (8 if kind == "fp32" else 1) for kind in WEIGHT_BLOCKS}
    return GpuRates(
        name=name,
        memory_bytes=sheet.memory_gib * GIB,
        read_bytes_per_s=GPU_READ * sheet.bytes_per_s,
        products=roofline(GPU_PRODUCT_READ * sheet.bytes_per_s, flops),
        attention_bytes_per_s=GPU_ATTENTION * sheet.bytes_per_s,
        layer_s=GPU_LAYER_S,
        launch_s=LAUNCH_S,
    )


def cpu_rates(name: str) -> CpuRates:
    """Rates of a processor and its DRAM by their preset.

    Raises:
        ConfigError: the name is unknown.
    """
    sheet = _find("--cpu", name, CPUS)
    read = DRAM_READ * sheet.bytes_per_s
    flops = {
        kind: CPU_FLOPS * sheet.cores * sheet.core_flops_per_s.get(kind, sheet.core_flops_per_s["fp32"])
        for kind in WEIGHT_BLOCKS
    }
    return CpuRates(
        name=name,
        num_threads=sheet.cores,
        read_bytes_per_s=Curve(((1, min(read, 15e9)), (sheet.cores, read))),
        products=roofline(CPU_PRODUCT_READ * read, flops),
        attention_bytes_per_s={kind: share * read for kind, share in CPU_ATTENTION.items()},
        layer_s=CPU_LAYER_S,
        step_s=STEP_S,
        request_s=REQUEST_S,
    )


def link_rates(name: str, *, dram_bytes_per_s: float) -> LinkRates:
    """Rates of a link by its preset; DRAM gives both users together what it gives its threads.

    Raises:
        ConfigError: the name is unknown.
    """
    rate = LINK * _find("--link", name, LINKS)
    return LinkRates(
        name=name,
        to_gpu_bytes_per_s=min(rate, dram_bytes_per_s),
        from_gpu_bytes_per_s=min(rate, dram_bytes_per_s),
        beside_bytes_per_s=dram_bytes_per_s,
        handover_s=HANDOVER_S,
    )


def roofline(bytes_per_s: float, flops_per_s: Mapping[str, float]) -> Products:
    """Curves of products that are limited by reading the weights, and by operations.

    Formula: bytes / max(bytes / bytes_per_s, 2 · tokens · numbers / flops_per_s).
    """
    return Products(
        {kind: Curve(tuple((num, min(bytes_per_s, flops * block_bytes / (2 * num * block_len))) for num in TOKENS))
         for kind, flops in flops_per_s.items()
         for block_len, block_bytes in (WEIGHT_BLOCKS[kind],)}
    )  # fmt: skip


def _find(flag: str, name: str, known: Mapping[str, _T]) -> _T:
    try:
        return known[name]
    except KeyError:
        raise ConfigError(f"{flag} {name[:40]!r} is unknown: there are {', '.join(known)}") from None
