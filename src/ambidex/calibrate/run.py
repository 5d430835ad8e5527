"""`calibrate`: measures this machine part by part into a `HardwareProfile`; what was interrupted goes on where it was.

Each part that is done is kept in a file beside the profile. That file counts if it is of this machine and not older
than a day; the profile itself appears when all parts are there.
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from ambidex.calibrate import cpu, crossovers, gpu, nodes
from ambidex.calibrate.launches import measure_launches
from ambidex.calibrate.memory_rate import gpu_read_rate, probe_bytes
from ambidex.core.dtypes import GPU_WEIGHT_KINDS
from ambidex.core.errors import MachineError
from ambidex.core.units import GIB, MIB, format_size
from ambidex.hw.presets import REQUEST_S, STEP_S
from ambidex.hw.profile import (
    CpuRates,
    Curve,
    GpuRates,
    HardwareProfile,
    LinkRates,
    Machine,
    NeuronRates,
    NodeRates,
    Products,
)
from ambidex.hw.profile_file import VERSION, profile_json, write_json
from ambidex.hw.topology import Topology, read_topology
from ambidex.kernels.cpu.native import ThreadPool

GPU_PRODUCT_FORMATS: Final = ("fp32", "bf16", "fp16", *GPU_WEIGHT_KINDS)
KEPT_S: Final = 24 * 3600
"""For which parts of an interrupted run are taken over."""
LEAST_BYTES: Final = 64 * MIB
MOST_BYTES: Final = GIB
"""Of the buffer that products and attention run through."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A part of the calibration: what it gave, how long it took, and whether that was in an earlier run."""

    name: str
    value: Any
    seconds: float
    is_kept: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """What parts are measured with. `buffer` is DRAM to run through; `device` None: there is no GPU."""

    threads: ThreadPool
    buffer: Tensor
    device: torch.device | None


def calibrate(
    path: Path, machine: Machine, *, num_threads: int, anew: bool = False, num_bytes: int | None = None
) -> Iterator[Part]:
    """Measure all parts and write the profile; yields each part when it is there.

    Args:
        path: of the profile.
        machine: what it belongs to.
        num_threads: of the CPU lane.
        anew: do not take over parts of an interrupted run.
        num_bytes: of the buffer in DRAM; None: many times the caches.
    Raises:
        ConfigError: the profile cannot be written.
        MachineError: there is too little free memory, or no compiled module.
    Cost: a minute or more on two cores; takes the buffer's bytes, and on a GPU some 3 GiB.
    """
    partial = path.with_name(f"{path.name}.partial")
    done = {} if anew else read_partial(partial, machine)
    topology = read_topology()
    names = part_names(has_gpu=torch.cuda.is_available(), node_ids=measured_nodes(topology))
    bench: Bench | None = None
    for name in names:
        if name in done:
            yield Part(name=name, value=done[name]["value"], seconds=done[name]["seconds"], is_kept=True)
            continue
        bench = bench or _make_bench(num_threads, num_bytes)
        start = time.perf_counter()
        value = _measure(name, bench)
        seconds = time.perf_counter() - start
        done[name] = {"value": value, "seconds": seconds}
        write_json(partial, {"version": VERSION, "machine": asdict(machine), "time": time.time(), "parts": done})
        yield Part(name=name, value=value, seconds=seconds, is_kept=False)
    profile = make_profile(
        machine, {name: done[name]["value"] for name in names}, num_threads=num_threads, topology=topology
    )
    write_json(path, profile_json(profile))
    partial.unlink(missing_ok=True)


def measured_nodes(topology: Topology) -> tuple[int, ...]:
    """NUMA nodes with memory on which this process may allocate."""
    return tuple(node.node_id for node in topology.numa_nodes if node.is_allowed and node.memory_bytes)


def part_names(*, has_gpu: bool, node_ids: Sequence[int] = ()) -> tuple[str, ...]:
    """All parts, in their order."""
    names = ["DRAM read", *(f"CPU products {kind}" for kind in cpu.PRODUCT_FORMATS)]
    names += [*(f"CPU attention {kind}" for kind in cpu.ATTENTION_FORMATS), "CPU small calls", "CPU tiles"]
    names += [f"CPU neurons {kind}" for kind in crossovers.NEURON_FORMATS]
    if has_gpu:
        names += ["GPU", "GPU memory read", *(f"GPU products {kind}" for kind in GPU_PRODUCT_FORMATS), "GPU attention",
                  "GPU small kernels", "launches", "copies", "DRAM beside copies", "handover"]  # fmt: skip
    return (*names, *(f"NUMA node {node_id}" for node_id in node_ids))


