"""`choose_pages` and `attend_pages`: both implementations against plain loops over pages and keys."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from ambidex.core.errors import ShapeError
from ambidex.kernels import api, dispatch
from ambidex.kernels.early_rows import BoxRows, EarlyRows, PageCut
from far_rows import layer_rows, make_far
from triton_device import DEVICES, DTYPE_CASES
from truth import assert_within_twice_plain

NUM_SLOTS, NUM_LAYERS, LAYER, FIRST_LAYER = 3, 3, 2, 1


@dataclass(frozen=True)
class Asked:
    """A request: far keys, and pages that each query head takes if there are as many."""

    num_far: int
    num_taken: int


PADDING = Asked(-1, 0)
SIZES = [  # Hq, Hkv, D, tokens of a page, requests
    (8, 2, 64, 16, [Asked(300, 5)]),  # the newest page is filled in part
    (4, 4, 80, 4, [Asked(7, 3), Asked(0, 3), PADDING]),  # it is filled now, there are less than are taken; the first
    (16, 4, 128, 16, [Asked(191, 3), Asked(192, 4)]),  # it is filled now; it has one key
    (6, 2, 20, 5, [Asked(133, 7), Asked(1, 3)]),
    (4, 4, 16, 1, [Asked(40, 9)]),  # each key is a page
    (4, 1, 16, 40, [Asked(279, 3), PADDING, Asked(100, 4)]),
]
Sizes = tuple[int, int, int, int, list[Asked]]


class Parts:
    """Arguments of the ops. Boxes of pages that are not full, and what lies behind a request's keys, are NaN; so are,
    for `attend_pages`, keys of pages that no query head takes. With `is_flat` numbers are whole and small: many bounds
    are equal, those of 0 and −0 among them."""

    def __init__(self, sizes: Sizes, dtype: torch.dtype, device: str, *, is_flat: bool = False) -> None:
        num_q_heads, num_kv_heads, head_dim, self.page, self.requests = sizes
        self.num_kv_heads, self.group, self.device = num_kv_heads, num_q_heads // num_kv_heads, device
        self.scale = head_dim**-0.5
        generator = torch.Generator().manual_seed(11)

        def rand(*shape: int) -> Tensor:
            found = torch.randn(*shape, generator=generator)
            return found.clamp(-1, 1).round() if is_flat else found

        self.q = (rand(len(self.requests), num_q_heads, head_dim) * 2).to(dtype)
        if is_flat:
            self.q[:, :, 2:] = 0
        self.near = torch.full((2, num_kv_heads, NUM_SLOTS, 1, head_dim), torch.nan).to(dtype)
        self.far: list[Tensor] = []  # K and V [2, L, Hkv, capacity, D]
        self.boxes: list[Tensor] = []  # [L - FIRST_LAYER, Hkv, pages, 2, D]
        for slot, asked in enumerate(self.requests):
            num_far, num_keys = max(0, asked.num_far), asked.num_far + 1
            far = make_far(NUM_LAYERS, num_kv_heads, num_far + 5, head_dim, dtype, device)
            far[:, LAYER, :, :num_far] = rand(2, num_kv_heads, num_far, head_dim).to(dtype)
            if asked is not PADDING:
                self.near[:, :, slot, 0] = rand(2, num_kv_heads, head_dim).to(dtype)
            boxes = torch.full((NUM_LAYERS - FIRST_LAYER, num_kv_heads, num_keys // self.page + 1, 2, head_dim), 0.0)
            boxes.fill_(torch.nan)
            for page in range(num_far // self.page):  # one that is filled now has none yet
                keys = far[0, LAYER, :, page * self.page : (page + 1) * self.page].float()
                boxes[LAYER - FIRST_LAYER, :, page, 0], boxes[LAYER - FIRST_LAYER, :, page, 1] = (
                    keys.amin(1),
                    keys.amax(1),
                )
            self.far.append(far)
            self.boxes.append(boxes.to(device))
        numbers = [asked is not PADDING for asked in self.requests]
        pages = [self.num_pages(asked) for asked in self.requests]
        self.max_pages = sum(pages) + 2
        self.rows = EarlyRows(
            near_slots=self._numbers([slot if num else -1 for slot, num in enumerate(numbers)]),
            near_first=self._numbers(list(range(len(numbers)))),
            near_num=self._numbers([int(num) for num in numbers]),
            far_num=self._numbers([max(0, asked.num_far) for asked in self.requests]),
            num_selected=self._numbers([0] * len(numbers)),
            score_first=self._numbers([0] * len(numbers)),
            k_address=self._numbers([far[0].data_ptr() for far in self.far]),
            v_address=self._numbers([far[1].data_ptr() for far in self.far]),
            capacity=self._numbers([far.shape[3] for far in self.far]),
            layer_rows=self._numbers([layer_rows(far) for far in self.far]),
        )
        self.box_rows = BoxRows(
            boxes_address=self._numbers([boxes.data_ptr() for boxes in self.boxes]),
            box_capacity=self._numbers([boxes.shape[2] for boxes in self.boxes]),
            num_pages=self._numbers(pages),
            num_taken=self._numbers(
                [min(asked.num_taken, num) for asked, num in zip(self.requests, pages, strict=True)]
            ),
            bound_first=self._numbers([num_q_heads * sum(pages[:row]) for row in range(len(pages))]),
            page_tokens=self.page,
            first_layer=FIRST_LAYER,
        )

    def _numbers(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)

    def num_pages(self, asked: Asked) -> int:
        return -(-(asked.num_far + 1) // self.page)

    def choose(self, name: str) -> PageCut:
        with dispatch.override("choose_pages", name):
            return api.choose_pages(
                self.q.to(self.device), self.near[0].to(self.device), self.rows, self.box_rows,
                max_pages=self.max_pages, layer_idx=LAYER,
            )  # fmt: skip

    def attend(self, name: str, cut: PageCut) -> tuple[Tensor, Tensor]:
        near_k, near_v = self.near.to(self.device)
        num_read = torch.full((len(self.requests), self.num_kv_heads), -1, dtype=torch.int32, device=self.device)
        with dispatch.override("attend_pages", name):
            out = api.attend_pages(
                self.q.to(self.device), near_k, near_v, cut, self.rows, num_read=num_read, layer_idx=LAYER,
                scale=self.scale,
            )  # fmt: skip
        return out.cpu(), num_read.cpu()

    def wanted(self, slot: int, head: int) -> list[int]:
        """Pages that a query head takes, ascending; bounds in fp64, which differ if they differ at all."""
        asked, kv_head = self.requests[slot], head // self.group
        newest = self.num_pages(asked) - 1
        bounds = []
        for page in range(newest):
            keys = self.far[slot][0, LAYER, kv_head, page * self.page : (page + 1) * self.page].double()
            q = self.q[slot, head].double()
            bounds.append(float(torch.maximum(q * keys.amin(0), q * keys.amax(0)).sum()))
        best = sorted(range(newest), key=lambda page: (-bounds[page], page))[: asked.num_taken - 1]
        return sorted([*best, newest])

    def taken(self, cut: PageCut, slot: int, head: int) -> list[int]:
        """What the cut says."""
        num_pages = self.num_pages(self.requests[slot])
        first = int(cut.boxes.bound_first[slot]) + head * num_pages
        order = cut.order[first : first + num_pages].tolist()
        low, end = cut.bounds[slot, head].tolist()
        return [page for page in range(num_pages) if order[page] > low or (order[page] == low and page < end)]

    def check_choice(self, name: str) -> PageCut:
        before = [boxes.clone() for boxes in self.boxes]
        cut = self.choose(name)
        for slot, asked in enumerate(self.requests):
            for head in range(self.q.shape[1] if asked is not PADDING else 0):
                assert self.taken(cut, slot, head) == self.wanted(slot, head), f"request {slot}, head {head}"
            wanted = before[slot].cpu()
            if asked is not PADDING and (asked.num_far + 1) % self.page == 0:
                page = asked.num_far // self.page
                keys = self.far[slot][0, LAYER, :, page * self.page : asked.num_far].float()
                keys = torch.cat((keys, self.near[0, :, slot].float()), 1)
                wanted[LAYER - FIRST_LAYER, :, page, 0] = keys.amin(1)
                wanted[LAYER - FIRST_LAYER, :, page, 1] = keys.amax(1)
            torch.testing.assert_close(self.boxes[slot].cpu(), wanted, rtol=0, atol=0, equal_nan=True)
        return cut

    def naive(self, cut: PageCut, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        out = torch.zeros_like(self.q, dtype=dtype)
        num_read = torch.zeros(len(self.requests), self.num_kv_heads, dtype=torch.int32)
        for slot, asked in enumerate(self.requests):
            read: dict[int, set[int]] = {}
            for head in range(self.q.shape[1] if asked is not PADDING else 0):
                kv_head = head // self.group
                pages = self.taken(cut, slot, head)
                places = [j for j in range(asked.num_far) if j // self.page in pages]
                read.setdefault(kv_head, set()).update(places)
                k, v = (
                    torch.cat((self.far[slot][part, LAYER, kv_head, places], self.near[part, kv_head, slot])).to(dtype)
                    for part in range(2)
                )
                scores = (k * self.q[slot, head].to(dtype)).sum(1) * self.scale
                out[slot, head] = scores.softmax(0) @ v
            for kv_head, seen in read.items():
                num_read[slot, kv_head] = len(seen)
                unread = [j for j in range(asked.num_far) if j not in seen]
                self.far[slot][:, LAYER, kv_head, unread] = torch.nan
        return out, num_read

    def check_attention(self, name: str) -> None:
        cut = self.choose("reference" if self.device == "cpu" else "triton")
        truth, wanted_read = self.naive(cut, torch.float64)
        plain, _ = self.naive(cut, self.q.dtype)
        out, num_read = self.attend(name, cut)
        splits = 5 if self.device == "cuda" and self.q.dtype == torch.float32 else 3  # are merged
        assert_within_twice_plain(out, plain, truth, num_roundings=1 if name == "reference" else splits)
        assert num_read.tolist() == wanted_read.tolist()


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_reference_chooses_pages(dtype: torch.dtype, sizes: Sizes) -> None:
    Parts(sizes, dtype, "cpu").check_choice("reference")


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize(("device", "dtype"), DTYPE_CASES)
def test_kernels_choose_pages(device: str, dtype: torch.dtype, sizes: Sizes) -> None:
    Parts(sizes, dtype, device).check_choice("triton")


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_reference_attends_chosen_pages(dtype: torch.dtype, sizes: Sizes) -> None:
    Parts(sizes, dtype, "cpu").check_attention("reference")


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize(("device", "dtype"), DTYPE_CASES)
def test_kernels_attend_chosen_pages(device: str, dtype: torch.dtype, sizes: Sizes) -> None:
    Parts(sizes, dtype, device).check_attention("triton")


FLAT: Sizes = (8, 2, 16, 4, [Asked(150, 9), Asked(119, 12)])


def check_equal_bounds(name: str, device: str) -> None:
    parts = Parts(FLAT, torch.float32, device, is_flat=True)
    parts.q[0, 3] = 0  # bounds of 0, and of the fourth page of −0, which is no less
    parts.far[0][0, LAYER, 0, 12:16] = -1
    parts.boxes[0][LAYER - FIRST_LAYER, 0, 3] = -1
    cut = parts.check_choice(name)
    orders = cut.order[: 8 * parts.num_pages(parts.requests[0])].view(8, -1)
    at_cut = orders == cut.bounds[0, :, :1]
    assert (at_cut.sum(1) > 2).all(), "few bounds are equal: the test would prove nothing"
    assert at_cut[3].sum() == at_cut.shape[1] - 1
    parts.check_attention(name)


def test_of_equal_bounds_the_reference_takes_the_earlier() -> None:
    check_equal_bounds("reference", "cpu")


@pytest.mark.parametrize("device", DEVICES)
def test_of_equal_bounds_the_kernel_takes_the_earlier(device: str) -> None:
    check_equal_bounds("triton", device)


def check_box_made_twice(name: str, device: str) -> None:
    """As a step that breaks off is computed again: what it left does not matter."""
    parts = Parts(SIZES[2], torch.float32, device)
    parts.choose(name)
    first = parts.boxes[0].clone()
    page = parts.requests[0].num_far // parts.page
    assert not first[LAYER - FIRST_LAYER, :, page].isnan().any()
    parts.boxes[0][LAYER - FIRST_LAYER, :, page] = 1e9
    parts.choose(name)
    torch.testing.assert_close(parts.boxes[0], first, rtol=0, atol=0, equal_nan=True)


def test_a_box_that_the_reference_makes_twice_is_the_same() -> None:
    check_box_made_twice("reference", "cpu")


@pytest.mark.parametrize("device", DEVICES)
def test_a_box_that_the_kernel_makes_twice_is_the_same(device: str) -> None:
    check_box_made_twice("triton", device)


@pytest.mark.gpu
def test_long_contexts_on_a_gpu() -> None:
    sizes: Sizes = (32, 8, 128, 16, [Asked(40_000, 64), Asked(1000, 64)])
    Parts(sizes, torch.bfloat16, "cuda").check_choice("triton")
    Parts(sizes, torch.bfloat16, "cuda").check_attention("triton")


def test_what_does_not_fit_is_refused() -> None:
    parts = Parts(SIZES[0], torch.float32, "cpu")
    near_k, near_v = parts.near
    common = {"max_pages": parts.max_pages, "layer_idx": LAYER}
    wrong = replace(parts.box_rows, num_taken=torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ShapeError, match="num_taken"):
        api.choose_pages(parts.q, near_k, parts.rows, wrong, **common)
    with pytest.raises(ShapeError):
        api.choose_pages(parts.q.half(), near_k, parts.rows, parts.box_rows, **common)
    with pytest.raises(ShapeError, match="q: expected a multiple of 2 heads"):
        api.choose_pages(parts.q[:, :5], near_k, parts.rows, parts.box_rows, **common)
    cut = parts.choose("reference")
    counts = torch.zeros(1, 3, dtype=torch.int32)
    with pytest.raises(ShapeError, match="num_read"):
        api.attend_pages(parts.q, near_k, near_v, cut, parts.rows, num_read=counts, layer_idx=LAYER, scale=1.0)
    with pytest.raises(ShapeError, match="bounds"):
        api.attend_pages(
            parts.q, near_k, near_v, replace(cut, bounds=cut.bounds[:, :3]), parts.rows, num_read=counts[:, :2],
            layer_idx=LAYER, scale=1.0,
        )  # fmt: skip
