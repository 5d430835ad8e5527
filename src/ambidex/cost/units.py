"""`StepUnits`: what each part of a model costs on each lane, for one workload on one machine. Predictions and solver
both take their numbers from here, so that what is solved is what is predicted."""

from dataclasses import dataclass, fields
from typing import Final

from ambidex.core.dtypes import DType
from ambidex.core.ids import KVPart
from ambidex.core.kv_dtypes import KVDTypes
from ambidex.core.kv_spec import KVOrder, KVSpec
from ambidex.core.model_spec import ModelSpec
from ambidex.cost import terms
from ambidex.cost.weights import ModelWeights
from ambidex.cost.workload import Workload
from ambidex.hw.profile import Curve, HardwareProfile

BLOCK_SIZE: Final = 64
"""Tokens of a KV block: the engine's default."""
LEAST_GPU_BLOCKS: Final = 3
"""Of each request on the accelerator: the first block, the newest whole one and the one that is being filled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Coefficients:
    """Factors on seconds, by which a machine differs from its profile; the tuner corrects them from measured steps."""

    gpu_weights: float = 1.0
    gpu_attention: float = 1.0
    cpu_weights: float = 1.0
    cpu_attention: float = 1.0
    link: float = 1.0
    fixed: float = 1.0

    def as_tuple(self) -> tuple[float, ...]:
        """In the order of the fields."""
        return tuple(getattr(self, item.name) for item in fields(self))


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerUnits:
    """A layer: bytes, and seconds of the whole of a group on a lane. `kv` is for all visible tokens of all requests."""

    attention_bytes: int
    mlp_bytes: int
    gpu_attention_s: float
    gpu_mlp_s: float
    gpu_kv_s: float
    cpu_attention_s: float
    cpu_mlp_s: float
    cpu_kv_s: float
    kv_bytes: int
    """Of visible keys and values, as DRAM keeps them."""
    cpu_mlp_read: float = 1.0
    """Share of its part of the MLP that the CPU reads: the rest are neurons that are left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepUnits:
    """A decode step. Without a GPU (`has_link` False) the accelerator is the CPU and everything lies with it."""

    layers: tuple[LayerUnits, ...]
    head_bytes: int
    gpu_head_s: float
    cpu_head_s: float
    fixed_s: float
    """Scheduling, sampling, norms and activations: on the GPU's path, whatever the placement."""
    attention_handover_s: float
    """Of q, k, v and of the output projection together."""
    kv_handover_s: float
    mlp_handover_s: float
    head_handover_s: float
    link_s_per_byte: float
    beside_s_per_byte: float
    copies_share: float
    """Of what DRAM gives in all, that copies alone take."""
    kv_gpu_bytes: int
    """Memory of all tokens of all requests, if they lie on the GPU."""
    kv_dram_bytes: int
    least_kv_on_gpu: float
    """Share of the tokens that must lie on the accelerator."""
    batch: int
    has_link: bool

    @property
    def accelerator(self) -> str:
        """What computes beside the CPU lane."""
        return "GPU" if self.has_link else "CPU"


def kv_specs(
    spec: ModelSpec, *, dtype: DType, kv_dtypes: KVDTypes | None, has_gpu: bool = True
) -> tuple[KVSpec, KVSpec]:
    """The KV cache as the accelerator's tier keeps it and as DRAM does, in tile order. GPU memory has rows in the
    format of activations; without a GPU both are alike."""
    plain = dtype if dtype is not DType.INT8 else DType.FP16
    host = KVSpec.of(spec, dtype=kv_dtypes or plain, block_size=BLOCK_SIZE, order=KVOrder.TILES)
    return KVSpec.of(spec, dtype=plain, block_size=BLOCK_SIZE) if has_gpu else host, host


def most_streamed(spec: ModelSpec, gpu_kv: KVSpec, host_kv: KVSpec, *, step_blocks: int, num_blocks: int) -> float:
    """Share of all keys that may travel to the GPU in a decode step: what its buffers hold, and none where the lane
    cannot serve (`attention/streamed.py`).

    Args:
        step_blocks: of one layer and all requests that a step's buffer holds; num_blocks: that there are.
    """
    is_read_as_is = host_kv.dtypes == gpu_kv.dtypes and host_kv.dtype.num_bits == 16
    can_stream = (
        (is_read_as_is or host_kv.dtype.has_scales) and set(spec.windows) == {None} and spec.alibi_slopes is None
    )
    return min(1.0, step_blocks / num_blocks) if can_stream else 0.0


