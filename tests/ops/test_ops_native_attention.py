"""Attention over tiled pools: each instruction set that this machine runs, against dense attention in float64."""

import os
import random
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from ambidex import _native
from ambidex.core.errors import ShapeError
from ambidex.kernels.cpu import native
from ambidex.kernels.reference import kv_tiles
from ambidex.kernels.reference.attention import attend

FLOATS = [torch.float32, torch.bfloat16, torch.float16]
EPSILON = torch.finfo(torch.float32).eps


@pytest.fixture(params=_native.available_isas())
def isa(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def pool() -> native.AttentionPool:
    return native.AttentionPool(native.ThreadPool(2))


@dataclass(frozen=True)
class World:
    """A pool of one layer, requests over it, and their queries."""

    q: Tensor
    k: Tensor  # [Hkv, N, P, D], scales not applied
    v: Tensor
    k_scales: Tensor | None  # [Hkv, N, P]
    v_scales: Tensor | None
    block_ids: list[list[int]]
    first_key: list[int]
    num_keys: list[int]
    row_offsets: list[int]

    @property
    def batch(self) -> native.KeyBatch:
        offsets = [0]
        for ids in self.block_ids:
            offsets.append(offsets[-1] + len(ids))
        return native.KeyBatch(
            torch.tensor([i for ids in self.block_ids for i in ids], dtype=torch.int64),
            *(torch.tensor(x) for x in (offsets, self.first_key, self.num_keys, self.row_offsets)),
            block_size=self.k.shape[2],
        )

    def visible(self, request: int, part: Tensor, scales: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Rows [Hkv, S, D] that a request sees, in a dtype."""
        rows = part.to(dtype) if scales is None else (part.double() * scales.double()[..., None]).to(dtype)
        keys = slice(self.first_key[request], self.first_key[request] + self.num_keys[request])
        return rows[:, self.block_ids[request]].flatten(1, 2)[:, keys]

    def dense(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Plain torch in one dtype throughout."""
        q = self.q.to(dtype)
        num_heads, scale = q.shape[1], q.shape[2] ** -0.5
        out, lse = torch.zeros_like(q), torch.full(q.shape[:2], -torch.inf, dtype=dtype)
        for r in range(len(self.block_ids)):
            rows = slice(self.row_offsets[r], self.row_offsets[r + 1])
            if not self.num_keys[r]:
                continue
            k = self.visible(r, self.k, self.k_scales, dtype).repeat_interleave(num_heads // self.k.shape[0], 0)
            v = self.visible(r, self.v, self.v_scales, dtype).repeat_interleave(num_heads // self.k.shape[0], 0)
            scores = torch.einsum("thd,hsd->ths", q[rows], k) * scale
            lse[rows] = torch.logsumexp(scores, -1)
            out[rows] = torch.einsum("ths,hsd->thd", torch.softmax(scores, -1), v)
        return out, lse

    def native(self, pool: native.AttentionPool, isa: str | None) -> tuple[Tensor, Tensor]:
        return pool.attend_blocks(
            self.q,
            kv_tiles.pack_k(self.k),
            kv_tiles.pack_v(self.v),
            self.batch,
            scale=self.q.shape[2] ** -0.5,
            k_scales=self.k_scales,
            v_scales=self.v_scales,
            isa=isa,
        )


def make_world(
    *,
    dtype: torch.dtype,
    head_dim: int = 64,
    group: int = 4,
    block_size: int = 16,
    num_keys: Sequence[int] = (37, 1, 0, 90),
    first_key: Sequence[int] | None = None,
    num_rows: Sequence[int] | None = None,
    num_kv_heads: int = 2,
    seed: int = 0,
) -> World:
    """Random rows in blocks of a random table; requests see `num_keys` from `first_key` (default 0) on."""
    generator, choice = torch.Generator().manual_seed(seed), random.Random(seed)
    first = list(first_key or [0] * len(num_keys))
    rows = list(num_rows or [1] * len(num_keys))
    needed = [-(-(f + n) // block_size) for f, n in zip(first, num_keys, strict=True)]
    table = choice.sample(range(sum(needed) + 2), sum(needed))
    block_ids = [[table.pop() for _ in range(n)] for n in needed]
    shape = (num_kv_heads, sum(needed) + 2, block_size, head_dim)
    row_offsets = [0]
    for n in rows:
        row_offsets.append(row_offsets[-1] + n)
    q = torch.randn((row_offsets[-1], num_kv_heads * group, head_dim), generator=generator) * 2
    if dtype == torch.int8:
        k, v = (torch.randint(-127, 128, shape, generator=generator).to(dtype) for _ in range(2))
        scales = [torch.rand(shape[:3], generator=generator) * 0.02 + 0.005 for _ in range(2)]
    else:
        k, v = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
        q, scales = q.to(dtype), [None, None]
    return World(q, k, v, *scales, block_ids, first, list(num_keys), row_offsets)


def assert_close_enough(world: World, out: Tensor, lse: Tensor) -> None:
    """Error at most twice that of plain torch in the pool's dtype (bf16 for int8), both against float64."""
    dtype = torch.bfloat16 if world.k.dtype == torch.int8 else world.k.dtype
    expected, plain = world.dense(torch.float64), world.dense(dtype)
    for got, true, low in zip((out, lse), expected, plain, strict=True):
        seen = true.isfinite()
        assert torch.equal(got[~seen], true[~seen].float())
        error, allowed = (got.double() - true)[seen].abs(), (low.double() - true)[seen].abs()
        floor = 4 * EPSILON * (1 + true[seen].abs().max())
        assert error.max() <= 2 * allowed.max() + floor


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int8])
@pytest.mark.parametrize("group", [1, 3, 4, 7, 8])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_attend_blocks_heads_and_groups_equal_dense_float64(
    pool: native.AttentionPool, isa: str, dtype: torch.dtype, group: int, head_dim: int
) -> None:
    block_size = 16 if group % 2 else 64
    world = make_world(dtype=dtype, head_dim=head_dim, group=group, block_size=block_size, seed=group)
    assert_close_enough(world, *world.native(pool, isa))


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int8])
@pytest.mark.parametrize("num_keys", [1, 2, 15, 16, 17, 31, 33, 63, 64, 65, 127, 129, 200])
def test_attend_blocks_odd_lengths_equal_dense_float64(
    pool: native.AttentionPool, isa: str, dtype: torch.dtype, num_keys: int
) -> None:
    for block_size in (16, 32, 48, 64, 128):
        world = make_world(dtype=dtype, group=3, block_size=block_size, num_keys=[num_keys])
        assert_close_enough(world, *world.native(pool, isa))


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int8])
@pytest.mark.parametrize("first_key", [1, 15, 16, 31, 64, 100])
def test_attend_blocks_window_skips_rows_and_blocks(
    pool: native.AttentionPool, isa: str, dtype: torch.dtype, first_key: int
) -> None:
    for block_size in (16, 64):
        world = make_world(
            dtype=dtype, block_size=block_size, num_keys=[1, 90, 33], first_key=[first_key, first_key, 0]
        )
        assert_close_enough(world, *world.native(pool, isa))


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int8])
@pytest.mark.parametrize("num_rows", [[2, 0, 5], [64, 1, 17], [3, 4, 5]])
def test_attend_blocks_several_queries_a_request_equal_dense_float64(
    pool: native.AttentionPool, isa: str, dtype: torch.dtype, num_rows: list[int]
) -> None:
    world = make_world(dtype=dtype, group=7, num_keys=[130, 20, 77], num_rows=num_rows, num_kv_heads=1)
    assert_close_enough(world, *world.native(pool, isa))


