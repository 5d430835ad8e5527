"""`predict_far` and `attend_predicted`: both implementations against a sort of what the partial keys predict."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from ambidex.core.errors import ShapeError
from ambidex.kernels import api, dispatch
from ambidex.kernels.early_rows import AlphaCount, EarlyRows, FarCut, PartialRows
from ambidex.kernels.triton import attend_early as triton_early
from ambidex.kernels.triton import attend_predicted as triton_predicted
from far_rows import layer_rows, make_far
from triton_device import DTYPE_CASES
from truth import assert_within_twice_plain

NUM_SLOTS, SLOT_ROWS, NUM_LAYERS, FIRST_NEAR = 3, 80, 2, 4
SIZES = [  # Hq, Hkv, D, columns, (far keys, selected, near keys) of each request
    (8, 2, 64, 12, [(300, 37, 65)]),
    (4, 4, 80, 16, [(5, 9, 1), (0, 3, 7), (0, 0, 0)]),  # all are chosen; none is far; padding
    (16, 1, 128, 25, [(200, 1, 3), (64, 64, 64)]),
    (6, 2, 20, 20, [(130, 13, 2), (1, 1, 70)]),
]
Sizes = tuple[int, int, int, int, list[tuple[int, int, int]]]


class Parts:
    """Arguments of the ops. Far rows of K and V that are not chosen are NaN, and so are near rows and partial keys that
    are not seen. With `is_whole` predicted scores are small whole numbers, so that many are equal, and exactly. With
    `alpha` keys predicted near the best say how many are chosen, and all are weighed by the true query."""

    def __init__(
        self, sizes: Sizes, dtype: torch.dtype, device: str, *, is_whole: bool = False, alpha: float | None = None
    ) -> None:
        num_q_heads, num_kv_heads, head_dim, self.num_columns, self.requests = sizes
        self.group = num_q_heads // num_kv_heads
        self.device = device
        self.scale = 0.25 if is_whole else head_dim**-0.5
        generator = torch.Generator().manual_seed(11)

        def rand(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        def rand_whole(*shape: int) -> Tensor:
            return rand(*shape).round().clamp(-1, 1) if is_whole else rand(*shape)

        heads = torch.arange(num_kv_heads)[:, None]
        self.q = rand(len(self.requests), num_q_heads, head_dim).to(dtype)
        self.early = rand_whole(len(self.requests), num_q_heads, head_dim).to(dtype)
        self.near = torch.full((2, num_kv_heads, NUM_SLOTS, SLOT_ROWS, head_dim), torch.nan).to(dtype)
        self.count = None
        if alpha is not None:
            num_chosen = torch.full((len(self.requests),), -1, dtype=torch.int32, device=device)
            self.count = AlphaCount(alpha=alpha, num_chosen=num_chosen)
        self.far: list[Tensor] = []  # K and V [2, L, Hkv, capacity, D]
        self.partial, self.turns, self.places, firsts, first = [], [], [], [], 0
        for slot, (num_far, num_selected, num_near) in enumerate(self.requests):
            capacity = num_far + num_near + 3
            turn = rand(num_kv_heads, head_dim, self.num_columns) / head_dim**0.5
            if is_whole:
                turn = torch.eye(head_dim, self.num_columns).expand(num_kv_heads, -1, -1).contiguous()
            partial = torch.full((num_kv_heads, capacity, self.num_columns), torch.nan)
            partial[:, :num_far] = rand_whole(num_kv_heads, num_far, self.num_columns)
            turned = self.early[slot].double().view(num_kv_heads, self.group, head_dim) @ turn.double()
            best = (turned @ partial[:, :num_far].double().transpose(1, 2)).amax(1) * self.scale
            if alpha is not None and num_far:
                num_selected = min(num_selected, sum(int((own > own.max() - alpha).sum()) for own in best) // len(best))
            places = best.sort(dim=1, descending=True, stable=True).indices[:, :num_selected]
            far = make_far(NUM_LAYERS, num_kv_heads, capacity, head_dim, dtype, device)
            far[:, 1, heads, places] = rand(2, num_kv_heads, places.shape[1], head_dim).to(dtype)
            seen = slice(FIRST_NEAR, FIRST_NEAR + num_near)
            self.near[:, :, slot, seen] = rand(2, num_kv_heads, num_near, head_dim).to(dtype)
            self.far.append(far)
            self.partial.append(partial.to(device))
            self.turns.append(turn.to(device))
            self.places.append(places)
            firsts.append(first)
            first += num_q_heads * num_far
        self.max_far = 2 * sum(far for far, _, _ in self.requests) + 1
        self.best_of_last = best
        numbers = {
            "near_slots": [
                slot * SLOT_ROWS + FIRST_NEAR + near - 1 if near else -1
                for slot, (_, _, near) in enumerate(self.requests)
            ],
            "near_first": [slot * SLOT_ROWS + FIRST_NEAR for slot in range(len(self.requests))],
            "near_num": [near for _, _, near in self.requests],
            "far_num": [far for far, _, _ in self.requests],
            "num_selected": [selected for _, selected, _ in self.requests],
            "score_first": firsts,
            "k_address": [far[0].data_ptr() for far in self.far],
            "v_address": [far[1].data_ptr() for far in self.far],
            "capacity": [far.shape[3] for far in self.far],
            "layer_rows": [layer_rows(far) for far in self.far],
        }
        tables = {
            "rows_address": [part.data_ptr() for part in self.partial],
            "turn_address": [turn.data_ptr() for turn in self.turns],
            "capacity": [part.shape[1] for part in self.partial],
        }
        self.rows = EarlyRows(**{name: self._numbers(values) for name, values in numbers.items()})
        self.partial_rows = PartialRows(
            **{name: self._numbers(values) for name, values in tables.items()}, num_columns=self.num_columns
        )

    def _numbers(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)

    def predict(self, name: str) -> FarCut:
        with dispatch.override("predict_far", name):
            return api.predict_far(
                self.early.to(self.device), self.near[0].to(self.device), self.rows, self.partial_rows,
                max_far=self.max_far, scale=self.scale, count=self.count,
            )  # fmt: skip

    def attend(self, name: str, cut: FarCut) -> Tensor:
        near_k, near_v = self.near.to(self.device)
        with dispatch.override("attend_predicted", name):
            out = api.attend_predicted(
                self.q.to(self.device), self.weighing.to(self.device), near_k, near_v, cut, self.rows, layer_idx=1,
                scale=self.scale,
            )  # fmt: skip
        return out.cpu()

    @property
    def weighing(self) -> Tensor:
        """The queries that weigh far keys."""
        return self.early if self.count is None else self.q

    def naive(self, dtype: torch.dtype) -> Tensor:
        """Request by request, head by head, in one format."""
        out = torch.zeros_like(self.q, dtype=dtype)
        for row, (_, _, num_near) in enumerate(self.requests):
            near_k, near_v = self.near[:, :, row, FIRST_NEAR : FIRST_NEAR + num_near].to(dtype)
            for head in range(self.q.shape[1] if num_near else 0):
                kv_head = head // self.group
                k, v = self.far[row][:, 1, kv_head, self.places[row][kv_head]].to(dtype)
                early = (k * self.weighing[row, head].to(dtype)).sum(1) * self.scale
                true = (near_k[kv_head] * self.q[row, head].to(dtype)).sum(1) * self.scale
                out[row, head] = torch.cat((early, true)).softmax(0) @ torch.cat((v, near_v[kv_head]))
        return out

    def check(self, name: str) -> None:
        """The answer, and the partial keys: the step's own stand behind all others, which are as they were; and what is
        told of how many are chosen."""
        before = [part.clone() for part in self.partial]
        found = self.attend(name, self.predict(name))
        if self.count is not None:
            assert self.count.num_chosen.tolist() == [places.shape[1] for places in self.places]
        splits = 5 if self.device == "cuda" and self.q.dtype == torch.float32 else 3  # are merged
        num_roundings = 1 if name == "reference" else splits
        assert_within_twice_plain(
            found, self.naive(self.q.dtype), self.naive(torch.float64), num_roundings=num_roundings
        )
        for slot, (num_far, _, num_near) in enumerate(self.requests):
            if num_near:
                own = self.near[0, :, slot, FIRST_NEAR + num_near - 1].double()
                wanted = (own[:, None] @ self.turns[slot].cpu().double())[:, 0]
                got = self.partial[slot][:, num_far + num_near - 1].clone()
                assert (got.cpu() - wanted).abs().max() < 1e-5 * wanted.abs().max()
                self.partial[slot][:, num_far + num_near - 1] = torch.nan
            torch.testing.assert_close(self.partial[slot], before[slot], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_reference_equals_the_formula(dtype: torch.dtype, sizes: Sizes) -> None:
    Parts(sizes, dtype, "cpu").check("reference")


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize(("device", "dtype"), DTYPE_CASES)
def test_kernels_equal_the_formula(device: str, dtype: torch.dtype, sizes: Sizes) -> None:
    Parts(sizes, dtype, device).check("triton")


COUNTED = [  # with the requests of SIZES: how many are chosen, here fewer, there as many as may be
    (SIZES[0], 0.5, [16]),
    (SIZES[1], 1.0, [4, 0, 0]),
    (SIZES[2], 0.7, [1, 29]),
    (SIZES[3], 1.5, [8, 1]),
    (SIZES[3], 3.0, [13, 1]),
]


@pytest.mark.parametrize(("sizes", "alpha", "num_chosen"), COUNTED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_reference_counts_keys_near_the_best(
    dtype: torch.dtype, sizes: Sizes, alpha: float, num_chosen: list[int]
) -> None:
    parts = Parts(sizes, dtype, "cpu", alpha=alpha)
    assert dtype is not torch.float32 or [places.shape[1] for places in parts.places] == num_chosen
    parts.check("reference")


@pytest.mark.parametrize(("sizes", "alpha", "num_chosen"), COUNTED)
@pytest.mark.parametrize(("device", "dtype"), DTYPE_CASES)
def test_kernels_count_keys_near_the_best(
    device: str, dtype: torch.dtype, sizes: Sizes, alpha: float, num_chosen: list[int]
) -> None:
    del num_chosen
    Parts(sizes, dtype, device, alpha=alpha).check("triton")


def check_equal_predictions(
    name: str, device: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, alpha: float | None
) -> None:
    """Rows of K and V that are not chosen are NaN; many predictions stand at the cut, in several tiles."""
    monkeypatch.setattr(triton_early, "_COUNTED_KEYS", 64)
    monkeypatch.setattr(triton_predicted, "_COUNTED_KEYS", 64)
    parts = Parts((4, 2, 16, 5, [(300, 120, 5), (190, 61, 2)]), dtype, device, is_whole=True, alpha=alpha)
    if alpha == 0.0:  # nothing lies above the best
        assert not any(places.numel() for places in parts.places)
    else:
        at_cut = parts.best_of_last.gather(1, parts.places[-1][:, -1:])
        assert (parts.best_of_last == at_cut).sum(1).min() > 10
    if alpha == 0.5:  # the counts of heads differ, and are more at the threshold than above
        best = parts.best_of_last
        above, at = ((op(best, best.amax(1, keepdim=True) - alpha)).sum(1) for op in (torch.gt, torch.ge))
        assert above[0] != above[1]
        assert int(above.sum()) % 2, "the mean is no whole number"
        assert parts.places[-1].shape[1] == int(above.sum()) // 2 < int(at.sum()) // 2
    parts.check(name)


ALPHAS = [None, 0.0, 0.5, 100.0]
"""Of predictions that are multiples of a quarter; the last: as many are chosen as may be."""


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize(("device", "dtype"), DTYPE_CASES)
def test_of_equal_predictions_the_earlier_ones_are_chosen(
    device: str, dtype: torch.dtype, alpha: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_equal_predictions("triton", device, dtype, monkeypatch, alpha)


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_of_equal_predictions_the_reference_chooses_the_earlier_ones(
    dtype: torch.dtype, alpha: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_equal_predictions("reference", "cpu", dtype, monkeypatch, alpha)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_long_contexts_on_a_gpu(dtype: torch.dtype) -> None:
    sizes = (32, 8, 128, 25, [(20000, 4000, 65), (3000, 600, 65)])
    Parts(sizes, dtype, "cuda", is_whole=True).check("triton")
    parts = Parts(sizes, dtype, "cuda", is_whole=True, alpha=1.5)
    assert 0 < parts.places[0].shape[1] < 4000
    parts.check("triton")


def test_what_does_not_fit_is_refused() -> None:
    parts = Parts(SIZES[0], torch.float32, "cpu")
    near_k, near_v = parts.near
    cut = parts.predict("reference")
    common = {"max_far": parts.max_far, "scale": 1.0}
    partial = replace(parts.partial_rows, rows_address=torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ShapeError, match="rows_address"):
        api.predict_far(parts.early, near_k, parts.rows, partial, **common)
    with pytest.raises(ShapeError):
        api.predict_far(parts.early.half(), near_k, parts.rows, parts.partial_rows, **common)
    with pytest.raises(ShapeError, match="early_q: expected a multiple of 2 heads"):
        api.predict_far(parts.early[:, :5], near_k, parts.rows, parts.partial_rows, **common)
    count = AlphaCount(alpha=1.0, num_chosen=torch.zeros(3, dtype=torch.int32))
    with pytest.raises(ShapeError, match="num_chosen"):
        api.predict_far(parts.early, near_k, parts.rows, parts.partial_rows, count=count, **common)
    with pytest.raises(ShapeError, match="early_q"):
        api.attend_predicted(parts.q, parts.early[:, :4], near_k, near_v, cut, parts.rows, layer_idx=0, scale=1.0)
    with pytest.raises(ShapeError, match="bounds"):
        api.attend_predicted(
            parts.q, parts.early, near_k, near_v, replace(cut, bounds=cut.bounds.repeat(2, 1, 1)), parts.rows,
            layer_idx=0, scale=1.0,
        )  # fmt: skip