def make_units(
    spec: ModelSpec,
    weights: ModelWeights,
    profile: HardwareProfile,
    workload: Workload,
    *,
    dtype: DType,
    coefficients: Coefficients | None = None,
    mlp_reads: Curve | None = None,
) -> StepUnits:
    """Work out the units.

    Args:
        dtype: format of activations, and of K and V on the accelerator.
        mlp_reads: shares of an MLP's bytes that the CPU lane reads, by tokens; None: it leaves out no neurons. It never
            does of quantised matrices.
    Raises:
        ConfigError: the profile has no rate for a format.
    """
    factor = coefficients or Coefficients()
    gpu_kv, host_kv = kv_specs(spec, dtype=dtype, kv_dtypes=workload.kv_dtypes, has_gpu=profile.gpu is not None)
    batch, cpu = workload.batch, profile.cpu
    accelerator = profile.gpu or cpu
    cpu_kv_s = _cpu_attention_s(host_kv, profile)
    gpu_kv_s = cpu_kv_s
    if profile.gpu is not None:
        gpu_kv_s = terms.attention_s(gpu_kv.bytes_per_token_layer, profile.gpu.attention_bytes_per_s)
    layers = []
    for layer, window in zip(weights.layers, spec.windows, strict=True):
        tokens = batch * terms.visible_tokens(workload.context, window)
        is_sparse = mlp_reads is not None and layer.mlp.is_plain and profile.link is not None
        read = mlp_reads.at(batch) if mlp_reads is not None and is_sparse else 1.0
        layers.append(
            LayerUnits(
                attention_bytes=layer.attention.num_bytes,
                mlp_bytes=layer.mlp.num_bytes,
                gpu_attention_s=factor.gpu_weights
                * terms.product_s(layer.attention, accelerator.products, num_tokens=batch),
                gpu_mlp_s=factor.gpu_weights * terms.product_s(layer.mlp, accelerator.products, num_tokens=batch),
                gpu_kv_s=factor.gpu_attention * (tokens * gpu_kv_s),
                cpu_attention_s=factor.cpu_weights * terms.product_s(layer.attention, cpu.products, num_tokens=batch),
                cpu_mlp_s=factor.cpu_weights * read * terms.product_s(layer.mlp, cpu.products, num_tokens=batch),
                cpu_kv_s=factor.cpu_attention * (tokens * cpu_kv_s),
                kv_bytes=tokens * host_kv.bytes_per_token_layer,
                cpu_mlp_read=read,
            )
        )
    num_tokens = batch * gpu_kv.num_blocks(workload.context) * BLOCK_SIZE
    return StepUnits(
        layers=tuple(layers),
        head_bytes=weights.head.num_bytes,
        gpu_head_s=factor.gpu_weights * terms.product_s(weights.head, accelerator.products, num_tokens=batch),
        cpu_head_s=factor.cpu_weights * terms.product_s(weights.head, cpu.products, num_tokens=batch),
        fixed_s=factor.fixed
        * (terms.step_s(cpu.step_s, cpu.request_s, batch=batch) + spec.num_layers * accelerator.layer_s),
        kv_gpu_bytes=num_tokens * gpu_kv.bytes_per_token,
        kv_dram_bytes=num_tokens * host_kv.bytes_per_token,
        least_kv_on_gpu=min(1.0, batch * LEAST_GPU_BLOCKS * BLOCK_SIZE / num_tokens),
        batch=batch,
        has_link=profile.link is not None,
        **_link_units(spec, profile, batch=batch, number_bytes=dtype.num_bytes, factor=factor),
    )


def _cpu_attention_s(kv: KVSpec, profile: HardwareProfile) -> float:
    """Seconds in which the CPU attends over a token of one layer: K and V at the rates of their formats."""
    return sum(
        terms.attention_s(kv.part_bytes_per_token_layer(part), profile.cpu.attention_rate(kv.dtypes.of(part).value))
        for part in KVPart
    )


def _link_units(
    spec: ModelSpec, profile: HardwareProfile, *, batch: int, number_bytes: int, factor: Coefficients
) -> dict[str, float]:
    link = profile.link
    names = ("attention_handover_s", "kv_handover_s", "mlp_handover_s", "head_handover_s", "link_s_per_byte",
             "beside_s_per_byte", "copies_share")  # fmt: skip
    if link is None:
        return dict.fromkeys(names, 0.0)
    width, heads = spec.hidden_size, spec.num_q_heads * spec.head_dim
    qkv = heads + 2 * spec.num_kv_heads * spec.head_dim

    def handover(there: int, back: int) -> float:
        return factor.fixed * terms.handover_s(
            link, num_tokens=batch, num_there=there, num_back=back, number_bytes=number_bytes
        )

    copies = factor.link / link.to_gpu_bytes_per_s
    return dict(
        zip(
            names,
            (
                handover(width, qkv) + handover(heads, width),
                handover(heads, heads + spec.num_q_heads),
                handover(width, width),
                handover(width, spec.vocab_size),
                copies,
                1.0 / link.beside_bytes_per_s,
                min(1.0, 1.0 / (copies * link.beside_bytes_per_s)),
            ),
            strict=True,
        )
    )
