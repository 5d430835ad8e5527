"""`HardwareProfile`: what a machine delivers, as plain values. `ambidex calibrate` measures one; `hw/presets.py` makes
them from data sheets; the cost model predicts with them.

    machine ── gpu    memory rate, products by format and tokens, attention
            ├─ cpu    DRAM rate by threads, products, attention, costs of a step
            ├─ link   copies, what DRAM gives beside them, a handover GPU → CPU → GPU
            └─ nodes  NUMA nodes: read rate, latency, copies from each
"""

import bisect
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from ambidex.core.dtypes import WEIGHT_BLOCKS
from ambidex.core.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What rates belong to: another processor, number of cores or GPU has others."""

    cpu: str
    cores: int
    gpu: str | None


@dataclass(frozen=True, slots=True)
class Curve:
    """A rate that depends on a count (tokens of a product, threads of a read), at some counts in ascending order.

    Between two counts it is interpolated on logarithmic scales, below the first it is the first's.
    """

    points: tuple[tuple[int, float], ...]

    def __post_init__(self) -> None:
        counts = [count for count, _ in self.points]
        if not counts or counts != sorted(set(counts)) or counts[0] < 1:
            raise ConfigError(f"a rate has the counts {counts}: they must be ascending numbers from 1")
        for count, rate in self.points:
            if not (math.isfinite(rate) and rate > 0):
                raise ConfigError(f"the rate at {count} is {rate}: it must be a number above 0")

    @property
    def last(self) -> tuple[int, float]:
        """The largest count and its rate."""
        return self.points[-1]

    def at(self, count: float) -> float:
        """The rate at a count; beyond the last one it stays what it was."""
        place = bisect.bisect_left(self.points, count, key=lambda point: point[0])
        if place == len(self.points):
            return self.points[-1][1]
        high, high_rate = self.points[place]
        if place == 0 or high == count:
            return high_rate
        low, low_rate = self.points[place - 1]
        share = math.log(count / low) / math.log(high / low)
        return low_rate * math.exp(share * math.log(high_rate / low_rate))


@dataclass(frozen=True, slots=True)
class Products:
    """How fast `x @ weight.T` goes through weights, by their format: bytes of weights/s at numbers of tokens."""

    curves: Mapping[str, Curve]

    def __post_init__(self) -> None:
        if unknown := self.curves.keys() - WEIGHT_BLOCKS.keys():
            raise ConfigError(f"products have the formats {sorted(unknown)}: known are {', '.join(WEIGHT_BLOCKS)}")

    def bytes_per_s(self, kind: str, num_tokens: float) -> float:
        """Bytes of weights/s. Beyond the largest number of tokens operations limit: the rate falls as 1/tokens.

        Raises:
            ConfigError: there is no rate for that format.
        """
        curve = self.curves.get(kind)
        if curve is None:
            raise ConfigError(
                f"the machine's profile has no rate for products of {kind} weights (it has {', '.join(self.curves)}): "
                f"choose another format, or measure this machine with `ambidex calibrate`"
            )
        last, rate = curve.last
        return curve.at(num_tokens) if num_tokens <= last else rate * last / num_tokens

    def flops_per_s(self, kind: str) -> float:
        """Operations/s of the largest product, a multiply-add as two."""
        self.bytes_per_s(kind, 1)  # names a format that is not there
        num_tokens, rate = self.curves[kind].last
        block_len, block_bytes = WEIGHT_BLOCKS[kind]
        return 2.0 * num_tokens * rate * block_len / block_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class NeuronRates:
    """What leaving out neurons costs the CPU lane, with plain weights of one format: seconds a byte of rows, by tokens.

    Of the last matrix of an MLP: rows of each token on its own (`bags`), of all tokens' union (`union`), all (`dense`).
    Of the first one: all rows (`plain`), all rows by way of their 8-bit copy (`screen`), rows that it lets through
    (`candidate`); bytes are always those of the plain rows.
    """

    bags: Curve
    union: Curve
    dense: Curve
    plain: Curve
    screen: Curve
    candidate: Curve

    def __post_init__(self) -> None:
        """Raises: ConfigError: the curves are of different numbers of tokens."""
        curves = (self.bags, self.union, self.dense, self.plain, self.screen, self.candidate)
        if len({tuple(at for at, _ in curve.points) for curve in curves}) > 1:
            raise ConfigError("the curves of a format's neurons must be of the same numbers of tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuRates:
    """One GPU: bytes, bytes/s and seconds.

    `layer_s` is what a layer takes besides products and attention: its norms, activations and the launches of a
    recorded step. `launch_s` is what the host takes to launch a layer of a prompt's chunk, kernel by kernel.
    """

    name: str
    memory_bytes: int
    read_bytes_per_s: float
    products: Products
    attention_bytes_per_s: float
    layer_s: float
    launch_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuRates:
    """The processor and its DRAM: bytes/s and seconds.

    `read_bytes_per_s` is by threads, `attention_bytes_per_s` of K and V by their format. `layer_s` is as a GPU's, where
    the CPU is the accelerator; `step_s` and `request_s` are scheduling and sampling, of a step and for each request.
    `tiles_from` is from how many tokens on matrix tiles multiply weights of a 4-bit format faster than vectors, None
    where they never do; it has no format without tiles. `neurons` is by format. Data sheets know neither.
    """

    name: str
    num_threads: int
    read_bytes_per_s: Curve
    products: Products
    attention_bytes_per_s: Mapping[str, float]
    layer_s: float
    step_s: float
    request_s: float
    tiles_from: Mapping[str, int | None] = field(default_factory=dict)
    neurons: Mapping[str, NeuronRates] = field(default_factory=dict)

    @property
    def dram_bytes_per_s(self) -> float:
        """What all threads read."""
        return self.read_bytes_per_s.at(self.num_threads)

    def attention_rate(self, kv_format: str) -> float:
        """Bytes/s of K and V that attention reads.

        Raises:
            ConfigError: there is no rate for that format.
        """
        rate = self.attention_bytes_per_s.get(kv_format)
        if rate is None:
            known = ", ".join(self.attention_bytes_per_s)
            raise ConfigError(
                f"the machine's profile has no rate for attention over {kv_format} keys (it has {known}): choose "
                f"another `kv_dtype`, or measure this machine with `ambidex calibrate`"
            )
        return rate


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkRates:
    """Between DRAM and GPU memory: bytes/s and seconds.

    `beside_bytes_per_s`: what DRAM gives in all while threads read it and copies to the GPU run. `handover_s`: from the
    GPU to the CPU and back within a layer, of a small piece.
    """

    name: str
    to_gpu_bytes_per_s: float
    from_gpu_bytes_per_s: float
    beside_bytes_per_s: float
    handover_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRates:
    """The memory of one NUMA node, read by all threads wherever they run: bytes/s and seconds.

    `latency_s` is one read that needs the one before; None: it could not be measured. `to_gpu_bytes_per_s` None:
    there is no GPU, or the driver does not pin its memory.
    """

    node_id: int
    is_memory_only: bool
    read_bytes_per_s: float
    latency_s: float | None
    to_gpu_bytes_per_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareProfile:
    """A machine. Without a GPU the accelerator is the CPU: `gpu` and `link` are None.

    `nodes` are its NUMA nodes as far as they were measured.
    `machine` is None where rates come from data sheets; `date` (UTC) and `source` say when and how they were got.
    """

    machine: Machine | None
    date: str
    source: str
    cpu: CpuRates
    gpu: GpuRates | None = None
    link: LinkRates | None = None
    nodes: tuple[NodeRates, ...] = ()

    def __post_init__(self) -> None:
        if (self.gpu is None) != (self.link is None):
            raise ConfigError("a profile has rates of a GPU or of a link, but not of both: measure it again")

    def check_machine(self, machine: Machine) -> None:
        """Refuse to answer for another machine.

        Raises:
            ConfigError: it is another one; says what differs and how to measure this one.
        """
        if self.machine is None:
            return
        was, now = self.machine, machine
        found = [(name, getattr(was, name), getattr(now, name)) for name in ("cpu", "cores", "gpu")]
        changed = [f"{name} {old or 'none'} there, {new or 'none'} here" for name, old, new in found if old != new]
        if changed:
            raise ConfigError(
                f"the profile of {self.date} was measured on other hardware ({'; '.join(changed)}): measure this "
                f"machine with `ambidex calibrate`, or name presets (--gpu, --cpu, --link)"
            )
