"""`BoxAttention`: the attention of a decode step of fixed form over pages of keys, chosen by the boxes of their keys.

    choose   of each query head the pages with the largest bounds, and the newest
    attend   the step's own key, which alone is near, and of the far ones, in host memory, those of these pages

The first layers attend all keys. Where boxes lie: see `page_boxes.py`.
"""

from collections.abc import Callable

from torch import Tensor

from ambidex.attention.near_rows import Angles, NearRows
from ambidex.attention.ways.way import StepAttention
from ambidex.kernels import api
from ambidex.kernels.early_rows import BoxRows, EarlyRows


class BoxAttention:
    """What `models.base.AttentionOp` asks for, for one new token a row; its launches do not depend on the context.

    Args:
        near: near rows of all requests.
        rows, boxes: the requests of a step of B rows.
        exact: for layers that attend all keys.
        num_read: where a layer tells how many far rows each KV head read, [B, Hkv] int32.
        max_far: far keys of a step, at most.
        scale: factor of q·k.
    """

    def __init__(
        self,
        near: NearRows,
        rows: EarlyRows,
        boxes: BoxRows,
        exact: StepAttention,
        *,
        num_read: Callable[[int], Tensor],
        max_far: int,
        scale: float,
    ) -> None:
        self._near = near
        self._rows = rows
        self._boxes = boxes
        self._exact = exact
        self._num_read = num_read
        self._max_pages = max_far // boxes.page_tokens + len(rows.far_num)  # each request has far // page + 1
        self._scale = scale

    def attend(self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor, *, angles: Angles | None = None) -> Tensor:
        """Rotate q and k, put k and v among the near rows, choose, and attend.

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
        if layer_idx < self._boxes.first_layer:
            return self._exact.attend(layer_idx, q, k, v, angles=angles)
        cut = api.choose_pages(turned, near_k, self._rows, self._boxes, max_pages=self._max_pages, layer_idx=layer_idx)
        return api.attend_pages(
            turned, near_k, near_v, cut, self._rows, num_read=self._num_read(layer_idx), layer_idx=layer_idx,
            scale=self._scale,
        )  # fmt: skip
