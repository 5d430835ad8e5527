"""Recorded programs compute again what torch computed, over what their inputs hold by then."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ambidex.core.dtypes import DType
from ambidex.core.errors import InternalError, ShapeError, UnrecordableError
from ambidex.core.ids import Tier
from ambidex.core.kv_spec import KVOrder, KVSpec
from ambidex.kernels import api
from ambidex.kernels.cpu import native
from ambidex.kernels.cpu.linear import LinearPool, Matrices
from ambidex.kernels.cpu.native import AttentionPool, KeyBatch, ThreadPool
from ambidex.kernels.cpu.recorded import Arena, Program, Recording
from ambidex.storage.tiled_pool import TiledKVPool

WIDTH = 12
WEIGHT, BIAS = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(1))

OPS: dict[str, Callable[[Tensor], Tensor]] = {
    "add": lambda x: x + BIAS,
    "add a number": lambda x: x + 0.5,
    "multiply": lambda x: x * WEIGHT,
    "multiply columns": lambda x: x * x[:, :1],
    "halve": lambda x: x * 0.5,
    "cos": torch.cos,
    "sin": torch.sin,
    "relu": torch.relu,
    "silu": F.silu,
    "gelu": F.gelu,
    "layer norm": lambda x: F.layer_norm(x, (WIDTH,), WEIGHT, BIAS, 1e-5),
    "layer norm without bias": lambda x: F.layer_norm(x, (WIDTH,), WEIGHT, None, 1e-5),
    "rms norm": lambda x: api.rms_norm(x.contiguous(), WEIGHT, 1e-5),
    "silu mul": lambda x: api.silu_mul(x.contiguous(), (x * 2).contiguous()),
    "transpose": lambda x: x.view(-1, 3, 4).transpose(1, 2).flatten(1),
    "repeat the middle": lambda x: x.view(-1, 3, 4)[:, 1:2].expand(-1, 3, 4).flatten(1),
    "repeat a half": lambda x: x.split(6, dim=-1)[1].unsqueeze(1).expand(-1, 2, 6).reshape(-1, WIDTH),
    "copy": lambda x: torch.empty_like(x).copy_(x),
    "clone": torch.clone,
}


def record(compute: Callable[[], Tensor], arena: Arena | None = None) -> tuple[Program, Tensor]:
    recording = Recording(arena or Arena())
    with recording:
        result = compute()
    return recording.program, result


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@torch.inference_mode()
@settings(max_examples=60, deadline=None)
@given(
    names=st.lists(st.sampled_from(sorted(OPS)), min_size=1, max_size=8),
    num_rows=st.integers(1, 5),
    seed=st.integers(0, 2**20),
)
def test_a_program_gives_for_new_numbers_what_torch_gives(names: list[str], num_rows: int, seed: int) -> None:
    def compute(x: Tensor) -> Tensor:
        kept = []  # results that live on, others whose memory is used again
        for place, name in enumerate(names):
            x = OPS[name](x)
            if place % 3 == 1:
                kept.append(x)
        for other in kept:
            x = x + other
        return x

    x = randn(num_rows, WIDTH, seed=seed)
    wanted = compute(x.clone())
    program, result = record(lambda: compute(x))
    torch.testing.assert_close(result, wanted, rtol=1e-5, atol=1e-5)
    for again in range(2):
        x.copy_(randn(num_rows, WIDTH, seed=seed + 1 + again))
        program.run()
        torch.testing.assert_close(result, compute(x.clone()), rtol=1e-5, atol=1e-5)


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_tables_and_positions(dtype: torch.dtype) -> None:
    table, ids = randn(9, WIDTH).to(dtype), torch.tensor([3, 8, 3])
    inv_freq = randn(4).abs()

    def compute() -> Tensor:
        angles = (ids + 2).to(torch.float32)[:, None] * inv_freq
        return F.embedding(ids, table).to(torch.float32) * angles.cos()[:, :1]

    program, result = record(compute)
    torch.testing.assert_close(result, compute())
    ids.copy_(torch.tensor([0, 1, 5]))
    program.run()
    torch.testing.assert_close(result, compute())
    ids[1] = 9
    with pytest.raises(ShapeError, match="expected 0 to 9"):
        program.run()


@torch.inference_mode()
def test_an_op_without_native_form_is_named_and_the_thread_can_record_again() -> None:
    x = randn(2, WIDTH)
    with pytest.raises(UnrecordableError, match="tanh"):
        record(lambda: torch.tanh(x))
    with pytest.raises(UnrecordableError, match="factor"):
        record(lambda: torch.add(x, x, alpha=2))
    with pytest.raises(UnrecordableError, match="float64"):
        record(lambda: x.double())
    program, _ = record(lambda: x + x)
    assert program.num_ops == 1


@torch.inference_mode()
def test_what_is_computed_outside_is_not_recorded() -> None:
    x = randn(2, WIDTH)
    program, result = record(lambda: x + 1)
    api.rms_norm(x, WEIGHT, 1e-5)
    assert program.num_ops == 1
    with pytest.raises(ValueError, match="has been recorded"):
        program.native.begin()
    program.run()
    torch.testing.assert_close(result, x + 1)


@torch.inference_mode()
def test_programs_share_memory_that_none_needs_between_runs() -> None:
    """Layers reuse the memory of those before; a second program takes none of its own."""
    x, arena = randn(4, 256), Arena()

    def compute() -> Tensor:
        y = x
        for _ in range(40):
            y = (y * 0.5) + x
        return y

    first, result = record(compute, arena)
    num_bytes = arena.num_bytes
    assert num_bytes <= 4 * x.nbytes
    wanted = result.clone()
    alias = arena.alias(result)
    del result
    second, other = record(compute, arena)
    assert arena.num_bytes == num_bytes
    x.mul_(2)
    first.run()
    torch.testing.assert_close(alias, wanted * 2)
    x.mul_(2)
    second.run()
    torch.testing.assert_close(other, wanted * 4)


@torch.inference_mode()
def test_a_view_made_by_numpy_keeps_its_memory() -> None:
    """A view of a view named another owner than the arena watched, and its memory was given out again."""
    arena = Arena()
    view = arena.new_array((4, 4), np.float32).reshape(-1)[2:].view(np.int32)
    others = [arena.new_array((4, 4), np.float32) for _ in range(3)]
    assert not any(np.shares_memory(view, other) for other in others)
    del view
    assert arena.new_array((4, 4), np.float32) is not None
    assert arena.num_bytes == 4 * 64


@torch.inference_mode()
def test_products_of_a_program_outlive_who_made_them() -> None:
    threads = ThreadPool(2)
    pool, x, weight = LinearPool(threads), randn(3, 32), randn(70, 32, seed=1)
    program, result = record(lambda: pool.multiply(Matrices([weight], [None]), x)[0])
    program.keep(pool, weight)
    x.copy_(randn(3, 32, seed=2))
    program.run()
    torch.testing.assert_close(result, x @ weight.T, rtol=1e-5, atol=1e-5)


def make_pool(dtype: DType, head_dim: int = 40) -> TiledKVPool:
    spec = KVSpec(num_layers=1, num_kv_heads=2, head_dim=head_dim, dtype=dtype, block_size=16, order=KVOrder.TILES)
    pool = TiledKVPool(spec, Tier.DRAM, 4, native=AttentionPool(ThreadPool(1)), pinned=False)
    for tensor in pool.tensors:
        tensor.zero_()
    return pool


@torch.inference_mode()
@pytest.mark.parametrize("isa", native.available_isas())
@pytest.mark.parametrize("dtype", [DType.FP32, DType.BF16, DType.FP16, DType.INT8])
def test_stored_values_are_those_that_torch_rounds(dtype: DType, isa: str) -> None:
    pool, wanted = make_pool(dtype), make_pool(dtype)
    rows = randn(7, 2, 40) * torch.tensor([1e-9, 1e-6, 1e-3, 1.0, 100.0, 6e4, 0.0])[:, None, None]
    rows[3, 0, :8] = torch.tensor([0.5, 1.5, 2.5, -0.5, 127.0, -127.0, 65519.0 if dtype is DType.FP16 else 3.0, 1e-7])
    slots = torch.tensor([5, 17, 16, 63, 0, 31, 40])
    wanted.store(0, slots, rows, rows.flip(2))
    (k, v), (k_scales, v_scales) = pool.layer(0), pool.scales(0)
    pool.native.store_values("k", k, slots, rows, scales=k_scales, isa=isa)
    pool.native.store_values("v", v, slots, rows.flip(2), scales=v_scales, isa=isa)
    for got, want in zip(pool.tensors, wanted.tensors, strict=True):
        assert torch.equal(got, want)


@torch.inference_mode()
def test_a_negative_slot_is_stored_nowhere_and_one_outside_is_refused() -> None:
    pool = make_pool(DType.BF16)
    rows = randn(2, 2, 40)
    pool.native.store_values("k", pool.layer(0)[0], torch.tensor([-1, -1]), rows)
    assert not pool.k.any()
    with pytest.raises(ShapeError, match="64"):
        pool.native.store_values("k", pool.layer(0)[0], torch.tensor([-1, 64]), rows)


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [DType.FP32, DType.INT8])
def test_attention_of_a_program_follows_its_keys(dtype: DType) -> None:
    pool = make_pool(dtype)
    for block_id in range(4):
        pool.write_block(block_id, randn(1, 2, 16, 40, seed=block_id), randn(1, 2, 16, 40, seed=9 + block_id))
    q = randn(2, 4, 40)

    def arrays(ids: list[int], offsets: list[int], first: list[int], num: list[int]) -> list[np.ndarray]:
        return [np.array(values, np.int64) for values in (ids, offsets, first, num, [0, 1, 2])]

    def attend(batch: KeyBatch) -> Tensor:
        (k, v), (k_scales, v_scales) = pool.layer(0), pool.scales(0)
        return pool.native.attend_blocks(q, k, v, batch, scale=0.2, k_scales=k_scales, v_scales=v_scales)[0]

    def make_batch(keys: list[np.ndarray]) -> KeyBatch:
        return KeyBatch(*map(torch.from_numpy, keys), block_size=16)

    batch = make_batch(arrays([1], [0, 1, 1], [0, 0], [3, 0]))
    program, result = record(lambda: attend(batch))
    for keys in (arrays([3, 0, 2], [0, 1, 3], [2, 5], [10, 27]), arrays([], [0, 0, 0], [0, 0], [0, 0])):
        batch.assign(*keys)
        program.run()
        torch.testing.assert_close(result, attend(make_batch(keys)))
    batch.assign(*arrays([4], [0, 1, 1], [0, 0], [1, 0]))
    with pytest.raises(ShapeError, match="names block 4"):
        program.run()
    with pytest.raises(ShapeError, match="do not lie in"):
        batch.assign(*arrays([1], [0, 1, 1], [0, 0], [17, 0]))
    with pytest.raises(InternalError):
        program.run()
    batch.assign(*arrays([2], [0, 1, 1], [1, 0], [15, 0]))
    program.run()
    torch.testing.assert_close(result, attend(make_batch(arrays([2], [0, 1, 1], [1, 0], [15, 0]))))
