"""`HybridAttention`: the attention of a decode step of fixed form whose older keys lie on both tiers."""

from torch import Tensor

from ambidex.attention.handover import Handover
from ambidex.attention.paged import PagedAttention
from ambidex.attention.scan_check import AnswerCopies
from ambidex.attention.scanned import ScannedAttention
from ambidex.attention.state import merge
from ambidex.attention.streamed import StreamedAttention


class HybridAttention:
    """What `models.base.AttentionOp` asks for, for one new token a row; its launches do not depend on the context.

    The CPU lane attends over keys in DRAM while the accelerator attends over its own, and over others in DRAM that it
    reads over the link: it attends all of them, or under the bounded policy those that it keeps.

    Args:
        paged: the accelerator's keys, the new ones among them.
        handover: the way to the CPU lane; None: the stream lane brings all keys in DRAM.
        streamed: the stream lane; None: the CPU lane has all keys in DRAM.
        is_bounded: the CPU lane leaves out keys, by what the accelerator's own keys leave to the others.
        scanned: the scan lane, with `is_bounded` only and in place of the stream lane; None: there is none.
        copies: where each layer leaves its queries and answers; None: nobody looks at them.
    """

    def __init__(
        self,
        paged: PagedAttention,
        handover: Handover | None,
        streamed: StreamedAttention | None,
        *,
        is_bounded: bool = False,
        scanned: ScannedAttention | None = None,
        copies: AnswerCopies | None = None,
    ) -> None:
        self._paged = paged
        self._handover = handover
        self._streamed = streamed
        self._is_bounded = is_bounded
        self._scanned = scanned
        self._copies = copies
        self._cpu_part: Tensor | None = None
        self._outs: list[Tensor] = []
        self._lane_figures: list[Tensor] = []

    def begin(self) -> None:
        """Launch what goes before the first layer."""
        if self._scanned is not None:
            self._cpu_part = self._scanned.begin()

    def attend(
        self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor, *, angles: tuple[Tensor, Tensor] | None = None
    ) -> Tensor:
        """Rotate q and k, store k and v, and attend over the visible keys of both tiers.

        Args:
            q: [B, Hq, D]; k, v: [B, Hkv, D], on the accelerator, in the dtype of its pool.
            angles: cos and sin; None: nothing is rotated.
        Returns:
            [B, Hq, D] in the dtype of q; 0 for padding.
        Raises:
            ShapeError: the tensors fit neither the rows nor the pool.
        """
        q = self._paged.store(layer_idx, q, k, v, angles=angles)
        handover = self._handover
        if handover is not None:
            handover.send(layer_idx, q)
        state = self._paged.attend_pool(layer_idx, q)
        if self._streamed is not None:
            state = merge(state, self._streamed.attend(layer_idx, q), out_dtype=q.dtype if handover is None else None)
        if handover is None:
            return state.out.to(q.dtype)
        if self._streamed is not None:
            handover.mark_streamed(layer_idx)
        if self._is_bounded:
            handover.show_near(layer_idx, state.lse, self._cpu_part)
        if self._scanned is not None:
            part, figures = self._scanned.attend(layer_idx, q, state.lse)
            state = merge(state, part)
            self._lane_figures.append(figures)
            handover.note_end(layer_idx)
        answer = handover.receive(layer_idx)
        if not self._is_bounded:
            return merge(state, answer, out_dtype=q.dtype).out
        out = merge(state, answer).out
        self._outs.append(out)
        if self._copies is not None:
            self._copies.keep(layer_idx, q, out)
        return out.to(q.dtype)

    def end(self) -> None:
        """Launch what follows the last layer."""
        if self._is_bounded and self._handover is not None:
            self._handover.show_answers(self._outs, self._lane_figures)
        if self._scanned is not None:
            self._scanned.end()
