"""`TieredAttention`: exact attention over keys that lie on several tiers, each attended by its own lane."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from ambidex.attention.cpu import CPULane
from ambidex.attention.gpu import GPULane
from ambidex.attention.metadata import NewRows, WindowView, build_step
from ambidex.attention.state import AttentionState, merge
from ambidex.core.errors import ShapeError
from ambidex.core.ids import Lane, Tier
from ambidex.core.model_spec import ModelSpec
from ambidex.core.step import ScheduledRequest
from ambidex.kernels import api
from ambidex.storage.kv_pool import KVPool


class TieredAttention:
    """The attention of one model over the pools of both tiers; what `models.base.AttentionOp` asks for.

    A step is `begin(requests)`, then `attend` once for each layer; `lane_bytes` then says what was read.

    Args:
        spec: heads, windows and head_dim (the scale is head_dim ** -0.5).
        pools: `Tier.GPU`, the accelerator's, and `Tier.DRAM`, in host memory; either may have zero blocks.
    """

    def __init__(self, spec: ModelSpec, pools: Mapping[Tier, KVPool]) -> None:
        scale = spec.head_dim**-0.5
        self._windows = spec.windows
        self._pools = {tier: pools[tier] for tier in (Tier.GPU, Tier.DRAM)}
        self._kv_spec = pools[Tier.GPU].spec
        self._gpu = GPULane(pools[Tier.GPU], scale=scale)
        self._cpu = CPULane(pools[Tier.DRAM], scale=scale)
        self.begin(())

    @property
    def lane_bytes(self) -> Mapping[Lane, int]:
        """Bytes of visible K and V that each lane read since `begin`; the step's own keys count for the GPU lane."""
        return dict(self._lane_bytes)

    def begin(self, requests: Sequence[ScheduledRequest]) -> None:
        """Prepare for a step whose T tokens are those of `requests`, in their order.

        Raises:
            InternalError: the blocks of a request do not cover its tokens, or lie on a tier without a pool.
        """
        self._lane_bytes = dict.fromkeys(Lane, 0)
        self._step = build_step(
            requests,
            block_size=self._kv_spec.block_size,
            windows=self._windows,
            devices={tier: pool.device for tier, pool in self._pools.items()},
        )

    def attend(self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend over the old keys on both tiers and the step's own; then store K and V in their slots.

        NOTE: reads never touch the slots of the step, so storing last is safe.

        Args:
            q: [T, Hq, D]; k, v: [T, Hkv, D], on the accelerator, in the dtype of the pools.
        Returns:
            [T, Hq, D] in the dtype of q.
        Raises:
            ShapeError: T is not what `begin` was told, or the tensors do not fit the pools.
        Cost: on CUDA, waits for q if the step has old keys in DRAM.
        """
        if q.shape[0] != self._step.num_tokens:
            raise ShapeError(f"q: expected T={self._step.num_tokens} tokens of this step, got {q.shape[0]}")
        view = self._step.views[self._windows[layer_idx]]
        gpu_parts, cpu_parts = view.old[Tier.GPU], view.old[Tier.DRAM]
        pending = self._cpu.begin(layer_idx, q, cpu_parts) if cpu_parts else None
        state = self._gpu.attend_own(q, k, v, view.chunks)
        if gpu_parts:
            state = _merge_fp32(state, self._gpu.attend_old(layer_idx, q, gpu_parts))
        if pending is not None:
            state = _merge_fp32(state, pending.wait())
        for new in self._step.new_rows:
            self._store(layer_idx, new, k, v)
        self._count(view)
        return state.out.to(q.dtype)

    def _store(self, layer_idx: int, new: NewRows, k: Tensor, v: Tensor) -> None:
        pool = self._pools[new.tier]
        for part, rows in zip(pool.layer(layer_idx), (k, v), strict=True):
            chosen = rows if new.rows is None else rows[new.rows]
            api.store_rows(part, new.slots, chosen.to(pool.device))

    def _count(self, view: WindowView) -> None:
        size = self._kv_spec.bytes_per_token_layer
        self._lane_bytes[Lane.GPU] += view.num_keys[Tier.GPU] * size
        self._lane_bytes[Lane.CPU] += view.num_keys[Tier.DRAM] * size


def _merge_fp32(a: AttentionState, b: AttentionState) -> AttentionState:
    """Merge without rounding what is merged again; the sum is rounded once, at the end."""
    return merge(AttentionState(a.out.float(), a.lse), b)
