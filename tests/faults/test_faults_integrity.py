"""`--verify`: a changed byte fails the request that owns it before anything is computed from it; a copy that arrives
changed is a failed move. Without it nothing is checked."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ambidex import EngineConfig, FinishReason
from ambidex.core.config import DeviceKind, DTypeChoice, KVDTypeChoice
from ambidex.core.dtypes import DType
from ambidex.core.ids import BlockId, RequestId, Tier
from ambidex.core.kv_spec import KVOrder, KVSpec
from ambidex.core.step import BlockRef, ScheduledRequest, StepPlan, StepResult
from ambidex.engine.compose import build_engine
from ambidex.engine.engine import Engine
from ambidex.kernels.cpu.native import AttentionPool, ThreadPool
from ambidex.runner.runner import ModelRunner
from ambidex.runner.verified import VerifiedExecutor
from ambidex.storage.checksums import BlockChecksums, VerifiedCopy
from ambidex.storage.copy import copy_block
from ambidex.storage.kv_pool import KVPool, RowKVPool
from ambidex.storage.tiled_pool import TiledKVPool
from fault_runs import GREEDY, PROMPTS, SPLIT, run, tokens

CPU = torch.device("cpu")
DEVICES = [DeviceKind.CPU, pytest.param(DeviceKind.CUDA, marks=pytest.mark.gpu)]
FORMATS = {
    "tiles": {},
    "rows": {"block_size": 12, "kv_gpu_tokens": 96},  # no multiple of 16: no tile order
    "int8": {"kv_dtype": KVDTypeChoice.INT8},
    "k=int8,v=int4": {"kv_dtype": "k=int8,v=int4"},
    "int4": {"kv_dtype": "int4"},
    "no tokens on the accelerator": {"kv_gpu_tokens": 0, "num_sink_tokens": 0},
}


def make_engine(
    folder: Path, *, device: DeviceKind = DeviceKind.CPU, copy: Any = copy_block, **settings: Any
) -> Engine:
    config = EngineConfig(
        model=str(folder), device=device, dtype=DTypeChoice.FP32, num_threads=1, **{**SPLIT, **settings}
    )
    return build_engine(config, copy=copy)


class Recorder:
    """Copies, and remembers the last block that came to DRAM."""

    def __init__(self) -> None:
        self.pool: KVPool | None = None
        self.block_id = -1

    def __call__(self, source: KVPool, source_id: int, target: KVPool, target_id: int) -> None:
        copy_block(source, source_id, target, target_id)
        self.pool, self.block_id = target, target_id


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", FORMATS)
def test_a_healthy_engine_verifies_and_answers_the_same(folder: Path, name: str, device: DeviceKind) -> None:
    settings = FORMATS[name]
    # In chunks of one size: keys of a chunk see those before it as their tier's format has rounded them.
    wanted = tokens(run(make_engine(folder, device=device, max_tokens_per_step=40, **settings)))
    engine = make_engine(folder, device=device, verify=True, max_tokens_per_step=40, **settings)
    assert tokens(run(engine)) == wanted
    assert engine.stats.num_verified_blocks > 20
    assert engine.stats.num_corrupt_blocks == 0
    assert engine.stats.num_failed_moves == 0


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("name", "part"), [("tiles", 0), ("tiles", 1), ("rows", 0), ("int8", 1), ("int8", 3)])
def test_a_flipped_bit_fails_the_request_that_owns_it_and_others_finish(
    folder: Path, name: str, part: int, device: DeviceKind
) -> None:
    wanted = tokens(run(make_engine(folder, device=device, **FORMATS[name])))
    copy = Recorder()
    engine = make_engine(folder, device=device, copy=copy, verify=True, **FORMATS[name])
    flips: Iterator[None] = iter_flip(engine, copy, part)
    ids = [engine.add(prompt, GREEDY) for prompt in PROMPTS]
    outputs = {}
    while engine.has_work:
        outputs |= {output.request_id: output for output in engine.step()}
        next(flips, None)
    answers = [outputs[request_id] for request_id in ids]
    failed = [output for output in answers if output.finish_reason is FinishReason.ERROR]
    assert len(failed) == 1
    assert "has changed since it was written (checksum" in (failed[0].error or "")
    for output, answer in zip(answers, wanted, strict=True):
        assert output.token_ids == answer[: len(output.token_ids)]
        assert output in failed or len(output.token_ids) == len(answer)
    assert engine.stats.num_corrupt_blocks == engine.stats.num_failed_requests == 1
    assert tokens(run(engine)) == wanted


def iter_flip(engine: Engine, copy: Recorder, part: int) -> Iterator[None]:
    """Flips one bit of the block that came to DRAM last, once answers have begun."""
    while engine.stats.num_output_tokens < 4 or copy.pool is None:
        yield
    block = copy.pool.tensors[part][:, :, copy.block_id]
    block[1, 0].view(torch.uint8).view(-1)[5] ^= 1


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["tiles", "rows", "int8"])
def test_a_copy_that_arrives_changed_is_a_failed_move(
    folder: Path, name: str, device: DeviceKind, caplog: pytest.LogCaptureFixture
) -> None:
    num_copies = 0

    def corrupting(source: KVPool, source_id: int, target: KVPool, target_id: int) -> None:
        nonlocal num_copies
        copy_block(source, source_id, target, target_id)
        if source.device.type == "cuda":
            torch.cuda.synchronize()
        num_copies += 1
        if num_copies % 3:
            k, v = (rows.clone(memory_format=torch.contiguous_format) for rows in target.read_block(target_id))
            v[-1, -1, 7, 3] += 3.0
            target.write_block(target_id, k, v)

    wanted = tokens(run(make_engine(folder, device=device, **FORMATS[name])))
    engine = make_engine(folder, device=device, copy=corrupting, verify=True, **FORMATS[name])
    assert tokens(run(engine)) == wanted
    assert engine.stats.num_failed_moves == num_copies - num_copies // 3 > 0
    assert engine.stats.num_moves > 0
    assert engine.stats.num_corrupt_blocks == 0
    assert "1 of" in caplog.text
    assert "arrived changed in block" in caplog.text


def test_nothing_is_checked_unless_it_is_asked_for(folder: Path) -> None:
    engine = make_engine(folder)
    assert isinstance(engine.core.executor, ModelRunner)
    run(engine)
    assert engine.stats.num_verified_blocks == 0


def make_pool(dtype: DType, order: KVOrder, tier: Tier, num_blocks: int) -> KVPool:
    spec = KVSpec(num_layers=2, num_kv_heads=2, head_dim=40, dtype=dtype, block_size=16, order=order)
    if order is KVOrder.TILES:
        return TiledKVPool(spec, tier, num_blocks, native=AttentionPool(ThreadPool(1)), pinned=False)
    return RowKVPool(spec, tier, num_blocks, device=CPU, pinned=False)


@pytest.mark.parametrize("dtype", [DType.FP32, DType.BF16, DType.FP16, DType.INT8])
def test_every_bit_of_every_part_of_a_block_counts(dtype: DType) -> None:
    pool = make_pool(dtype, KVOrder.TILES, Tier.DRAM, 4)
    for block_id in range(4):
        pool.write_block(block_id, torch.randn(2, 2, 16, 40), torch.randn(2, 2, 16, 40))
    checksums = BlockChecksums(pool)
    for block_id in range(4):
        checksums.note(block_id)
    generator = torch.Generator().manual_seed(3)
    for part in pool.tensors:
        for _ in range(10):
            record = part[:, :, 2].view(torch.uint8)
            place = tuple(int(torch.randint(size, (), generator=generator)) for size in record.shape)
            bit = 1 << int(torch.randint(8, (), generator=generator))
            record[place] ^= bit
            with pytest.raises(Exception, match="KV block 2 on tier dram has changed"):
                checksums.check(2)
            assert 2 not in checksums
            for block_id in (0, 1, 3):
                checksums.check(block_id)
            record[place] ^= bit
            checksums.note(2)


@pytest.mark.parametrize("dtype", [DType.FP32, DType.BF16, DType.INT8])
def test_rows_that_are_not_finite_or_are_zero_arrive_unchanged(dtype: DType) -> None:
    source = make_pool(DType.FP32, KVOrder.ROWS, Tier.GPU, 2)
    target = make_pool(dtype, KVOrder.TILES, Tier.DRAM, 2)
    for part in source.tensors:
        part.zero_()
    if dtype is not DType.INT8:
        source.k[0, 0, 1, 3] = torch.nan
        source.v[1, 1, 1, 5, 7] = torch.inf
    VerifiedCopy(copy_block, BlockChecksums(target))(source, 1, target, 0)


def test_blocks_are_checked_in_turn_and_a_change_is_found_within_one_round() -> None:
    pool = make_pool(DType.BF16, KVOrder.TILES, Tier.DRAM, 12)
    checksums = BlockChecksums(pool)
    ids = [3, 0, 11, 7, 1, 9, 4]
    for part in pool.tensors:
        part.zero_()
    for block_id in ids:
        checksums.note(block_id)
    blocks = tuple(BlockRef(Tier.DRAM, BlockId(block_id)) for block_id in [*ids, 5])
    request = ScheduledRequest(
        request_id=RequestId("a"), token_ids=(1,), start=len(ids) * 16, blocks=blocks, is_sampled=False
    )
    executor = VerifiedExecutor(
        lambda _: StepResult(), checksums, device=CPU, sample_bytes=3 * pool.spec.bytes_per_block + 5
    )
    for changed in (0, 11, 4, 9):
        executor.execute(StepPlan(requests=(request,)))  # a round begins anywhere
        pool.k[1, 0, changed, 2, 5] += 1
        results = [executor.execute(StepPlan(requests=(request,))) for _ in range(3)]
        assert [result.num_verified_blocks for result in results] == [3, 3, 3] or sum(
            result.num_corrupt_blocks for result in results
        )
        found = [failure for result in results for failure in result.failures.values()]
        assert len(found) == 1
        assert f"KV block {changed} on tier dram" in found[0]
        checksums.note(changed)


def test_a_changed_block_fails_every_request_that_shares_it_and_no_other() -> None:
    pool = make_pool(DType.BF16, KVOrder.TILES, Tier.DRAM, 6)
    checksums = BlockChecksums(pool)
    for part in pool.tensors:
        part.zero_()
    for block_id in (0, 1):
        checksums.note(block_id)

    def reader(name: str, block_id: int, own: int) -> ScheduledRequest:
        blocks = tuple(BlockRef(Tier.DRAM, BlockId(each)) for each in (block_id, own))
        return ScheduledRequest(request_id=RequestId(name), token_ids=(1,), start=16, blocks=blocks, is_sampled=False)

    plan = StepPlan(requests=(reader("a", 0, 2), reader("b", 0, 3), reader("c", 1, 4)))
    executor = VerifiedExecutor(lambda _: StepResult(), checksums, device=CPU)
    pool.k[0, 0, 0, 2, 5] += 1
    result = executor.execute(plan)
    assert set(result.failures) == {"a", "b"}
    assert result.num_corrupt_blocks == 1


def test_a_changed_block_is_not_found_by_later_requests(folder: Path) -> None:
    """The prefix cache forgets what a failed request has left behind."""
    engine = make_engine(
        folder, verify=True, prefix_cache_percent=100, kv_gpu_tokens=0, num_sink_tokens=0, block_size=16
    )
    prompt = PROMPTS[0]
    wanted = tokens(run(engine, [prompt]))
    assert tokens(run(engine, [prompt])) == wanted
    num_cached = engine.stats.num_cached_tokens
    assert num_cached > 0
    pool = engine.core.executor._checksums.pool  # type: ignore[attr-defined]
    for block_id in range(pool.num_blocks):
        if block_id in engine.core.executor._checksums:  # type: ignore[attr-defined]
            pool.k[0, 0, block_id].view(torch.uint8).view(-1)[3] ^= 1
    failed = run(engine, [prompt])[0]
    assert failed.finish_reason is FinishReason.ERROR
    assert tokens(run(engine, [prompt])) == wanted
    assert engine.stats.num_corrupt_blocks > 0
