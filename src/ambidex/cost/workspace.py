"""Bytes of the accelerator that are neither weights nor keys: activations of a step, captured graphs, buffers of keys
on their way. The engine's memory plan and the solver both count them here."""

from collections.abc import Sequence
from typing import Final

from ambidex.core.model_spec import ModelSpec
from ambidex.core.units import MIB

STEP_STREAM_SHARE: Final = 0.05
"""Of the accelerator's budget, at most, for keys that decode steps bring from DRAM: two layers' share of them."""
BYTES_PER_GRAPH: Final = 16 * MIB
"""What a captured step takes besides its tensors: the driver's nodes, some hundred launches of a few KiB each, and the
rounding of the allocator's segments. An allowance, not a measurement."""


def workspace_bytes(spec: ModelSpec, *, max_tokens: int, max_rows: int, max_context_len: int, num_bytes: int) -> int:
    """Bytes of activations that live at once, at most, in one step.

    Args:
        max_tokens: tokens of a step.
        max_rows: rows of logits of a step (running requests).
        num_bytes: bytes of a number in the compute format.
    Formula: hidden states, residual, and whichever is more: q, k, v and attention outputs in fp32 while states merge,
    or gate, up and their product; logits and their sorted fp64 copy; K and V of one request and layer, gathered.
    """
    logits = max_rows * spec.vocab_size * (4 + 4 + 8 * 4)
    gathered = 2 * 2 * max_context_len * spec.num_kv_heads * spec.head_dim * num_bytes
    return max_tokens * _activation_bytes(spec, num_bytes) + logits + gathered


def graph_bytes(spec: ModelSpec, buckets: Sequence[int], *, num_bytes: int, num_modes: int = 1) -> int:
    """Bytes that decode steps captured as graphs hold besides the workspace; 0 without buckets.

    Args:
        buckets: numbers of rows of the steps, ascending.
        num_bytes: bytes of a number in the compute format.
        num_modes: modes of a policy, each with graphs of its own.
    Formula: activations of the largest step, whose memory the smaller ones share, its logits in the compute format,
    twice in fp32, and an allowance for each graph.
    """
    if not buckets:
        return 0
    logits = spec.vocab_size * (num_bytes + 2 * 4)
    return buckets[-1] * (_activation_bytes(spec, num_bytes) + logits) + num_modes * len(buckets) * BYTES_PER_GRAPH


def _activation_bytes(spec: ModelSpec, num_bytes: int) -> int:
    """Of one token."""
    attention = 3 * (num_bytes + 4) * spec.num_q_heads * spec.head_dim
    return 4 * spec.hidden_size * num_bytes + max(3 * spec.intermediate_size * num_bytes, attention)