def make_profile(
    machine: Machine, parts: Mapping[str, Any], *, num_threads: int, topology: Topology
) -> HardwareProfile:
    """The profile that the values of all parts make."""
    processor = CpuRates(
        name=machine.cpu,
        num_threads=num_threads,
        read_bytes_per_s=_curve(parts["DRAM read"]),
        products=_products(parts, "CPU products ", cpu.PRODUCT_FORMATS),
        attention_bytes_per_s={kind: parts[f"CPU attention {kind}"] for kind in cpu.ATTENTION_FORMATS},
        layer_s=parts["CPU small calls"],
        step_s=STEP_S,
        request_s=REQUEST_S,
        tiles_from=parts["CPU tiles"],
        neurons={
            kind: NeuronRates(**{name: _curve(points) for name, points in parts[f"CPU neurons {kind}"].items()})
            for kind in crossovers.NEURON_FORMATS
        },
    )
    card, link = None, None
    if "GPU" in parts:
        card = GpuRates(
            name=parts["GPU"]["name"],
            memory_bytes=parts["GPU"]["memory_bytes"],
            read_bytes_per_s=parts["GPU memory read"],
            products=_products(parts, "GPU products ", GPU_PRODUCT_FORMATS),
            attention_bytes_per_s=parts["GPU attention"],
            layer_s=parts["GPU small kernels"],
            launch_s=parts["launches"],
        )
        to_gpu, from_gpu = parts["copies"]
        link = LinkRates(
            name="link of this machine",
            to_gpu_bytes_per_s=to_gpu,
            from_gpu_bytes_per_s=from_gpu,
            beside_bytes_per_s=parts["DRAM beside copies"],
            handover_s=parts["handover"],
        )
    return HardwareProfile(
        machine=machine,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        source="measured by ambidex calibrate",
        cpu=processor,
        gpu=card,
        link=link,
        nodes=tuple(
            NodeRates(node_id=node.node_id, is_memory_only=node.is_memory_only, **rates)
            for node in topology.numa_nodes
            if "refusal" not in (rates := parts.get(f"NUMA node {node.node_id}", {"refusal": "not asked for"}))
        ),
    )


def read_partial(path: Path, machine: Machine) -> dict[str, Any]:
    """Parts of an interrupted run on this machine; none if there is no such file, or it is of another day."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        is_ours = value["version"] == VERSION and value["machine"] == asdict(machine)
        parts: dict[str, Any] = {
            name: {"value": part["value"], "seconds": float(part["seconds"])} for name, part in value["parts"].items()
        }
        return parts if is_ours and 0 <= time.time() - value["time"] < KEPT_S else {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # whatever it is, measuring anew mends it
        return {}


def _make_bench(num_threads: int, num_bytes: int | None) -> Bench:
    size = min(MOST_BYTES, probe_bytes()) if num_bytes is None else num_bytes
    if num_bytes is None and size < LEAST_BYTES:
        raise MachineError(
            f"only {format_size(size)} of memory may be used to measure this machine, {format_size(LEAST_BYTES)} are "
            f"needed: stop other programs"
        )
    torch.set_num_threads(num_threads)
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else None
    return Bench(threads=ThreadPool(num_threads), buffer=cpu.make_buffer(size), device=device)


def _measure(name: str, bench: Bench) -> Any:
    """The value of a part, as JSON has it."""
    for prefix, measure in _BY_FORMAT.items():
        if name.startswith(prefix):
            return measure(bench, name.removeprefix(prefix))
    return _OTHERS[name](bench)


def _device(bench: Bench) -> torch.device:
    assert bench.device is not None, "parts of a GPU are measured where there is one"
    return bench.device


def _node_bytes(node_id: int, bench: Bench) -> int:
    """Of the buffer on a node: as large as that of DRAM, but a quarter of what is free there."""
    free = next((node.free_bytes for node in read_topology().numa_nodes if node.node_id == node_id), 0)
    return max(nodes.LEAST_BYTES, min(bench.buffer.numel(), nodes.MOST_BYTES, free // 4))


def _describe_gpu(bench: Bench) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(_device(bench))
    return {"name": properties.name, "memory_bytes": int(torch.cuda.mem_get_info(_device(bench))[1])}


_BY_FORMAT: Final[Mapping[str, Callable[[Bench, str], Any]]] = {
    "CPU products ": lambda bench, kind: cpu.measure_products(
        bench.threads, kind, bench.buffer, is_lane=bench.device is not None
    ),
    "CPU neurons ": lambda bench, kind: crossovers.measure_neurons(
        bench.threads,
        kind,
        bench.buffer,
        num_torch_threads=1 if bench.device is None else bench.threads.num_threads,
    ),
    "CPU attention ": lambda bench, kind: cpu.measure_attention(bench.threads, kind, bench.buffer),
    "GPU products ": lambda bench, kind: gpu.measure_products(_device(bench), kind),
    "NUMA node ": lambda bench, node_id: nodes.measure_node(
        int(node_id), bench.threads, _node_bytes(int(node_id), bench), device=bench.device
    ),
}
_OTHERS: Final[Mapping[str, Callable[[Bench], Any]]] = {
    "DRAM read": lambda bench: cpu.measure_reads(bench.threads.num_threads, bench.buffer),
    "CPU small calls": lambda bench: cpu.measure_layer(bench.threads),
    "CPU tiles": lambda bench: crossovers.measure_tiles(bench.threads, bench.buffer),
    "GPU": _describe_gpu,
    "GPU memory read": lambda bench: gpu_read_rate(_device(bench)).median,
    "GPU attention": lambda bench: gpu.measure_attention(_device(bench), "bf16"),
    "GPU small kernels": lambda bench: gpu.measure_layer(_device(bench)),
    "launches": lambda bench: measure_launches(_device(bench)),
    "copies": lambda bench: gpu.measure_copies(_device(bench)),
    "DRAM beside copies": lambda bench: gpu.measure_beside(_device(bench), bench.threads, bench.buffer),
    "handover": lambda bench: gpu.measure_handover(_device(bench), bench.threads),
}


def _curve(points: list[tuple[int, float]]) -> Curve:
    return Curve(tuple((int(num), float(rate)) for num, rate in points))


def _products(parts: Mapping[str, Any], prefix: str, kinds: tuple[str, ...]) -> Products:
    return Products({kind: _curve(parts[prefix + kind]) for kind in kinds})
