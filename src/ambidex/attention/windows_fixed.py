"""`WindowAttention`: the attention of a decode step of fixed form over the first keys of a request and the newest,
which stand side by side.

    gap   keys between both, which nobody attends: the first ones are scored by the query turned back by so many
          positions, which is as if they had been turned on by them

The step's own key is near, all others lie in host memory. All layers do so, and the CPU has no part in it.
"""

from torch import Tensor

from ambidex.attention.near_rows import Angles, NearRows
from ambidex.kernels import api
from ambidex.kernels.early_rows import EarlyRows, WindowRows


class WindowAttention:
    """What `models.base.AttentionOp` asks for, for one new token a row; its launches do not depend on the context.

    Args:
        near: near rows of all requests.
        rows, windows: the requests of a step of B rows.
        inv_freq: of rotary positions, fp32 on the device; None: positions are others, and stay what they were.
        scale: factor of q·k.
    """

    def __init__(
        self, near: NearRows, rows: EarlyRows, windows: WindowRows, inv_freq: Tensor | None, *, scale: float
    ) -> None:
        self._near = near
        self._rows = rows
        self._windows = windows
        self._scale = scale
        self._back: Angles | None = None
        if inv_freq is not None:
            angles = windows.gap.float()[:, None] * inv_freq  # [B, D / 2]
            self._back = (angles.cos(), -angles.sin())

    def attend(self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor, *, angles: Angles | None = None) -> Tensor:
        """Rotate q and k, put k and v among the near rows, and attend.

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
        sink_q = turned if self._back is None else api.rotate(turned, *self._back)
        return api.attend_windows(
            turned, sink_q, near_k, near_v, self._rows, self._windows, layer_idx=layer_idx, scale=self._scale
        )
