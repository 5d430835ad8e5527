"""The predicted time of a prompt, chunk by chunk.

Weights that are not in GPU memory travel to it for each chunk, whose products the GPU then does. Of a chunk of few
tokens the CPU may do those of its share, if that is predicted to be shorter; `how` names who does.

A chunk is launched kernel by kernel, so the host is a lane, too: layers · seconds of a layer's launches · WITH_DRAM
where keys lie in DRAM. Keys and values that are to lie there are laid out by a kernel that writes them over the link,
which is part of the GPU's time.
"""

from dataclasses import dataclass
from typing import Final

from ambidex.core.dtypes import DType
from ambidex.core.model_spec import ModelSpec
from ambidex.core.placement import Placement, WeightSplit
from ambidex.cost import terms
from ambidex.cost.units import kv_specs
from ambidex.cost.weights import ModelWeights, WeightGroup
from ambidex.cost.workload import KVShares, Workload
from ambidex.hw.profile import HardwareProfile

ATTENTION_FLOPS: Final = 0.43
"""Of the GEMM's operations/s: attention of a chunk. Fitted together with the next to the two runs of prefill_gpu whose
keys all lie on the GPU (8K and 32K tokens, chunks of 2,048)."""
MOST_CPU_TOKENS: Final = 128
"""Of a chunk in which the CPU multiplies; of larger ones all weights travel (`mlp/rates.py`)."""
WITH_DRAM: Final = 2.0
"""Times as many launches of a layer whose keys lie on both tiers (docs/measured.md)."""
PASSES: Final = 140
"""Over a token's hidden state in a layer, by all that is neither product nor attention, read at the memory's rate."""
LAUNCHES: Final = "the host's launches"


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillPrediction:
    """Seconds of a prompt; `how` says where the CPU's share of weights is multiplied, `binds` what is waited for."""

    seconds: float
    num_tokens: int
    how: str
    binds: str

    @property
    def tokens_per_s(self) -> float:
        """Of the prompt."""
        return self.num_tokens / self.seconds


@dataclass(frozen=True, slots=True)
class _Chunk:
    gpu_s: float
    cpu_s: float
    link_s: float
    host_s: float = 0.0

    @property
    def seconds(self) -> float:
        return max(self._lanes().values())

    @property
    def binds(self) -> str:
        lanes = self._lanes()
        return max(lanes, key=lambda lane: lanes[lane])

    def _lanes(self) -> dict[str, float]:
        return {"GPU": self.gpu_s, "link": self.link_s, "CPU": self.cpu_s, LAUNCHES: self.host_s}


def predict_prefill(
    spec: ModelSpec,
    weights: ModelWeights,
    profile: HardwareProfile,
    workload: Workload,
    placement: Placement,
    kv: KVShares,
    *,
    dtype: DType,
) -> PrefillPrediction:
    """Predict one prompt of `workload.prompt` tokens, computed in chunks.

    Args:
        dtype: format of activations.
    Raises:
        ConfigError: the profile has no rate for a format.
    """
    total, waits, ways = 0.0, dict.fromkeys(("GPU", "CPU", "link", LAUNCHES), 0.0), set()
    for start in range(0, workload.prompt, workload.chunk):
        num = min(workload.chunk, workload.prompt - start)
        found = {
            way: _predict_chunk(
                spec, weights, profile, workload, placement, kv, start=start, num=num, streams=streams, dtype=dtype
            )
            for way, streams in (("the GPU, over the link", True), ("the CPU", False))
            if (streams and profile.link is not None)
            or (not streams and (profile.link is None or num <= MOST_CPU_TOKENS))
        }
        way = min(found, key=lambda name: found[name].seconds)
        ways.add(way)
        chunk = found[way]
        waits[chunk.binds] += chunk.seconds
        total += chunk.seconds + profile.cpu.step_s
    needs_way = any(split.on_cpu > 0 for split in placement.splits())
    binds = max(waits, key=lambda lane: waits[lane])
    return PrefillPrediction(
        seconds=total,
        num_tokens=workload.prompt,
        how=" or ".join(sorted(ways)) if needs_way else "the GPU" if profile.gpu is not None else "the CPU",
        binds=binds if profile.gpu is not None else "CPU",
    )


def _predict_chunk(
    spec: ModelSpec,
    weights: ModelWeights,
    profile: HardwareProfile,
    workload: Workload,
    placement: Placement,
    kv: KVShares,
    *,
    start: int,
    num: int,
    streams: bool,
    dtype: DType,
) -> _Chunk:
    accelerator, link = profile.gpu or profile.cpu, profile.link
    kind = dtype.value if dtype.value in accelerator.products.curves else next(iter(accelerator.products.curves))
    attention_rate = ATTENTION_FLOPS * accelerator.products.flops_per_s(kind)
    pairs = sum(terms.visible_pairs(start + num, w) - terms.visible_pairs(start, w) for w in spec.windows)
    read_rate = profile.gpu.read_bytes_per_s if profile.gpu is not None else profile.cpu.dram_bytes_per_s
    gpu_s = (
        4 * spec.num_q_heads * spec.head_dim * pairs / attention_rate
        + PASSES * spec.num_layers * num * spec.hidden_size * dtype.num_bytes / read_rate
    )
    cpu_s, streamed = 0.0, 0.0
    groups = [(group, split, num) for group, split in _splits(weights, placement)]
    groups.append((weights.head, placement.head, 1))
    for group, split, tokens in groups:
        moved = split.streamed + (split.on_cpu if streams else 0.0)
        gpu_s += (split.on_gpu + moved) * terms.product_s(group, accelerator.products, num_tokens=tokens)
        streamed += moved * group.num_bytes
        if split.on_cpu and not streams:
            cpu_s += split.on_cpu * terms.product_s(group, profile.cpu.products, num_tokens=tokens)
    if link is None or profile.gpu is None:
        return _Chunk(gpu_s, cpu_s, 0.0)
    _, host_kv = kv_specs(spec, dtype=dtype, kv_dtypes=workload.kv_dtypes)
    away = 1.0 - kv.on_gpu
    streamed += away * start * host_kv.bytes_per_token
    gpu_s += terms.copy_s(away * num * host_kv.bytes_per_token, link.from_gpu_bytes_per_s)
    host_s = spec.num_layers * profile.gpu.launch_s * (WITH_DRAM if away else 1.0)
    return _Chunk(gpu_s, cpu_s, terms.copy_s(streamed, link.to_gpu_bytes_per_s), host_s)


def _splits(weights: ModelWeights, placement: Placement) -> list[tuple[WeightGroup, WeightSplit]]:
    return [
        pair
        for layer, where in zip(weights.layers, placement.layers, strict=True)
        for pair in ((layer.attention, where.attention), (layer.mlp, where.mlp))
    ]
