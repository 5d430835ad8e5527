"""`attend_held`, `add_sums` and `attend_windows`: both implementations against plain loops over the keys that are held
or recent, or first or newest."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from ambidex.core.errors import ShapeError
from ambidex.kernels import api, dispatch
from ambidex.kernels.early_rows import EarlyRows, SumRows, SumRule, WindowRows
from ambidex.kernels.noise import gumbel_noise
from ambidex.kernels.triton import attend_held as triton_held
from far_rows import layer_rows, make_far
from triton_device import DEVICES, DTYPE_CASES
from truth import assert_within_twice_plain

NUM_SLOTS, NUM_LAYERS, LAYER = 3, 2, 1


@dataclass(frozen=True)
class Asked:
    """A request: far keys, how many of them each head holds, the first recent one, the end of what may be dropped."""

    num_far: int
    num_held: int
    recent_first: int
    drop_end: int


PADDING = Asked(-1, 0, 0, 0)
SIZES = [  # Hq, Hkv, D, requests
    (8, 2, 64, [Asked(300, 37, 300, 280)]),
    (4, 4, 80, [Asked(5, 2, 3, 0), Asked(0, 0, 0, 1), PADDING]),  # not full; the own key is dropped at once
    (16, 1, 128, [Asked(200, 20, 190, 201), Asked(64, 64, 64, 30)]),
    (6, 2, 20, [Asked(130, 13, 120, 131), Asked(1, 1, 1, 1)]),
]
Sizes = tuple[int, int, int, list[Asked]]
RULES = [
    SumRule(drops_first=True, noise_seed=None),
    SumRule(drops_first=False, noise_seed=None),
    SumRule(drops_first=False, noise_seed=3_000_012),
]
TAUS = (0.7, 3.0, 1.0)


class Parts:
    """Arguments of the ops. Far rows that are not attended are NaN, and so are sums of keys that are not held and what
    lies behind a request's keys. With `is_flat` all queries are 0, so that keys get as much as others, and their sums
    are whole numbers of eighths: many are equal."""

    def __init__(self, sizes: Sizes, dtype: torch.dtype, device: str, *, is_flat: bool = False) -> None:
        num_q_heads, num_kv_heads, head_dim, self.requests = sizes
        self.num_kv_heads, self.group, self.device = num_kv_heads, num_q_heads // num_kv_heads, device
        self.scale = head_dim**-0.5
        generator = torch.Generator().manual_seed(7)

        def rand(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        self.q = rand(len(self.requests), num_q_heads, head_dim).to(dtype) * (0 if is_flat else 2)
        self.near = torch.full((2, num_kv_heads, NUM_SLOTS, 1, head_dim), torch.nan).to(dtype)
        self.far: list[Tensor] = []  # K and V [2, L, Hkv, capacity, D]
        self.sums: list[Tensor] = []  # before and after, [2, L, Hkv, capacity]
        self.held: list[Tensor] = []
        firsts, first = [], 0
        for slot, asked in enumerate(self.requests):
            num_far, capacity = max(0, asked.num_far), max(0, asked.num_far) + 5
            held = torch.zeros(2, NUM_LAYERS, num_kv_heads, capacity, dtype=torch.uint8)
            held[:, :, :, num_far:] = 9  # is not looked at
            sums = torch.full((2, NUM_LAYERS, num_kv_heads, capacity), torch.nan)
            far = make_far(NUM_LAYERS, num_kv_heads, capacity, head_dim, dtype, device)
            for head in range(num_kv_heads):
                places = torch.randperm(num_far, generator=generator)[: asked.num_held]
                held[0, LAYER, head, places] = 1
                own = torch.rand(num_far, generator=generator) * 4
                sums[0, LAYER, head, :num_far] = (own * 2).round() / 8 if is_flat else own
                seen = held[0, LAYER, head] == 1
                seen[asked.recent_first : num_far] = True
                far[:, LAYER, head, seen] = rand(2, int(seen.sum()), head_dim).to(dtype)
            if asked is not PADDING:
                self.near[:, :, slot, 0] = rand(2, num_kv_heads, head_dim).to(dtype)
            self.far.append(far)
            self.sums.append(sums.to(device))
            self.held.append(held.to(device))
            firsts.append(first)
            first += num_q_heads * (asked.num_far + 1)
        self.max_far = sum(max(0, asked.num_far) for asked in self.requests) + 3
        numbers = [0 if asked is PADDING else 1 for asked in self.requests]
        self.rows = EarlyRows(
            near_slots=self._numbers([slot if num else -1 for slot, num in enumerate(numbers)]),
            near_first=self._numbers(list(range(len(numbers)))),
            near_num=self._numbers(numbers),
            far_num=self._numbers([max(0, asked.num_far) for asked in self.requests]),
            num_selected=self._numbers([0] * len(numbers)),
            score_first=self._numbers(firsts),
            k_address=self._numbers([far[0].data_ptr() for far in self.far]),
            v_address=self._numbers([far[1].data_ptr() for far in self.far]),
            capacity=self._numbers([far.shape[3] for far in self.far]),
            layer_rows=self._numbers([layer_rows(far) for far in self.far]),
        )
        taus = torch.tensor(TAUS[: len(numbers)]).view(torch.int32).tolist()
        self.sum_rows = SumRows(
            sums_from=self._numbers([sums[0].data_ptr() for sums in self.sums]),
            sums_to=self._numbers([sums[1].data_ptr() for sums in self.sums]),
            held_from=self._numbers([held[0].data_ptr() for held in self.held]),
            held_to=self._numbers([held[1].data_ptr() for held in self.held]),
            recent_first=self._numbers([asked.recent_first for asked in self.requests]),
            drop_end=self._numbers([asked.drop_end for asked in self.requests]),
            tau=self._numbers(taus),
        )

    def _numbers(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)

    def attend(self, name: str) -> tuple[Tensor, Tensor, Tensor]:
        near_k, near_v = self.near.to(self.device)
        with dispatch.override("attend_held", name):
            return api.attend_held(
                self.q.to(self.device), near_k, near_v, self.rows, self.sum_rows, max_far=self.max_far,
                layer_idx=LAYER, scale=self.scale,
            )  # fmt: skip

    def add(self, name: str, scores: Tensor, lse: Tensor, rule: SumRule) -> Tensor:
        counts = torch.full((len(self.requests), self.num_kv_heads), -1, dtype=torch.int32, device=self.device)
        with dispatch.override("add_sums", name):
            api.add_sums(scores, lse, self.rows, self.sum_rows, rule, num_attended=counts, layer_idx=LAYER)
        return counts.cpu()

    def attended(self, slot: int, kv_head: int) -> list[int]:
        asked = self.requests[slot]
        is_held = self.held[slot][0, LAYER, kv_head].tolist()
        return [j for j in range(asked.num_far) if is_held[j] or j >= asked.recent_first] + [asked.num_far]

    def scores_of(self, slot: int, head: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Scores and values of attended keys."""
        kv_head = head // self.group
        places = self.attended(slot, kv_head)[:-1]
        k, v = (
            torch.cat((self.far[slot][part, LAYER, kv_head, places], self.near[part, kv_head, slot])).to(dtype)
            for part in range(2)
        )
        return (k * self.q[slot, head].to(dtype)).sum(1) * self.scale, v

    def naive(self, dtype: torch.dtype) -> Tensor:
        out = torch.zeros_like(self.q, dtype=dtype)
        for slot, asked in enumerate(self.requests):
            for head in range(self.q.shape[1] if asked is not PADDING else 0):
                scores, values = self.scores_of(slot, head, dtype)
                out[slot, head] = scores.softmax(0) @ values
        return out

    def check_attention(self, name: str) -> None:
        out, lse, scores = self.attend(name)
        splits = 5 if self.device == "cuda" and self.q.dtype == torch.float32 else 3  # are merged
        assert_within_twice_plain(
            out.cpu(), self.naive(self.q.dtype), self.naive(torch.float64),
            num_roundings=1 if name == "reference" else splits,
        )  # fmt: skip
        for slot, asked in enumerate(self.requests):
            for head in range(self.q.shape[1] if asked is not PADDING else 0):
                wanted, _ = self.scores_of(slot, head, torch.float64)
                first = int(self.rows.score_first[slot]) + head * (asked.num_far + 1)
                got = scores[first : first + asked.num_far + 1].cpu()[self.attended(slot, head // self.group)]
                torch.testing.assert_close(got.double(), wanted, rtol=0, atol=1e-5 * max(1, float(wanted.abs().max())))
                assert float(lse[slot, head]) == pytest.approx(float(wanted.logsumexp(0)), abs=1e-4)

    def check_sums(self, name: str, rule: SumRule) -> None:
        """From scores as the formula has them: so that a sum is what is added, and the flags follow from the sums."""
        scores = torch.full((self.q.shape[1] * (self.max_far + len(self.requests)),), torch.nan)
        lse = torch.full(self.q.shape[:2], -torch.inf)
        added: dict[tuple[int, int], dict[int, float]] = {}
        for slot, asked in enumerate(self.requests):
            for head in range(self.q.shape[1] if asked is not PADDING else 0):
                x, _ = self.scores_of(slot, head, torch.float64)
                places = self.attended(slot, head // self.group)
                first = int(self.rows.score_first[slot]) + head * (asked.num_far + 1)
                scores[first : first + asked.num_far + 1][places] = x.float()
                lse[slot, head] = x.logsumexp(0)
                if rule.noise_seed is not None:
                    position = torch.tensor([asked.num_far])
                    noise = gumbel_noise(rule.noise_seed, position, self.q.shape[1], asked.num_far + 1)
                    x = (x + noise[head, 0, places].double()) / TAUS[slot]
                own = added.setdefault((slot, head // self.group), {})
                for place, weight in zip(places, x.softmax(0).tolist(), strict=True):
                    own[place] = own.get(place, 0.0) + weight
        before = [(sums.clone(), held.clone()) for sums, held in zip(self.sums, self.held, strict=True)]
        counts = self.add(name, scores.to(self.device), lse.to(self.device), rule)
        for slot, asked in enumerate(self.requests):
            num_keys = asked.num_far + 1
            for kv_head in range(self.num_kv_heads):
                assert counts[slot, kv_head] == (len(self.attended(slot, kv_head)) - 1 if num_keys else 0)
                if asked is PADDING:
                    continue
                old_sums = self.sums[slot][0, LAYER, kv_head].tolist()
                sums = self.sums[slot][1, LAYER, kv_head, :num_keys].cpu()
                wanted = torch.tensor(
                    [
                        (old_sums[j] if j < asked.num_far else 0.0) + added[slot, kv_head].get(j, 0.0)
                        for j in range(num_keys)
                    ]
                )
                torch.testing.assert_close(sums, wanted, rtol=1e-5, atol=1e-5)
                is_held = self.held[slot][0, LAYER, kv_head].tolist()
                stays = {j for j in range(asked.num_far) if is_held[j]} | {asked.num_far}
                if asked.drop_end:
                    order = 1 if rule.drops_first else -1
                    stays.remove(
                        min((j for j in stays if j < asked.drop_end), key=lambda j: (float(sums[j]), order * j))
                    )
                got = self.held[slot][1, LAYER, kv_head, :num_keys].cpu()
                assert set(got.nonzero()[:, 0].tolist()) == stays
                assert got.max() <= 1
            if asked is PADDING:
                num_keys = 0
            for now, was in zip((self.sums[slot], self.held[slot]), before[slot], strict=True):
                rest = now.clone()
                rest[1, LAYER, :, :num_keys] = was[1, LAYER, :, :num_keys]
                torch.testing.assert_close(rest, was, rtol=0, atol=0, equal_nan=True)  # nothing else was written


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_reference_attends_held_and_recent_keys(dtype: torch.dtype, sizes: Sizes) -> None:
    Parts(sizes, dtype, "cpu").check_attention("reference")


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize(("device", "dtype"), DTYPE_CASES)
def test_kernels_attend_held_and_recent_keys(device: str, dtype: torch.dtype, sizes: Sizes) -> None:
    Parts(sizes, dtype, device).check_attention("triton")


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("sizes", SIZES)
def test_reference_adds_and_drops(sizes: Sizes, rule: SumRule) -> None:
    Parts(sizes, torch.float32, "cpu").check_sums("reference", rule)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("device", DEVICES)
def test_kernels_add_and_drop(device: str, sizes: Sizes, rule: SumRule, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_held, "_SUMMED_KEYS", 64)
    Parts(sizes, torch.float32, device).check_sums("triton", rule)


FLAT: Sizes = (4, 2, 16, [Asked(300, 130, 290, 301), Asked(190, 127, 190, 170)])


def check_equal_sums(name: str, device: str, rule: SumRule) -> None:
    """All keys get the same: 1 / 128 in the second request, which is exact, so that sums that were equal stay so."""
    parts = Parts(FLAT, torch.float32, device, is_flat=True)
    for kv_head in range(2):
        held = parts.held[1][0, LAYER, kv_head, :170].cpu() == 1
        sums = parts.sums[1][0, LAYER, kv_head, :170].cpu()[held]
        assert (sums == sums.min()).sum() > 3, "several keys have the least sum"
    parts.check_sums(name, rule)


@pytest.mark.parametrize("rule", RULES[:2])
def test_of_equal_sums_the_reference_drops_as_the_rule_says(rule: SumRule) -> None:
    check_equal_sums("reference", "cpu", rule)


@pytest.mark.parametrize("rule", RULES[:2])
@pytest.mark.parametrize("device", DEVICES)
def test_of_equal_sums_the_kernel_drops_as_the_rule_says(
    device: str, rule: SumRule, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_held, "_SUMMED_KEYS", 64)
    check_equal_sums("triton", device, rule)


@pytest.mark.parametrize("seed", [0, 5, 1_000_003 * 977 + 31])
@pytest.mark.parametrize("device", DEVICES)
def test_noise_of_the_kernel_is_that_of_the_policy(device: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A query that gives all keys one score adds the softmax of the noise alone, so that the largest shows its bits."""
    monkeypatch.setattr(triton_held, "_SUMMED_KEYS", 64)
    parts = Parts((8, 8, 16, [Asked(150, 150, 150, 0)]), torch.float32, device, is_flat=True)
    parts.sums[0][0] = 0
    scores = torch.zeros(8 * (parts.max_far + 1), device=device)
    parts.add("triton", scores, torch.zeros(1, 8, device=device), SumRule(drops_first=False, noise_seed=seed))
    noise = gumbel_noise(seed, torch.tensor([150]), 8, 151)[:, 0]
    got = parts.sums[0][1, LAYER, :, :151].cpu()
    torch.testing.assert_close(got, (noise / torch.tensor(TAUS[0])).softmax(1), rtol=1e-5, atol=1e-9)


@pytest.mark.gpu
@pytest.mark.parametrize("rule", RULES)
def test_long_contexts_on_a_gpu(rule: SumRule) -> None:
    sizes: Sizes = (32, 8, 128, [Asked(9000, 1700, 8990, 9001), Asked(1000, 100, 900, 1001)])
    Parts(sizes, torch.bfloat16, "cuda").check_attention("triton")
    Parts(sizes, torch.float32, "cuda").check_sums("triton", rule)


WINDOWS = [  # of each request of SIZES: the end of the first keys, the begin of the newest
    (SIZES[0], [(4, 250)]),
    (SIZES[1], [(2, 2), (0, 0), (0, 0)]),  # all are attended; there is none; padding
    (SIZES[2], [(0, 190), (1, 64)]),  # no first keys; no newest beside the own
    (SIZES[3], [(70, 120), (1, 1)]),
]


def check_windows(name: str, device: str, dtype: torch.dtype, sizes: Sizes, ends: list[tuple[int, int]]) -> None:
    """Far rows that are not attended are NaN; the first keys are scored by another query."""
    parts = Parts(sizes, dtype, device)
    generator = torch.Generator().manual_seed(5)
    sink_q = torch.randn(parts.q.shape, generator=generator).to(dtype)
    for far, (sink_end, first) in zip(parts.far, ends, strict=True):
        num_far = far.shape[3] - 5
        far.fill_(torch.nan)
        for seen in (slice(sink_end), slice(first, num_far)):
            far[:, LAYER, :, seen] = torch.randn(far[:, LAYER, :, seen].shape, generator=generator).to(dtype)
    windows = WindowRows(
        sink_end=parts._numbers([end for end, _ in ends]),
        window_first=parts._numbers([first for _, first in ends]),
        gap=parts._numbers([0] * len(ends)),
    )

    def naive(kind: torch.dtype) -> Tensor:
        out = torch.zeros_like(parts.q, dtype=kind)
        for slot, (asked, (sink_end, first)) in enumerate(zip(parts.requests, ends, strict=True)):
            for head in range(parts.q.shape[1] if asked is not PADDING else 0):
                kv_head = head // parts.group
                k, v = parts.far[slot][:, LAYER, kv_head, : asked.num_far].to(kind)
                own_k, own_v = parts.near[:, kv_head, slot].to(kind)
                q = parts.q[slot, head].to(kind)
                sinks = (k[:sink_end] * sink_q[slot, head].to(kind)).sum(1)
                newest = (torch.cat((k[first:], own_k)) * q).sum(1)
                probs = (torch.cat((sinks, newest)) * parts.scale).softmax(0)
                out[slot, head] = probs @ torch.cat((v[:sink_end], v[first:], own_v))
        return out

    near_k, near_v = parts.near.to(device)
    with dispatch.override("attend_windows", name):
        out = api.attend_windows(
            parts.q.to(device), sink_q.to(device), near_k, near_v, parts.rows, windows, layer_idx=LAYER,
            scale=parts.scale,
        )  # fmt: skip
    splits = 5 if device == "cuda" and dtype == torch.float32 else 3  # are merged
    assert_within_twice_plain(
        out.cpu(), naive(dtype), naive(torch.float64), num_roundings=1 if name == "reference" else splits
    )


@pytest.mark.parametrize(("sizes", "ends"), WINDOWS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_reference_attends_the_first_keys_and_the_newest(
    dtype: torch.dtype, sizes: Sizes, ends: list[tuple[int, int]]
) -> None:
    check_windows("reference", "cpu", dtype, sizes, ends)


@pytest.mark.parametrize(("sizes", "ends"), WINDOWS)
@pytest.mark.parametrize(("device", "dtype"), DTYPE_CASES)
def test_kernels_attend_the_first_keys_and_the_newest(
    device: str, dtype: torch.dtype, sizes: Sizes, ends: list[tuple[int, int]]
) -> None:
    check_windows("triton", device, dtype, sizes, ends)


def test_what_does_not_fit_is_refused() -> None:
    parts = Parts(SIZES[0], torch.float32, "cpu")
    near_k, near_v = parts.near
    common = {"max_far": parts.max_far, "layer_idx": 0, "scale": 1.0}
    wrong = replace(parts.sum_rows, held_from=torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ShapeError, match="held_from"):
        api.attend_held(parts.q, near_k, near_v, parts.rows, wrong, **common)
    with pytest.raises(ShapeError):
        api.attend_held(parts.q.half(), near_k, near_v, parts.rows, parts.sum_rows, **common)
    with pytest.raises(ShapeError, match="q: expected a multiple of 2 heads"):
        api.attend_held(parts.q[:, :5], near_k, near_v, parts.rows, parts.sum_rows, **common)
    _, lse, scores = parts.attend("reference")
    counts = torch.zeros(1, 3, dtype=torch.int32)
    with pytest.raises(ShapeError, match="lse: expected a multiple of 3 heads"):
        api.add_sums(scores, lse, parts.rows, parts.sum_rows, RULES[0], num_attended=counts, layer_idx=0)
    wrong = replace(parts.sum_rows, tau=torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ShapeError, match="tau"):
        api.add_sums(scores, lse, parts.rows, wrong, RULES[0], num_attended=counts[:, :2], layer_idx=0)
    windows = WindowRows(**dict.fromkeys(("sink_end", "window_first", "gap"), torch.zeros(1, dtype=torch.int64)))
    with pytest.raises(ShapeError, match="sink_q"):
        api.attend_windows(parts.q, parts.q[:, :4], near_k, near_v, parts.rows, windows, layer_idx=0, scale=1.0)
    wrong_windows = replace(windows, window_first=torch.zeros(2, dtype=torch.int64))
    with pytest.raises(ShapeError, match="window_first"):
        api.attend_windows(parts.q, parts.q, near_k, near_v, parts.rows, wrong_windows, layer_idx=0, scale=1.0)
