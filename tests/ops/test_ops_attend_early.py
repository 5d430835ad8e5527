"""`attend_early`: both implementations against `attend_chosen` over the keys that a sort of the scores puts first."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from ambidex.core.errors import ShapeError
from ambidex.kernels import api, dispatch
from ambidex.kernels.cuda.pinned_view import view_on_gpu
from ambidex.kernels.early_rows import EarlyRows
from ambidex.kernels.triton import attend_early as triton_early
from far_rows import layer_rows, make_far
from triton_device import DTYPE_CASES
from truth import assert_within_twice_plain

NUM_SLOTS, SLOT_ROWS, NUM_LAYERS = 3, 80, 2
SIZES = [  # Hq, Hkv, D, (far keys, selected, near keys) of each request
    (8, 2, 64, [(300, 37, 65)]),
    (4, 4, 80, [(5, 9, 1), (0, 3, 7), (0, 0, 0)]),  # all are chosen; none is far; padding
    (7, 1, 128, [(200, 1, 3), (64, 64, 64)]),
    (6, 2, 20, [(130, 13, 2), (1, 1, 70)]),
]
Sizes = tuple[int, int, int, list[tuple[int, int, int]]]


class Parts:
    """Arguments of the op. Far rows of V that are not chosen are NaN, and so are near rows that are not seen."""

    def __init__(self, sizes: Sizes, dtype: torch.dtype, device: str, *, levels: int | None = None) -> None:
        num_q_heads, num_kv_heads, head_dim, self.requests = sizes
        self.group = num_q_heads // num_kv_heads
        self.device = device
        generator = torch.Generator().manual_seed(7)

        def rand(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        self.q = rand(len(self.requests), num_q_heads, head_dim).to(dtype)
        self.near = torch.full((2, num_kv_heads, NUM_SLOTS, SLOT_ROWS, head_dim), torch.nan).to(dtype)
        self.v: list[Tensor] = []
        self.given, self.places, firsts, first = [], [], [], 0
        for slot, (num_far, num_selected, num_near) in enumerate(self.requests):
            given = rand(num_kv_heads, self.group, num_far)
            if levels is not None:
                given = (given * levels).round() / levels
            given = given.to(dtype)
            order = given.amax(1).sort(dim=1, descending=True, stable=True).indices if num_far else torch.empty(0)
            places = order[:, :num_selected] if num_far else torch.empty(num_kv_heads, 0, dtype=torch.int64)
            _, v = make_far(NUM_LAYERS, num_kv_heads, num_far + 3, head_dim, dtype, device)
            v[1, torch.arange(num_kv_heads)[:, None], places] = rand(num_kv_heads, places.shape[1], head_dim).to(dtype)
            self.near[:, :, slot, 4 : 4 + num_near] = rand(2, num_kv_heads, num_near, head_dim).to(dtype)
            self.given.append(given)
            self.places.append(places)
            self.v.append(v)
            firsts.append(first)
            first += given.numel()
        scores = torch.cat([part.flatten() for part in self.given] + [torch.full((5,), torch.nan).to(dtype)])
        self.scores = view_on_gpu(scores.pin_memory()) if device == "cuda" else scores
        self.kept = scores
        numbers = {
            "near_slots": [-1] * len(self.requests),
            "near_first": [slot * SLOT_ROWS + 4 for slot in range(len(self.requests))],
            "near_num": [near for _, _, near in self.requests],
            "far_num": [far for far, _, _ in self.requests],
            "num_selected": [selected for _, selected, _ in self.requests],
            "score_first": firsts,
            "k_address": [0] * len(self.requests),
            "v_address": [v.data_ptr() for v in self.v],
            "capacity": [v.shape[2] for v in self.v],
            "layer_rows": [layer_rows(v) for v in self.v],
        }
        self.rows = EarlyRows(
            **{name: torch.tensor(values, dtype=torch.int64, device=device) for name, values in numbers.items()}
        )

    def attend(self, name: str) -> Tensor:
        near_k, near_v = self.near.to(self.device)
        scores = self.scores
        if self.device == "cuda":  # what a pinned copy of the scores on the device would give is not what is tested
            assert scores.is_cuda
        with dispatch.override("attend_early", name):
            out = api.attend_early(
                self.q.to(self.device), near_k, near_v, scores, self.rows, layer_idx=1, scale=self.q.shape[2] ** -0.5
            )
        return out.cpu()

    def naive(self, dtype: torch.dtype) -> Tensor:
        """Request by request, head by head, in one format."""
        out = torch.zeros_like(self.q, dtype=dtype)
        for row, (_, _, num_near) in enumerate(self.requests):
            near_k, near_v = self.near[:, :, row, 4 : 4 + num_near].to(dtype)
            for head in range(self.q.shape[1] if num_near else 0):
                kv_head, member = divmod(head, self.group)
                places = self.places[row][kv_head]
                true = (near_k[kv_head] * self.q[row, head].to(dtype)).sum(1) * self.q.shape[2] ** -0.5
                probs = torch.cat((self.given[row][kv_head, member, places].to(dtype), true)).softmax(0)
                out[row, head] = probs @ torch.cat((self.v[row][1, kv_head, places].to(dtype), near_v[kv_head]))
        return out

    def check(self, name: str) -> None:
        found = self.attend(name)
        splits = 5 if self.device == "cuda" and self.q.dtype == torch.float32 else 3  # are merged
        num_roundings = 1 if name == "reference" else splits
        assert_within_twice_plain(
            found, self.naive(self.q.dtype), self.naive(torch.float64), num_roundings=num_roundings
        )


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_reference_equals_the_formula(dtype: torch.dtype, sizes: Sizes) -> None:
    Parts(sizes, dtype, "cpu").check("reference")


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize(("device", "dtype"), DTYPE_CASES)
def test_kernel_equals_the_formula(device: str, dtype: torch.dtype, sizes: Sizes) -> None:
    Parts(sizes, dtype, device).check("triton")


@pytest.mark.parametrize("levels", [1, 4])
@pytest.mark.parametrize("counted", [64, 2048])
@pytest.mark.parametrize(("device", "dtype"), DTYPE_CASES)
def test_of_equal_scores_the_earlier_ones_are_chosen(
    device: str, dtype: torch.dtype, counted: int, levels: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of V that are not chosen are NaN; few levels of scores, so that many stand at the cut, in several tiles."""
    monkeypatch.setattr(triton_early, "_COUNTED_KEYS", counted)
    parts = Parts((4, 2, 16, [(300, 120, 5), (90, 31, 2)]), dtype, device, levels=levels)
    assert (parts.given[0].amax(1) == parts.given[0].amax(1)[:, :1]).sum() > 10
    parts.check("triton")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_long_contexts_on_a_gpu(dtype: torch.dtype) -> None:
    Parts((32, 8, 128, [(20000, 4000, 65), (3000, 600, 65)]), dtype, "cuda").check("triton")


def test_what_does_not_fit_is_refused() -> None:
    parts = Parts(SIZES[0], torch.float32, "cpu")
    near_k, near_v = parts.near
    arguments = (parts.q, near_k, near_v, parts.scores)
    rows = replace(parts.rows, far_num=parts.rows.far_num.repeat(2))
    with pytest.raises(ShapeError, match="far_num"):
        api.attend_early(*arguments, rows, layer_idx=0, scale=1.0)
    with pytest.raises(ShapeError):
        api.attend_early(parts.q.half(), near_k, near_v, parts.scores, parts.rows, layer_idx=0, scale=1.0)
    with pytest.raises(ShapeError, match="expected a multiple of 2 heads"):
        api.attend_early(parts.q[:, :5], near_k, near_v, parts.scores, parts.rows, layer_idx=0, scale=1.0)
