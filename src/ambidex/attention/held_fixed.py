"""`HeldAttention`: the attention of a decode step of fixed form of policies that add up what keys get, and drop those
that have least.

    attend   the step's own key, which alone is near, and of the far ones, in host memory, those that are held or recent
    add      what came of it to the sums; of the held ones the least goes

All layers do, and the CPU has no part in it. Where sums lie: see `key_sums.py`.
"""

from collections.abc import Callable, Sequence

from torch import Tensor

from ambidex.attention.near_rows import Angles, NearRows
from ambidex.kernels import api
from ambidex.kernels.early_rows import EarlyRows, SumRows, SumRule


class HeldAttention:
    """What `models.base.AttentionOp` asks for, for one new token a row; its launches do not depend on the context.

    Args:
        near: near rows of all requests.
        rows, sums: the requests of a step of B rows.
        rules: of each layer.
        num_attended: where a layer tells how many far keys each KV head attended, [B, Hkv] int32.
        max_far: far keys of a step, at most.
        scale: factor of q·k.
    """

    def __init__(
        self,
        near: NearRows,
        rows: EarlyRows,
        sums: SumRows,
        rules: Sequence[SumRule],
        *,
        num_attended: Callable[[int], Tensor],
        max_far: int,
        scale: float,
    ) -> None:
        self._near = near
        self._rows = rows
        self._sums = sums
        self._rules = rules
        self._num_attended = num_attended
        self._max_far = max_far
        self._scale = scale

    def attend(self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor, *, angles: Angles | None = None) -> Tensor:
        """Rotate q and k, put k and v among the near rows, attend, and add to the sums.

        Args:
            q: [B, Hq, D]; k, v: [B, Hkv, D], on the accelerator, in the dtype of its pool.
            angles: cos and sin; None: nothing is rotated.
        Returns:
            [B, Hq, D] in the dtype of q; 0 for padding.
        Raises:
            ShapeError: the tensors fit neither the rows nor the pool.
        """
        near_k, near_v = self._near.k[layer_idx], self._near.v[layer_idx]
        turned = api.rotate_and_store(q, k, v, near_k, near_v, self._rows.near_slots, angles=angles)
        out, lse, scores = api.attend_held(
            turned, near_k, near_v, self._rows, self._sums, max_far=self._max_far, layer_idx=layer_idx,
            scale=self._scale,
        )  # fmt: skip
        api.add_sums(
            scores, lse, self._rows, self._sums, self._rules[layer_idx], num_attended=self._num_attended(layer_idx),
            layer_idx=layer_idx,
        )  # fmt: skip
        return out
