"""What steps of fixed form read of each request on the device: `EarlyRows`, and of policies that predict `PartialRows`;
which far keys were chosen: `FarCut`; and how many, where predictions say it: `AlphaCount`. Of policies that add up what
keys get: `SumRows`, `SumRule`; of windows `WindowRows`; of pages `BoxRows`, `PageCut`."""

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
        k_address, v_address: of its rows of K and V [L, Hkv, capacity, D], which the device can read; multiples of 16.
        capacity: of these rows; `layer_rows`: as many rows lie between the beginnings of two layers, at least Hkv ·
            capacity.
    """

    near_slots: Tensor
    near_first: Tensor
    near_num: Tensor
    far_num: Tensor
    num_selected: Tensor
    score_first: Tensor
    k_address: Tensor
    v_address: Tensor
    capacity: Tensor
    layer_rows: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class PartialRows:
    """Partial keys of a step's requests in one layer, in fp32 on the device; each [B] int64. Padding has 0.

    Attributes:
        rows_address: of its rows [Hkv, capacity, d]; a multiple of 16.
        turn_address: of what turns a query or a key into d columns, [Hkv, D, d]; a multiple of 16.
        capacity: of these rows.
        num_columns: d.
    """

    rows_address: Tensor
    turn_address: Tensor
    capacity: Tensor
    num_columns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AlphaCount:
    """How many far keys each KV head of a request chooses: as many as, in the mean over the KV heads, are predicted
    above a head's best − alpha; rounded down, and at most `num_selected`.

    Attributes:
        alpha: of scaled scores.
        num_chosen: [B] int32 on the device, is told how many; 0 for padding.
    """

    alpha: float
    num_chosen: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class FarCut:
    """Which far keys each KV head chooses: those above its cut, and of those at it the first ones.

    Attributes:
        order: [n] int32, in the order of the scores; of each request [Hkv, far], from `score_first` / (Hq / Hkv) on.
        bounds: [B, Hkv, 2] int32: the cut, and the place before which keys at it are chosen.
    """

    order: Tensor
    bounds: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class SumRows:
    """What the far keys of a step's requests have got so far, in all layers, and which of them are held; a step reads
    one of two copies and writes the other. Each [B] int64. Padding has 0.

    Attributes:
        sums_from, sums_to: addresses of fp32 numbers [L, Hkv, capacity] on the device; multiples of 16.
        held_from, held_to: of bytes, likewise: 1 where a key is held.
        recent_first: from this key on all far ones are attended, held or not.
        drop_end: of the held keys before it, the step's own among them, the one with the least sum is dropped; 0: none.
        tau: the bits of an fp32 number, the temperature of a noisy `SumRule`.
    The capacity is that of the requests' rows.
    """

    sums_from: Tensor
    sums_to: Tensor
    held_from: Tensor
    held_to: Tensor
    recent_first: Tensor
    drop_end: Tensor
    tau: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class SumRule:
    """What a query adds to the sums of the keys that it attends, and which of equal sums is the least.

    Attributes:
        drops_first: the earliest of the keys with the least sum is dropped; else the last.
        noise_seed: of the layer: a query adds softmax((s + noise) / tau), s being scores; None: softmax(s).
    """

    drops_first: bool
    noise_seed: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowRows:
    """Which far keys of a step's requests are attended: the first and the newest, which lie side by side in the cache.
    Each [B] int64. Padding has 0.

    Attributes:
        sink_end: keys before this one are the first.
        window_first: keys from this one on are the newest.
        gap: how many positions lie between them; the first keys are scored as if there were none.
    """

    sink_end: Tensor
    window_first: Tensor
    gap: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class BoxRows:
    """Boxes of the pages in which the keys of a step's requests lie, in order, and how many pages are taken. Each [B]
    int64. Padding has 0.

    Attributes:
        boxes_address: of the least and the largest number of each channel of the keys of a page, fp32
            [layers, Hkv, capacity, 2, D] on the device; a multiple of 16. Only full pages have a box.
        box_capacity: of these, pages.
        num_pages: that its keys take, the step's own among them; the last may be filled in part.
        num_taken: pages that each query head takes, at most `num_pages`; the newest is one of them.
        bound_first: where its bounds [Hq, num_pages] begin.
        page_tokens: keys of a full page.
        first_layer: of the model, whose boxes are the first.
    """

    boxes_address: Tensor
    box_capacity: Tensor
    num_pages: Tensor
    num_taken: Tensor
    bound_first: Tensor
    page_tokens: int
    first_layer: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PageCut:
    """Which pages each query head takes: those above its cut, and of those at it the first ones.

    Attributes:
        order: [n] int32, in the order of the bounds; of each request [Hq, num_pages], from `bound_first` on.
        bounds: [B, Hq, 2] int32: the cut, and the page before which those at it are taken.
        boxes: of the same requests.
    """

    order: Tensor
    bounds: Tensor
    boxes: BoxRows
