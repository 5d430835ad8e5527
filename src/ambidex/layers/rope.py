"""Rotary positions: how fast each pair of a head's dimensions turns, and the angles at given positions.

A model computes `cos` and `sin` once a step and hands them to its layers, which call `kernels.api.rotate`. There is no
table over all positions: at 1M tokens it would take half a gigabyte, and the angles of a step's T tokens cost nothing.
"""

import math
from collections.abc import Callable
from typing import assert_never

import torch
from torch import Tensor, nn

from ambidex.core.model_spec import RopeScaling, RopeScalingKind, RopeSpec


class RotaryEmbedding(nn.Module):
    """Angles of rotary positions (half-split order: dimension i turns with i + dim/2).

    Source: arXiv:2104.09864, section 3.2.2.
    """

    __call__: Callable[..., tuple[Tensor, Tensor]]
    inv_freq: Tensor

    def __init__(self, rope: RopeSpec, device: torch.device) -> None:
        super().__init__()
        # Computed on the CPU, so that every device turns by the same angles to the last bit.
        self.register_buffer("inv_freq", compute_inv_freq(rope).to(device), persistent=False)  # [dim/2] fp32
        self.attention_factor = compute_attention_factor(rope.scaling)

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Positions [T] int64 → cos, sin, each [T, dim/2] fp32, both times the attention factor (yarn)."""
        angles = positions.to(torch.float32)[:, None] * self.inv_freq
        return angles.cos() * self.attention_factor, angles.sin() * self.attention_factor


def compute_inv_freq(rope: RopeSpec) -> Tensor:
    """Radians that each pair of dimensions turns in one token, [dim/2] fp32, after factors and scaling."""
    inv_freq = 1.0 / rope.theta ** (torch.arange(0, rope.dim, 2, dtype=torch.float32) / rope.dim)
    if rope.freq_factors is not None:
        inv_freq = inv_freq / torch.tensor(rope.freq_factors, dtype=torch.float32)
    scaling = rope.scaling
    if scaling is None:
        return inv_freq
    match scaling.kind:
        case RopeScalingKind.LINEAR:
            return inv_freq / scaling.factor
        case RopeScalingKind.LLAMA3:
            return _stretch_llama3(inv_freq, scaling)
        case RopeScalingKind.YARN:
            return _stretch_yarn(inv_freq, rope, scaling)
        case _:
            assert_never(scaling.kind)


def compute_attention_factor(scaling: RopeScaling | None) -> float:
    """What cos and sin are multiplied by: 1 but for yarn. Source: arXiv:2309.00071, equation 22."""
    if scaling is None or scaling.kind is not RopeScalingKind.YARN:
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    return 0.1 * math.log(scaling.factor) + 1.0 if scaling.factor > 1 else 1.0


def _stretch_llama3(inv_freq: Tensor, scaling: RopeScaling) -> Tensor:
    """Keep what turns often within the original context, stretch what turns seldom, blend between.

    Source: Llama 3.1 release, `apply_scaling`.
    """
    num_turns = scaling.original_context_len * inv_freq / (2 * math.pi)  # within the original context
    kept = (num_turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    return _blend(inv_freq / scaling.factor, inv_freq, kept.clamp(0, 1))


def _stretch_yarn(inv_freq: Tensor, rope: RopeSpec, scaling: RopeScaling) -> Tensor:
    """The same idea with a ramp over the index of the dimension. Source: arXiv:2309.00071, section 3.2."""

    def index_of(num_turns: float) -> float:
        """Index of the (fractional) dimension pair that turns so often within the original context."""
        turns_of_first = scaling.original_context_len / (2 * math.pi)
        return rope.dim * math.log(turns_of_first / num_turns) / (2 * math.log(rope.theta))

    low = max(math.floor(index_of(scaling.beta_fast)), 0)
    high = min(math.ceil(index_of(scaling.beta_slow)), rope.dim - 1)
    width = max(high - low, 0.001)  # a ramp of no width is a step
    stretched = (torch.arange(rope.dim // 2, dtype=torch.float32) - low) / width
    return _blend(inv_freq / scaling.factor, inv_freq, 1 - stretched.clamp(0, 1))


def _blend(stretched: Tensor, kept: Tensor, share_kept: Tensor) -> Tensor:
    return (1 - share_kept) * stretched + share_kept * kept
