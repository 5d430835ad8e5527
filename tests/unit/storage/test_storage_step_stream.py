"""`StepStream`: each layer's blocks are there when they are read and stay until they were, whoever is late."""

import gc
import random
import threading
import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ambidex.core.dtypes import DType
from ambidex.core.errors import LaneError
from ambidex.core.ids import Tier
from ambidex.core.kv_spec import STEP_BUFFERS, KVOrder, KVSpec
from ambidex.kernels.cpu.native import AttentionPool, ThreadPool
from ambidex.storage import step_stream
from ambidex.storage.step_stream import BlockRun, StepStream
from ambidex.storage.tiled_pool import TiledKVPool
from ambidex.storage.words import HostWords, KernelWords

NUM_LAYERS, NUM_BLOCKS, MOST = 7, 12, 8
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


class LateWords(HostWords):
    """Words that are written and read late, at random."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)

    def write(self, word: Tensor) -> None:
        time.sleep(self._rng.choice([0, 0, 1e-3]))
        super().write(word)

    def wait(self, word: Tensor) -> None:
        super().wait(word)
        time.sleep(self._rng.choice([0, 0, 1e-3]))


def make_pool(device: str) -> TiledKVPool:
    spec = KVSpec(
        num_layers=NUM_LAYERS, num_kv_heads=2, head_dim=32, dtype=DType.FP16, block_size=16, order=KVOrder.TILES
    )
    pool = TiledKVPool(spec, Tier.DRAM, NUM_BLOCKS, native=AttentionPool(ThreadPool(1)), pinned=device == "cuda")
    generator = torch.Generator().manual_seed(0)
    for part in (pool.k, pool.v):
        part.copy_(torch.randn(part.shape, generator=generator))
    return pool


def draw_runs(rng: random.Random) -> list[BlockRun]:
    runs: list[BlockRun] = []
    place = 0
    while place < MOST and rng.random() < 0.8:
        num = rng.randint(1, MOST - place)
        runs.append(BlockRun(first=rng.randint(0, NUM_BLOCKS - num), place=place, num=num))
        place += num
    return runs


def run_step(stream: StepStream, pause: Callable[[], None] = lambda: None) -> list[tuple[Tensor, Tensor]]:
    """What the accelerator finds in each layer."""
    found = []
    for layer_idx in range(NUM_LAYERS):
        stream.wait(layer_idx)
        pause()
        k, v = stream.layer(layer_idx)
        found.append((k.clone(), v.clone()))
        stream.free(layer_idx)
    stream.finish()
    return found


def check(pool: TiledKVPool, runs: list[BlockRun], found: list[tuple[Tensor, Tensor]]) -> None:
    for layer_idx, parts in enumerate(found):
        for part, source in zip(parts, pool.layer(layer_idx), strict=True):
            for run in runs:
                got = part[:, run.place : run.place + run.num].cpu()
                assert torch.equal(got, source[:, run.first : run.first + run.num]), (layer_idx, run)


@pytest.mark.parametrize("seed", range(6))
def test_blocks_are_right_whoever_is_late(seed: int) -> None:
    rng, pool = random.Random(seed), make_pool("cpu")
    stream = StepStream(pool, MOST, torch.device("cpu"), LateWords(seed))
    for _ in range(4):
        runs = draw_runs(rng)
        stream.start(runs)
        check(pool, runs, run_step(stream, lambda: time.sleep(rng.choice([0, 0, 2e-3]))))


@pytest.mark.gpu
@pytest.mark.parametrize("least_copy_bytes", [0, 2**40])
@pytest.mark.parametrize("late", ["copies", "computation", "none"])
def test_blocks_are_right_on_a_gpu_whoever_is_late(
    late: str, least_copy_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the copy engine, and fetched by threads."""
    monkeypatch.setattr(step_stream, "LEAST_COPY_BYTES", least_copy_bytes)
    gc.collect()  # what earlier tests pinned is unpinned here, which waits for the device, not in between
    rng, pool, device = random.Random(1), make_pool("cuda"), torch.device("cuda")
    stream = StepStream(pool, MOST, device, KernelWords())
    torch.cuda._sleep(1)
    with stream.inline(draw_runs(rng)):
        run_step(stream)  # loads the kernels that the test uses
    for _ in range(5):
        runs = draw_runs(rng)
        torch.cuda.synchronize()
        if late == "copies":
            with stream._copies.active():
                torch.cuda._sleep(20_000_000)
        stream.start(runs)
        found = run_step(stream, lambda: torch.cuda._sleep(3_000_000) if late == "computation" else None)
        torch.cuda.synchronize()
        check(pool, runs, found)