@pytest.mark.parametrize("dtype", FLOATS)
def test_attend_blocks_rows_never_stored_do_not_leak(pool: native.AttentionPool, isa: str, dtype: torch.dtype) -> None:
    world = make_world(dtype=dtype, head_dim=80, block_size=64, num_keys=[70, 9], first_key=[21, 3])
    clean = world.native(pool, isa)
    k, v = world.k.clone(), world.v.clone()
    for ids, first, num in zip(world.block_ids, world.first_key, world.num_keys, strict=True):
        for position in {*range(len(ids) * 64)} - {*range(first, first + num)}:
            for part in (k, v):
                part[:, ids[position // 64], position % 64] = torch.nan
    dirty = World(world.q, k, v, None, None, world.block_ids, world.first_key, world.num_keys, world.row_offsets)
    out, lse = dirty.native(pool, isa)
    assert torch.equal(out, clean[0])
    assert torch.equal(lse, clean[1])


def test_attend_blocks_int8_scales_never_stored_do_not_leak(pool: native.AttentionPool, isa: str) -> None:
    world = make_world(dtype=torch.int8, block_size=64, num_keys=[70], first_key=[21])
    assert world.k_scales is not None
    assert world.v_scales is not None
    clean = world.native(pool, isa)
    for position in {*range(128)} - {*range(21, 91)}:
        world.k_scales[:, world.block_ids[0][position // 64], position % 64] = torch.nan
        world.v_scales[:, world.block_ids[0][position // 64], position % 64] = torch.nan
    out, lse = world.native(pool, isa)
    assert torch.equal(out, clean[0])
    assert torch.equal(lse, clean[1])


@pytest.mark.parametrize("part", ["k", "v"])
def test_attend_blocks_nan_in_a_visible_row_is_not_hidden(pool: native.AttentionPool, isa: str, part: str) -> None:
    world = make_world(dtype=torch.float32, num_keys=[40])
    (world.k if part == "k" else world.v)[:, world.block_ids[0][1], 3] = torch.nan
    out, _ = world.native(pool, isa)
    assert out.isnan().all()


@pytest.mark.parametrize("dtype", FLOATS)
def test_attend_blocks_scores_far_apart_neither_overflow_nor_lose_the_largest(
    pool: native.AttentionPool, isa: str, dtype: torch.dtype
) -> None:
    world = make_world(dtype=dtype, num_keys=[200])
    far = World(world.q * 60, *(getattr(world, n) for n in list(World.__dataclass_fields__)[1:]))
    assert_close_enough(far, *far.native(pool, isa))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attend_blocks_any_number_of_threads_gives_the_same_up_to_rounding(isa: str, dtype: torch.dtype) -> None:
    world = make_world(dtype=dtype, block_size=64, num_keys=[1400, 5, 600], num_rows=[1, 3, 2])
    for num_threads in (1, 2, 3, 7):
        assert_close_enough(world, *world.native(native.AttentionPool(native.ThreadPool(num_threads)), isa))


def test_attend_blocks_many_small_calls_with_random_thread_counts_stay_right() -> None:
    choice = random.Random(7)
    worlds = [make_world(dtype=torch.float32, num_keys=[n, 900, 1], seed=n) for n in (1, 16, 40)]
    expected = [world.dense(torch.float64)[0] for world in worlds]
    for _ in range(10):
        pool = native.AttentionPool(native.ThreadPool(choice.randint(1, 6), spin_us=choice.choice([0, 50])))
        for _ in range(8):
            i = choice.randrange(len(worlds))
            out, _lse = worlds[i].native(pool, None)
            torch.testing.assert_close(out.double(), expected[i], rtol=0, atol=1e-5)


def test_attend_blocks_from_several_python_threads_at_a_time_stays_right(pool: native.AttentionPool) -> None:
    worlds = [make_world(dtype=torch.float32, num_keys=[600 + 50 * n], seed=n) for n in range(3)]
    wrong: list[int] = []

    def call(n: int) -> None:
        expected = worlds[n].dense(torch.float64)[0]
        for _ in range(20):
            out, _lse = worlds[n].native(pool, None)
            if (out.double() - expected).abs().max() > 1e-5:
                wrong.append(n)

    threads = [threading.Thread(target=call, args=(n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_attend_blocks_q_in_fp32_over_a_bf16_pool_equals_dense_float64(pool: native.AttentionPool) -> None:
    world = make_world(dtype=torch.bfloat16, num_keys=[50])
    mixed = World(world.q.float() * 1.001, *(getattr(world, n) for n in list(World.__dataclass_fields__)[1:]))
    assert_close_enough(mixed, *mixed.native(pool, None))


def test_reference_attend_blocks_equals_reference_attend() -> None:
    world = make_world(dtype=torch.float32, num_keys=[37, 0, 90], first_key=[5, 0, 17], num_rows=[2, 1, 1])
    out, lse = kv_tiles.attend_blocks(
        world.q,
        kv_tiles.pack_k(world.k),
        kv_tiles.pack_v(world.v),
        block_ids=world.block_ids,
        first_key=world.first_key,
        num_keys=world.num_keys,
        row_offsets=world.row_offsets,
        scale=0.125,
    )
    k, v = (world.visible(0, part, None, torch.float32) for part in (world.k, world.v))
    expected = attend(world.q[:2], k, v, scale=0.125)
    assert torch.equal(out[:2], expected[0])
    assert torch.equal(lse[:2], expected[1])
    assert torch.equal(lse[2], torch.full((8,), -torch.inf))


def test_exp2_is_within_two_ulp(isa: str) -> None:
    x = torch.linspace(-126, 127, 300_001)
    y = torch.empty_like(x)
    _native.exp2(x.numpy(), y.numpy(), isa=isa)
    expected = torch.exp2(x.double())
    ulp = torch.exp2(torch.floor(torch.log2(expected)) - 23)
    assert ((y.double() - expected).abs() / ulp).max() <= 2


def test_read_depends_on_every_byte() -> None:
    threads = native.ThreadPool(2)
    buffer = torch.zeros(1001, dtype=torch.uint8)
    buffer[::100] = 1
    first = threads.read(buffer)
    buffer[1000] = 3
    assert threads.read(buffer) == first + 2


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"block_offsets": [0, 1, 3]}, "request 1 has ids 1 to 3 of 2"),
        ({"num_keys": [16, 17]}, "17 from 0 on do not lie in its 1 blocks of 16"),
        ({"first_key": [-1, 0]}, "16 from -1 on"),
        ({"row_offsets": [0, 2, 1]}, "rows 2 to 1"),
        ({"row_offsets": [1, 2, 3]}, "expected to begin with 0"),
        ({"block_ids": [-1, 0]}, "expected ids from 0 on, got -1"),
        ({"num_keys": [16]}, r"num_keys: expected 2 for R \(axis 0\), got 1"),
    ],
)
def test_key_batch_numbers_that_do_not_fit_are_refused(numbers: dict[str, list[int]], message: str) -> None:
    good = {
        "block_ids": [0, 1],
        "block_offsets": [0, 1, 2],
        "first_key": [0, 0],
        "num_keys": [16, 16],
        "row_offsets": [0, 1, 2],
    }
    with pytest.raises(ShapeError, match=message):
        native.KeyBatch(**{name: torch.tensor(x) for name, x in (good | numbers).items()}, block_size=16)


@pytest.mark.parametrize(
    ("flaw", "message"),
    [
        ({"q": torch.zeros(2, 4, 64)}, "q: expected 1 for the rows of the batch"),
        ({"q": torch.zeros(1, 3, 64)}, "q: has 3 heads, not a multiple of the 2 of k"),
        ({"q": torch.zeros(1, 4, 80)}, "k: expected rows of 96 numbers, head_dim padded"),
        ({"q": torch.zeros(1, 4, 64, dtype=torch.float64)}, r"expected one of .*, got torch\.float64"),
        ({"q": torch.zeros(1, 64, 4).transpose(1, 2)}, "expected a contiguous tensor on cpu"),
        ({"v_pool": torch.zeros(2, 2, 16, 64)}, "v: expected 3 for an axis of k"),
        ({"k_pool": torch.zeros(2, 1, 16, 64)}, "names block 2, k has 1 blocks"),
        ({"k_pool": torch.zeros(2, 3, 32, 64)}, "axis of k"),
        ({"k_scales": torch.zeros(2, 3, 16)}, "scales go with int8 and int4, and with nothing else"),
        ({"scale": 0.0}, "scale: expected a positive number, got 0"),
        ({"isa": "mmx"}, 'unknown "mmx"'),
    ],
)
def test_attend_blocks_arguments_that_do_not_fit_are_refused(
    pool: native.AttentionPool, flaw: dict[str, object], message: str
) -> None:
    batch = native.KeyBatch(*(torch.tensor(x) for x in ([2], [0, 1], [0], [10], [0, 1])), block_size=16)
    arguments: dict[str, object] = {
        "q": torch.zeros(1, 4, 64),
        "k_pool": torch.zeros(2, 3, 16, 64),
        "v_pool": torch.zeros(2, 3, 16, 64),
        "scale": 1.0,
    }
    arguments |= flaw
    if isinstance(k_pool := flaw.get("k_pool"), Tensor) and "axis of k" not in message:
        arguments["v_pool"] = torch.zeros_like(k_pool)
    with pytest.raises(ShapeError, match=message):
        pool.attend_blocks(batch=batch, **arguments)  # type: ignore[arg-type]  # mixed types are the point


def test_thread_pool_of_no_threads_is_refused() -> None:
    with pytest.raises(ValueError, match="num_threads: expected 1 to 32767, got 0"):
        native.ThreadPool(0)


def test_thread_pool_says_how_many_threads_it_has_and_how_many_have_no_processor_of_their_own() -> None:
    num_processors = len(os.sched_getaffinity(0))
    for num_threads in (1, num_processors, num_processors + 2):
        threads = native.ThreadPool(num_threads)
        assert threads.num_threads == num_threads
        assert threads.num_pin_failures == (num_threads - 1 if num_threads > num_processors else 0)
