"""The terms of a step's time, one function each: bytes, operations and rates → seconds."""

from typing import Final

from ambidex.cost.weights import WeightGroup
from ambidex.hw.profile import LinkRates, Products

RESULT_BYTES: Final = 4
"""Of a number of a partial result on its way from the CPU: sums are fp32."""


def product_s(group: WeightGroup, rates: Products, *, num_tokens: int) -> float:
    """Products of all matrices of a group with `num_tokens` tokens, on one lane.

    Formula: Σ over formats of bytes / (bytes of weights/s of that format at so many tokens): with few tokens the rate
    at which weights are read (GEMV), with many that of operations (GEMM).
    Raises:
        ConfigError: the profile has no rate for a format.
    """
    return sum(part.num_bytes / rates.bytes_per_s(part.kind, num_tokens) for part in group.parts)


def attention_s(kv_bytes: float, bytes_per_s: float) -> float:
    """Attention of decode steps over keys and values, on one lane. Formula: bytes / rate at which attention reads."""
    return kv_bytes / bytes_per_s


def copy_s(num_bytes: float, bytes_per_s: float) -> float:
    """Weights, keys and values that travel to the GPU. Formula: bytes / rate of large pinned copies."""
    return num_bytes / bytes_per_s


def handover_s(link: LinkRates, *, num_tokens: int, num_there: int, num_back: int, number_bytes: int) -> float:
    """From the GPU to the CPU and back within a layer, beside what the CPU computes.

    Args:
        num_there: numbers of a token that the CPU needs, each of `number_bytes`; num_back: that it answers with, fp32.
    Formula: the handover of a small piece + bytes there / rate + bytes back / rate.
    """
    there = num_tokens * num_there * number_bytes / link.from_gpu_bytes_per_s
    back = num_tokens * num_back * RESULT_BYTES / link.to_gpu_bytes_per_s
    return link.handover_s + there + back


def dram_s(read_bytes: float, copied_bytes: float, link: LinkRates, *, idle_s: float) -> float:
    """The least time of a step by what DRAM gives, to the CPU's threads and to copies at once.

    Args:
        read_bytes: by the CPU's threads; copied_bytes: to the GPU; idle_s: seconds of the step in which they do not
            read, in which copies alone run.
    Formula: T = idle + rest, rest ≥ (read + copied − idle · copy rate) / rate of both together.
    """
    share = min(1.0, link.to_gpu_bytes_per_s / link.beside_bytes_per_s)
    return idle_s * (1.0 - share) + (read_bytes + copied_bytes) / link.beside_bytes_per_s


def step_s(step: float, request: float, *, batch: int) -> float:
    """Scheduling and sampling of a step. Formula: of a step + of each request."""
    return step + batch * request


def visible_tokens(context: int, window: int | None) -> int:
    """Keys that the query of a decode step sees in a layer with a sliding window or without."""
    return context if window is None else min(context, window)


def visible_pairs(num_tokens: int, window: int | None) -> int:
    """Pairs of a query and a key that it sees, in a causal context of so many tokens."""
    if window is None or window >= num_tokens:
        return num_tokens * (num_tokens + 1) // 2
    return window * (window + 1) // 2 + (num_tokens - window) * window
