"""`ScanCheck`: computes a sample of what the native form of the bounded policy answered again over all keys, and holds
the error against the bound that was stated for it (`--verify`; docs/bounded.md).

The steps run as they do otherwise, recorded or captured; besides, each layer leaves its queries and answers in
`AnswerCopies`, which are looked at when the step has ended, while the keys lie where it read them.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ambidex.core.dtypes import DType
from ambidex.core.errors import BoundError
from ambidex.core.ids import KVPart, Tier
from ambidex.core.model_spec import ModelSpec
from ambidex.core.step import ScheduledRequest
from ambidex.storage.kv_pool import KVPool
from ambidex.storage.row_format import TORCH_DTYPES

FP32_SHARE: Final = 1e-4
"""Of the longest value: what scores and sums in fp32 take from an answer; the tests of the op allow as much."""

LARGEST_INTEGER: Final = 32512
"""Exact attention over int8 multiplies it with integers up to this one, under a factor (`csrc/ops/products-inl.h`)."""


class AnswerCopies:
    """Queries and answers of all layers of a step of B rows.

    Args:
        dtype: of the queries.

    Attributes:
        q, out: [L, B, Hq, D], rotated queries, and whole answers in fp32.
    """

    def __init__(self, spec: ModelSpec, num_rows: int, *, dtype: torch.dtype, device: torch.device) -> None:
        shape = (spec.num_layers, num_rows, spec.num_q_heads, spec.head_dim)
        self.q = torch.zeros(shape, dtype=dtype, device=device)
        self.out = torch.zeros(shape, dtype=torch.float32, device=device)

    def keep(self, layer_idx: int, q: Tensor, out: Tensor) -> None:
        """Launch: copy a layer's queries and answers, each [B, Hq, D]."""
        self.q[layer_idx].copy_(q)
        self.out[layer_idx].copy_(out)