@pytest.mark.parametrize("kind", [RuntimeError, OSError])
def test_a_first_copy_that_cannot_be_launched_fails_the_step_and_the_next_is_right(
    kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = make_pool("cpu")
    stream = StepStream(pool, MOST, torch.device("cpu"), HostWords())
    runs = [BlockRun(first=1, place=0, num=5)]

    def fail(_layer_idx: int) -> tuple[Tensor, ...]:
        raise kind("injected")

    with monkeypatch.context() as patch:
        patch.setattr(pool, "layer_tensors", fail)
        with pytest.raises(LaneError, match="could not bring keys from DRAM: injected"):
            stream.start(runs)
    stream.start(runs)
    check(pool, runs, run_step(stream))


@pytest.mark.parametrize("num_at_once", [0, 8])
def test_the_first_layers_are_sent_by_whoever_comes_first(num_at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_stream, "MOST_RUNS_AT_ONCE", num_at_once)
    pool = make_pool("cpu")
    stream = StepStream(pool, MOST, torch.device("cpu"), HostWords())
    for runs in ([BlockRun(first=1, place=0, num=5)], [BlockRun(first=0, place=0, num=2), BlockRun(4, 2, 1)]):
        stream.start(runs)
        check(pool, runs, run_step(stream))


@pytest.mark.parametrize("kind", [RuntimeError, OSError])
def test_a_copy_that_cannot_be_launched_fails_the_step_and_the_next_is_right(
    kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error of another kind than torch's (Triton's are) ended the thread: the accelerator waited for ever."""
    pool = make_pool("cpu")
    stream = StepStream(pool, MOST, torch.device("cpu"), HostWords())
    runs = [BlockRun(first=1, place=0, num=5)]
    layer, num_calls = pool.layer_tensors, 0

    def fail(layer_idx: int) -> tuple[Tensor, ...]:
        nonlocal num_calls
        num_calls += 1
        if layer_idx == 2:
            raise kind("injected")
        return layer(layer_idx)

    with monkeypatch.context() as patch:
        patch.setattr(pool, "layer_tensors", fail)
        stream.start(runs)
        with pytest.raises(LaneError, match="could not bring keys from DRAM: injected"):
            run_step(stream)
        assert num_calls == STEP_BUFFERS + 1
    stream.start(runs)
    check(pool, runs, run_step(stream))


def test_copies_that_are_not_launched_in_time_end_the_step_and_the_next_is_right(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The thread may be held up by what waits for the device, which waits for the thread."""
    pool = make_pool("cpu")
    stream = StepStream(pool, MOST, torch.device("cpu"), HostWords())
    runs = [BlockRun(first=1, place=0, num=5)]
    layer, may_go_on = pool.layer_tensors, threading.Event()

    def hang(layer_idx: int) -> tuple[Tensor, ...]:
        if layer_idx == 1:
            may_go_on.wait(30)
        return layer(layer_idx)

    with monkeypatch.context() as patch:
        patch.setattr(pool, "layer_tensors", hang)
        patch.setattr(step_stream, "MOST_RUNS_AT_ONCE", 0)
        patch.setattr(step_stream, "WAIT_LIMIT_S", 0.2)
        stream.start(runs)
        with pytest.raises(LaneError, match="launched no copies"):
            stream.finish()
        for layer_idx in range(NUM_LAYERS):  # nothing waits any more
            stream.wait(layer_idx)
            stream.free(layer_idx)
        # It began the next step all the same, for which late copies of the last one would have counted.
        with pytest.raises(LaneError, match="the last step's copies were not launched"):
            stream.start(runs)
        may_go_on.set()
    stream.start(runs)
    check(pool, runs, run_step(stream))


def test_a_step_that_breaks_off_before_it_is_launched_holds_up_no_copies_and_the_next_is_right(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The copies waited for layers that were never launched, in this step and all that followed."""
    monkeypatch.setattr(step_stream, "WAIT_LIMIT_S", 5.0)
    pool = make_pool("cpu")
    stream = StepStream(pool, MOST, torch.device("cpu"), HostWords())
    runs = [BlockRun(first=1, place=0, num=5)]
    stream.start(runs)
    stream.release()
    stream.start(runs)
    check(pool, runs, run_step(stream))


def test_copies_that_wait_for_a_step_are_launched_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = make_pool("cpu")
    stream = StepStream(pool, MOST, torch.device("cpu"), HostWords())
    runs, launched, asked = [BlockRun(first=1, place=0, num=5)], threading.Event(), []
    layer, is_there = pool.layer_tensors, threading.Event()

    def note(layer_idx: int) -> tuple[Tensor, ...]:
        asked.append(layer_idx)
        if layer_idx == STEP_BUFFERS - 1:
            is_there.set()
        return layer(layer_idx)

    with monkeypatch.context() as patch:
        patch.setattr(pool, "layer_tensors", note)
        patch.setattr(step_stream, "LONG_LAUNCH_S", 30.0)
        stream.start(runs, launched)
        assert is_there.wait(30), "the first copies wait for nothing"
        for layer_idx in range(STEP_BUFFERS):
            stream.wait(layer_idx)
            stream.free(layer_idx)
        assert asked == list(range(STEP_BUFFERS))
        launched.set()
        for layer_idx in range(STEP_BUFFERS, NUM_LAYERS):
            stream.wait(layer_idx)
            stream.free(layer_idx)
        stream.finish()
    assert asked == list(range(NUM_LAYERS))


def test_a_launch_that_waits_for_copies_gets_them_in_time() -> None:
    """Neither went on: a step of a thousand launches was taken only when its first layers were through."""
    pool = make_pool("cpu")
    stream = StepStream(pool, MOST, torch.device("cpu"), HostWords())
    runs = [BlockRun(first=1, place=0, num=5)]
    stream.start(runs, threading.Event())
    check(pool, runs, run_step(stream))


@pytest.mark.parametrize("device", DEVICES)
def test_an_inline_step_needs_no_words(device: str) -> None:
    pool = make_pool(device)
    stream = StepStream(pool, MOST, torch.device(device), KernelWords() if device == "cuda" else HostWords())
    for runs in ([BlockRun(first=3, place=0, num=MOST)], [], [BlockRun(first=11, place=0, num=1)]):
        with stream.inline(runs):
            found = run_step(stream)
        check(pool, runs, found)
    stream.start(runs)
    check(pool, runs, run_step(stream))
