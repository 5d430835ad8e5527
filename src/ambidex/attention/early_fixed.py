"""`EarlyAttention`: the attention of a decode step of fixed form with early queries; its keys: see `early_decode.py`.

    ScoredFar     the CPU scores all far keys with the early query, a layer ahead; the accelerator chooses by that
    PredictedFar  the accelerator chooses by partial keys, and scores what it chose itself, with either query

Layers that do not look ahead attend all keys.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from torch import Tensor

from ambidex.attention.fixed_scores import FixedScores
from ambidex.attention.near_rows import Angles, NearRows
from ambidex.attention.ways.way import LookAhead, StepAttention
from ambidex.core.model_spec import ModelSpec
from ambidex.kernels import api
from ambidex.kernels.early_rows import AlphaCount, EarlyRows, PartialRows
from ambidex.storage.lane_clock import LaneClock, Part


class FarSide(Protocol):
    """How far keys of layers that look ahead are chosen and attended, beside the near ones."""

    def send(self, layer_idx: int, early: Tensor) -> None:
        """Launch: take in the rotated early queries [B, Hq, D] of a layer."""
        ...

    def attend(self, layer_idx: int, q: Tensor, near_k: Tensor, near_v: Tensor) -> Tensor:
        """Attend near keys and chosen far ones, with rotated queries [B, Hq, D]; near rows: see `api.attend_early`."""
        ...


class ScoredFar:
    """Far keys that the CPU scores.

    Args:
        scores: the way to the CPU.
        rows: the requests of a step of B rows.
        scale: factor of q·k.
        clock: is told for how long scores and rows are on their way and added up; None: nobody is.
    """

    def __init__(self, scores: FixedScores, rows: EarlyRows, *, scale: float, clock: LaneClock | None) -> None:
        self._scores = scores
        self._rows = rows
        self._scale = scale
        self._clock = clock

    def send(self, layer_idx: int, early: Tensor) -> None:
        self._scores.send(layer_idx, early)

    def attend(self, layer_idx: int, q: Tensor, near_k: Tensor, near_v: Tensor) -> Tensor:
        scores = self._scores.receive(layer_idx)
        with _copying(self._clock):
            return api.attend_early(q, near_k, near_v, scores, self._rows, layer_idx=layer_idx, scale=self._scale)


class PredictedFar:
    """Far keys that partial keys predict.

    Args:
        partial: gives the partial keys of a layer.
        max_far: far keys of a step, at most.
        weighs_early: chosen far keys get the early query's scores; else the query's own.
        count: by what a layer counts how many it chooses; None: it chooses as many as each request says.
        clock: is told for how long rows are on their way and added up; None: nobody is.
    Others as `ScoredFar`.
    """

    def __init__(
        self,
        partial: Callable[[int], PartialRows],
        rows: EarlyRows,
        *,
        max_far: int,
        scale: float,
        weighs_early: bool,
        count: Callable[[int], AlphaCount] | None,
        clock: LaneClock | None,
    ) -> None:
        self._partial = partial
        self._rows = rows
        self._max_far = max_far
        self._scale = scale
        self._weighs_early = weighs_early
        self._count = count
        self._clock = clock
        self._early: dict[int, Tensor] = {}

    def send(self, layer_idx: int, early: Tensor) -> None:
        self._early[layer_idx] = early

    def attend(self, layer_idx: int, q: Tensor, near_k: Tensor, near_v: Tensor) -> Tensor:
        early = self._early.pop(layer_idx)
        cut = api.predict_far(
            early, near_k, self._rows, self._partial(layer_idx), max_far=self._max_far, scale=self._scale,
            count=None if self._count is None else self._count(layer_idx),
        )  # fmt: skip
        weighing = early if self._weighs_early else q
        with _copying(self._clock):
            return api.attend_predicted(
                q, weighing, near_k, near_v, cut, self._rows, layer_idx=layer_idx, scale=self._scale
            )


class EarlyAttention:
    """What `models.base.AttentionOp` asks for, for one new token a row; its launches do not depend on the context.

    Args:
        spec: layers.
        exact: for layers that do not look ahead.
        near: near rows of all requests.
        rows: the requests of a step of B rows.
        look_ahead: makes the early queries.
        far: for layers that look ahead.
        first_layer: that looks ahead.
    """

    def __init__(
        self,
        spec: ModelSpec,
        exact: StepAttention,
        near: NearRows,
        rows: EarlyRows,
        look_ahead: LookAhead,
        far: FarSide,
        *,
        first_layer: int,
    ) -> None:
        self._num_layers = spec.num_layers
        self._exact = exact
        self._near = near
        self._rows = rows
        self._look_ahead = look_ahead
        self._far = far
        self._first_layer = first_layer

    def attend(self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor, *, angles: Angles | None = None) -> Tensor:
        """Rotate q and k, put k and v among the near rows, send the next layer's early queries, and attend.

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
            self._far.send(following, early if angles is None else api.rotate(early, *angles))
        if layer_idx < self._first_layer:
            return self._exact.attend(layer_idx, q, k, v, angles=angles)
        return self._far.attend(layer_idx, turned, near_k, near_v)


def _copying(clock: LaneClock | None) -> AbstractContextManager[None]:
    return clock.span(Part.COPY) if clock is not None else nullcontext()
