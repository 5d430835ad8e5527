"""What a step takes at least: bytes over measured rates for decode, operations over a measured rate for prefill.

A floor is a claim about the machine, not about this engine: no exact implementation that keeps weights and KV in these
formats, where they lie, goes below it.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ambidex.core.dtypes import DType
from ambidex.core.ids import Lane
from ambidex.core.model_spec import ModelSpec
from ambidex.cost.terms import visible_pairs
from ambidex.layers.embedding import Embedding
from ambidex.layers.linear import Linear
from ambidex.models.quantized import count_weights_bytes, find_kept
from ambidex.models.registry import build_model
from ambidex.runner.device import TORCH_DTYPES, activation_dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWeights:
    """Weights of a model as steps use them.

    `num_bytes` are read by each step: all but embedding tables, of which a step reads a row a token (a table that is
    also the output matrix counts). `num_params` are multiplied with every token, `num_output_params` (the output
    matrix) only with tokens that are sampled from.
    """

    num_bytes: int
    num_params: int
    num_output_params: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBytes:
    """Bytes that one decode step moves: weights, KV by lane of attention, and what else crosses the link."""

    weights: int
    kv: Mapping[Lane, int]
    link: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Bytes/s, measured; `gpu` and `link` (pinned copies, the slower way) are None where the accelerator is the CPU."""

    dram: float
    gpu: float | None = None
    link: float | None = None

    def best(self, other: "Rates") -> "Rates":
        """The larger of each: others who use the machine only lower a rate, and a floor is what it can do alone."""
        return Rates(
            dram=max(self.dram, other.dram),
            gpu=None if self.gpu is None or other.gpu is None else max(self.gpu, other.gpu),
            link=None if self.link is None or other.link is None else max(self.link, other.link),
        )


def step_weights(spec: ModelSpec, dtype: DType, device: torch.device, *, keeps_quantized: bool = False) -> StepWeights:
    """Count the weights of a model on a skeleton without storage, quantised ones as stored if they are kept so."""
    skeleton = build_model(
        spec,
        device=torch.device("meta"),
        dtype=TORCH_DTYPES[dtype],
        activation_dtype=TORCH_DTYPES[activation_dtype(dtype, device)],
    )
    looked_up = {id(module.weight) for module in skeleton.modules() if isinstance(module, Embedding)}
    multiplied = {id(module.weight) for module in skeleton.modules() if isinstance(module, Linear)}
    read = [p for p in skeleton.parameters() if id(p) in multiplied or id(p) not in looked_up]
    sizes = count_weights_bytes(skeleton, find_kept(spec) if keeps_quantized else {})
    width = spec.opt.word_embed_dim if spec.opt is not None else spec.hidden_size
    output = spec.vocab_size * width
    return StepWeights(
        num_bytes=sum(sizes[p] for p in read),
        num_params=sum(p.numel() for p in read if p.dim() == 2) - output,
        num_output_params=output,
    )


def link_bytes(spec: ModelSpec, *, batch: int, kv_in_dram: int, moved: int, number_bytes: int) -> int:
    """Bytes that cross the link in one decode step: queries and answers of the CPU lane, and moved blocks.

    Formula: batch · layers · Hq · (D · number_bytes + 4 · (D + 1)) if any key lies in DRAM, else 0, plus `moved`.
    An answer is `out` and `lse` in fp32.
    """
    row = spec.num_q_heads * (spec.head_dim * number_bytes + 4 * (spec.head_dim + 1))
    return (batch * spec.num_layers * row if kv_in_dram else 0) + moved


def decode_floor(step: StepBytes, rates: Rates) -> dict[str, float]:
    """Seconds that each lane needs for its bytes; the floor of the step is the largest.

    Formula on a GPU, whose lanes work side by side:
        gpu    (weights + KV in GPU memory) / GPU read rate
        cpu    KV in DRAM / DRAM read rate
        link   (bytes across the link + KV in DRAM that the stream lane reads) / copy rate
    Where the accelerator is the CPU all lies in one memory and is read one after the other:
        dram   (weights + KV of both tiers) / DRAM read rate
    """
    if rates.gpu is None or rates.link is None:
        return {"dram": (step.weights + sum(step.kv.values())) / rates.dram}
    return {
        "gpu": (step.weights + step.kv.get(Lane.GPU, 0)) / rates.gpu,
        "cpu": step.kv.get(Lane.CPU, 0) / rates.dram,
        "link": (step.link + step.kv.get(Lane.STREAM, 0)) / rates.link,
    }


def prefill_flops(spec: ModelSpec, weights: StepWeights, *, num_tokens: int) -> int:
    """Floating-point operations that the prefill of one prompt needs, counting a multiply-add as two.

    Formula: 2 · params · tokens, plus 2 · output params for the one token that is sampled from, plus, for each layer,
    4 · Hq · D · (pairs of query and visible key): a multiply-add for the score and one for the value.
    """
    pairs = sum(visible_pairs(num_tokens, window) for window in spec.windows)
    attention = 4 * spec.num_q_heads * spec.head_dim * pairs
    return 2 * weights.num_params * num_tokens + 2 * weights.num_output_params + attention


def prefill_floor(flops: int, weights: StepWeights, *, num_steps: int, flops_per_s: float, bytes_per_s: float) -> float:
    """Seconds that the prefill of one prompt takes at least.

    Formula: the larger of operations / GEMM rate and, its `num_steps` chunks each reading the weights once, weights'
    bytes · steps / read rate.
    """
    return max(flops / flops_per_s, num_steps * weights.num_bytes / bytes_per_s)
