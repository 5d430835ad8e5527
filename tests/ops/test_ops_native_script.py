"""`AttentionScript`: answers layers in the order in which a stand-in for the accelerator asks for them."""

import threading
import time

import pytest
import torch
from torch import Tensor

from ambidex.core.errors import ShapeError
from ambidex.kernels.cpu.native import WORD_STRIDE, AttentionPool, AttentionScript, KeyBatch, ThreadPool
from ambidex.kernels.reference import kv_tiles

NUM_LAYERS, NUM_ROWS, NUM_HEADS, NUM_KV_HEADS, DIM, BLOCK_SIZE, NUM_BLOCKS = 5, 3, 4, 2, 32, 16, 6
NUM_KEYS = [40, 0, 96]


class World:
    """A script over random pools, and the words and buffers that both sides share."""

    def __init__(self, num_threads: int = 2) -> None:
        generator = torch.Generator().manual_seed(0)
        shape = (NUM_LAYERS, NUM_KV_HEADS, NUM_BLOCKS, BLOCK_SIZE, DIM)
        self.k, self.v = (torch.randn(shape, generator=generator) for _ in range(2))
        self.packed_k, self.packed_v = kv_tiles.pack_k(self.k), kv_tiles.pack_v(self.v)
        self.queries = torch.randn(NUM_LAYERS, NUM_ROWS, NUM_HEADS, DIM, generator=generator)
        self.words = torch.zeros(2, NUM_LAYERS, WORD_STRIDE, dtype=torch.int32)
        self.q = torch.empty(NUM_ROWS, NUM_HEADS, DIM)
        self.out, self.lse = torch.empty_like(self.q), torch.empty(NUM_ROWS, NUM_HEADS)
        self.threads = ThreadPool(num_threads)
        self.script = AttentionScript(AttentionPool(self.threads), self.words[0], self.words[1])
        for layer in range(NUM_LAYERS):
            self.script.add_layer(
                self.q, self.packed_k[layer], self.packed_v[layer], scale=0.2, k_scales=None, v_scales=None,
                out=self.out, lse=self.lse,
            )  # fmt: skip

    @staticmethod
    def batch(num_rows: int = NUM_ROWS) -> KeyBatch:
        """Row 0 sees 40 keys of blocks 0 to 2, row 1 none, row 2 all."""
        ids = [0, 1, 2, *range(NUM_BLOCKS)]
        arrays = (ids, [0, 3, 3, len(ids)], [0, 0, 0], NUM_KEYS, [0, 1, 2, num_rows])
        return KeyBatch(*(torch.tensor(array) for array in arrays), block_size=BLOCK_SIZE)

    def wanted(self, layer: int) -> tuple[Tensor, Tensor]:
        return kv_tiles.attend_blocks(
            self.queries[layer], self.packed_k[layer], self.packed_v[layer],
            block_ids=[[0, 1, 2], [], list(range(NUM_BLOCKS))], first_key=[0, 0, 0], num_keys=NUM_KEYS,
            row_offsets=[0, 1, 2, 3], scale=0.2,
        )  # fmt: skip

    def ask(self, layer: int) -> tuple[Tensor, Tensor]:
        """What the accelerator does in a layer; returns the answer."""
        self.q.copy_(self.queries[layer])
        self.words[0, layer, 0] = 1
        end = time.monotonic() + 60
        while int(self.words[1, layer, 0]) == 0:
            assert time.monotonic() < end, f"layer {layer} was not answered"
            time.sleep(1e-5)
        return self.out.clone(), self.lse.clone()


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_each_layer_is_answered_after_it_was_asked_step_after_step(num_threads: int) -> None:
    world = World(num_threads)
    for _ in range(3):
        world.words.zero_()
        ended: list[int] = []
        lane = threading.Thread(
            target=lambda ended=ended: ended.append(world.script.run([world.batch()] * NUM_LAYERS, limit_s=60))
        )
        lane.start()
        for layer in range(NUM_LAYERS):
            assert world.words[1, layer:, 0].eq(0).all(), "a layer was answered before it was asked"
            out, lse = world.ask(layer)
            wanted_out, wanted_lse = world.wanted(layer)
            torch.testing.assert_close(out, wanted_out, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(lse, wanted_lse, rtol=1e-5, atol=1e-5)
        lane.join()
        assert ended == [NUM_LAYERS]


def test_queries_that_do_not_come_end_the_script_with_the_layers_answered() -> None:
    world = World()
    world.q.copy_(world.queries[0])
    world.words[0, :2, 0] = 1
    assert world.script.run([world.batch()] * NUM_LAYERS, limit_s=0.01) == 2
    assert world.words[1, :, 0].tolist() == [1, 1, 0, 0, 0]


def test_batches_that_do_not_fit_are_refused_before_anything_is_answered() -> None:
    world = World()
    world.words[0] = 1
    with pytest.raises(ShapeError, match="expected 5 layers and batches, got 5 and 4"):
        world.script.run([world.batch()] * 4, limit_s=1)
    with pytest.raises(ShapeError, match="expected 4 for the rows of the batch"):
        world.script.run([world.batch()] * 4 + [world.batch(num_rows=4)], limit_s=1)
    assert world.words[1].eq(0).all()


def test_more_layers_than_words_are_refused() -> None:
    world = World()
    with pytest.raises(ShapeError, match="all 5 layers are there"):
        world.script.add_layer(
            world.q, world.packed_k[0], world.packed_v[0], scale=0.2, k_scales=None, v_scales=None, out=world.out,
            lse=world.lse,
        )  # fmt: skip


def test_words_that_share_a_cache_line_are_refused() -> None:
    words = torch.zeros(2, 3, 1, dtype=torch.int32)
    with pytest.raises(ShapeError, match="a word in each cache line"):
        AttentionScript(AttentionPool(ThreadPool(1)), words[0], words[1])