class ScanCheck:
    """Counts answers, one for each scanned request, layer and query head of each step, and checks one of `every`.

    Args:
        spec: heads and head_dim (the scale is head_dim ** -0.5).
        pools: of both tiers.
        every: at least 1; a prime walks over the layers and heads.
        near_tier: the accelerator's, whose keys are attended exactly; None: the CPU attends those of the newest block.
    """

    def __init__(
        self, spec: ModelSpec, pools: Mapping[Tier, KVPool], *, every: int, near_tier: Tier | None = None
    ) -> None:
        self._spec = spec
        self._pools = {tier: pool for tier, pool in pools.items() if pool.num_blocks}
        self._every = every
        self._near_tier = near_tier
        self._num_seen = self._num_steps = 0

    def check(
        self,
        requests: Sequence[ScheduledRequest],
        rows: Sequence[int],
        copies: AnswerCopies,
        bounds: NDArray[np.float64],
    ) -> tuple[int, float]:
        """Check the sample of a step that has ended; no later one has begun.

        Args:
            requests: of the step.
            rows: those of them, by index, whose keys were scanned.
            copies: of the step.
            bounds: [L, B, Hq], the stated bounds on the norms of the errors.
        Returns:
            How many answers were computed again, and the largest error. Where the exact answer itself is no number,
            there is nothing to compare: the request fails by its logits.
        Raises:
            BoundError: an error is above its bound.
        Cost: waits for the device; for each answer of the sample reads K and V of one KV head to the host, in fp64.
        """
        self._num_steps += 1
        shape = (self._spec.num_layers, len(rows), self._spec.num_q_heads)
        sample = range(-self._num_seen % self._every, math.prod(shape), self._every)
        self._num_seen += math.prod(shape)
        if not sample:
            return 0, 0.0
        copied_q, copied_out = copies.q.cpu(), copies.out.cpu()
        num_verified, max_error = 0, 0.0
        for index in sample:
            layer_idx, place, head = (int(item) for item in np.unravel_index(index, shape))
            request, row = requests[rows[place]], rows[place]
            truth, rounding = self._attend_all(request, layer_idx, head, copied_q[layer_idx, row, head])
            if not bool(truth.isfinite().all()):
                continue
            error = float((copied_out[layer_idx, row, head].double() - truth).norm())
            bound = float(bounds[layer_idx, row, head])
            if not error <= bound + rounding:  # NaN is not
                raise BoundError(
                    f"scanned step {self._num_steps}, layer {layer_idx}, token {request.start} of request "
                    f"{request.request_id}, head {head}: the output differs from the exact one by {error:.6g}, the "
                    f"stated bound is {bound:.6g} (and {rounding:.3g} for rounding): a fault of this program, please "
                    f"report it; `--policy exact` does without the bound"
                )
            num_verified, max_error = num_verified + 1, max(max_error, error)
        return num_verified, max_error

    def _attend_all(self, request: ScheduledRequest, layer_idx: int, head: int, q: Tensor) -> tuple[Tensor, float]:
        """The exact answer [D] in fp64 over all keys that a request's new token sees, and what rounding may take.

        Args:
            q: [D].
        """
        k, v, is_near = self._read(request, layer_idx, head // self._spec.group_size)
        scale = self._spec.head_dim**-0.5
        scores = k @ q.double() * scale
        probs = scores.softmax(0)
        out: Tensor = probs @ v
        return out, self._rounding(request, q, k, v, probs, is_near)

    def _rounding(
        self, request: ScheduledRequest, q: Tensor, k: Tensor, v: Tensor, probs: Tensor, is_near: Tensor
    ) -> float:
        """What rounding may take from an answer, beside what the bound is of.

        Exact attention on a CPU rounds queries and weights where its keys are bf16 or int8, in the newest block alone;
        kernels on the accelerator round all their weights to the numbers of V.
        """
        lengths = v.norm(dim=1)
        rounding = FP32_SHARE * float(lengths.max())
        dtypes = self._pools[self._near_tier or request.blocks[-1].tier].spec.dtypes
        if self._near_tier is not None:
            return rounding + 2 * _unit(dtypes.v) * float(probs @ lengths)
        shifts = torch.where(is_near, k @ (_rounded(q, dtypes.k) - q.double()), 0.0) * self._spec.head_dim**-0.5
        weights = probs * shifts.exp()
        rounding += 2 * float((weights @ v / weights.sum() - probs @ v).norm())
        if dtypes.v is DType.INT8:
            return rounding + 2 * _integer_error(probs[is_near], v[is_near])
        if dtypes.v is DType.BF16:
            rounding += 2 * _unit(DType.BF16) * float(probs[is_near] @ lengths[is_near])
        return rounding

    def _read(self, request: ScheduledRequest, layer_idx: int, kv_head: int) -> tuple[Tensor, Tensor, Tensor]:
        """K and V [S, D] of a KV head in fp64 on the host, in any order, and which keys are attended exactly [S]."""
        parts: dict[KVPart, list[Tensor]] = {part: [] for part in KVPart}
        is_near: list[Tensor] = []
        num_keys, newest = request.start + 1, len(request.blocks) - 1
        for tier, pool in self._pools.items():
            size = pool.spec.block_size
            named = [(place, block.block_id) for place, block in enumerate(request.blocks) if block.tier is tier]
            places, ids = torch.tensor(named, dtype=torch.int64).view(-1, 2).unbind(1)
            offsets = torch.arange(size)
            positions = (places[:, None] * size + offsets).flatten()
            is_seen = positions < num_keys
            slots = (ids[:, None] * size + offsets).flatten()[is_seen].to(pool.device)
            heads = torch.full_like(slots, kv_head)
            for part, rows in parts.items():
                rows.append(pool.take_rows(part, layer_idx, heads, slots, torch.float32).double().cpu())
            positions = positions[is_seen]
            is_near.append((positions // size == newest) | (tier is self._near_tier))
        return torch.cat(parts[KVPart.K]), torch.cat(parts[KVPart.V]), torch.cat(is_near)


def _unit(dtype: DType) -> float:
    """The largest share of itself that a number loses when it is rounded; 0 for fp32, which is allowed for apart."""
    return 0.0 if dtype is DType.FP32 else torch.finfo(TORCH_DTYPES[dtype]).eps / 2


def _rounded(q: Tensor, dtype: DType) -> Tensor:
    """A query [D] as it is multiplied with keys on a CPU, in fp64."""
    if dtype is DType.INT8:
        step = q.double().abs().max().clamp_min(1e-30) / LARGEST_INTEGER
        return (q.double() / step).round() * step
    return q.bfloat16().double() if dtype is DType.BF16 else q.double()


def _integer_error(probs: Tensor, v: Tensor) -> float:
    """What an answer may lose where weights [S], times the scales of values [S, D] in int8, are integers."""
    scales = v.abs().amax(1) / 127
    step = float((probs * scales).max()) / LARGEST_INTEGER
    return step / 2 * float((v.norm(dim=1) / scales.clamp_min(1e-30)).sum())
