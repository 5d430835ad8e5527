"""`EarlyAttention`: the attention of a decode step of fixed form under HybridGen; its keys: see `early_decode.py`."""

from contextlib import nullcontext
from typing import Protocol

from torch import Tensor

from ambidex.attention.fixed_scores import FixedScores
from ambidex.attention.near_rows import Angles, NearRows
from ambidex.core.model_spec import ModelSpec
from ambidex.kernels import api
from ambidex.kernels.early_rows import EarlyRows
from ambidex.storage.lane_clock import LaneClock, Part


class LookAhead(Protocol):
    """Makes queries a layer early; see `early_decode.LookAhead`."""

    def ahead(self, layer_idx: int) -> Tensor | None: ...


class ExactAttention(Protocol):
    """Attends all keys; see `models.base.AttentionOp`."""

    def attend(self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor, *, angles: Angles | None = None) -> Tensor: ...


class EarlyAttention:
    """What `models.base.AttentionOp` asks for, for one new token a row; its launches do not depend on the context.

    Args:
        spec: layers and head_dim (the scale is head_dim ** -0.5).
        exact: for layers that do not look ahead.
        near: near rows of all requests.
        rows: the requests of a step of B rows.
        look_ahead: makes the early queries.
        scores: the way to the CPU.
        first_layer: that looks ahead.
        clock: is told for how long scores and rows are on their way and added up; None: nobody is.
    """

    def __init__(
        self,
        spec: ModelSpec,
        exact: ExactAttention,
        near: NearRows,
        rows: EarlyRows,
        look_ahead: LookAhead,
        scores: FixedScores,
        *,
        first_layer: int,
        clock: LaneClock | None = None,
    ) -> None:
        self._num_layers = spec.num_layers
        self._scale = spec.head_dim**-0.5
        self._exact = exact
        self._near = near
        self._rows = rows
        self._look_ahead = look_ahead
        self._scores = scores
        self._first_layer = first_layer
        self._clock = clock

    def attend(self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor, *, angles: Angles | None = None) -> Tensor:
        """Rotate q and k, put k and v among the near rows, have the CPU score the next layer's far keys, and attend.

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
        following = layer_idx + 1
        if self._first_layer <= following < self._num_layers:
            early = self._look_ahead.ahead(layer_idx)
            assert early is not None, "the layer's input has been seen"
            self._scores.send(following, early if angles is None else api.rotate(early, *angles))
        if layer_idx < self._first_layer:
            return self._exact.attend(layer_idx, q, k, v, angles=angles)
        scores = self._scores.receive(layer_idx)
        with self._clock.span(Part.COPY) if self._clock is not None else nullcontext():
            return api.attend_early(turned, near_k, near_v, scores, self._rows, layer_idx=layer_idx, scale=self._scale)
