"""`EarlyRows`: what `attend_early` reads of each request, on the device."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlyRows:
    """Requests of a step, B of them, each [B] int64. One that is padding has no keys, and stores nothing.

    Attributes:
        near_slots: where each one's own K and V go among the near rows, slot · R + place; −1: nowhere.
        near_first: where its near keys begin there, side by side; `near_num`: how many there are.
        far_num: its far keys; `num_selected`: how many of them each KV head chooses, at most.
        score_first: where its scores [Hkv, G, far_num] begin.
        v_address: of its rows of V [L, Hkv, capacity, D], which the device can read; a multiple of 16.
        capacity: of these rows.
    """

    near_slots: Tensor
    near_first: Tensor
    near_num: Tensor
    far_num: Tensor
    num_selected: Tensor
    score_first: Tensor
    v_address: Tensor
    capacity: Tensor
