"""`Promotions`: copies blocks of DRAM to the accelerator while a step is computed.

    accelerator    | step …                                   |
    link           | block | block | block |  what the step reads itself goes between them
                   begin                                        finish: waits for the last, which has mostly arrived

Nobody reads a target before its copy is reported as finished, so a step never waits for one of its own.
"""

import ctypes
import logging
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ambidex.core.errors import CopyError
from ambidex.core.ids import MoveId, Tier
from ambidex.core.step import BlockMove
from ambidex.kernels import tiles
from ambidex.kernels.cuda.copy2d import RunCopies
from ambidex.storage.copy import CopyBlock, MoveOutcome, copy_block
from ambidex.storage.kv_pool import KVPool
from ambidex.storage.side_stream import SideStream
from ambidex.storage.tiled_pool import TiledKVPool

logger = logging.getLogger(__name__)


class Promotions:
    """Copies blocks on a stream of its own.

    Args:
        pools: the pool of each tier.
        copy: how one block is copied, in the stream's order or at once; a test may hand in one that fails.
    """

    def __init__(self, pools: Mapping[Tier, KVPool], *, copy: CopyBlock = copy_block) -> None:
        self._pools = dict(pools)
        self._copy = copy
        self._stream = SideStream(pools[Tier.GPU].device)
        self._begun: list[MoveId] = []
        self._failed: list[MoveId] = []
        self._last_failure = ""

    def begin(self, moves: Sequence[BlockMove]) -> None:
        """Launch copies, each for itself, behind what the current stream was given before.

        Cost: some launches a block; waits for nothing where host memory is pinned.
        """
        if not moves:
            return
        self._stream.wait_for_current()
        with self._stream.active():
            for move in moves:
                (self._begun if self._try_copy(move) else self._failed).append(move.move_id)

    def finish(self) -> MoveOutcome:
        """Wait for what was begun: what arrived, and what did not."""
        begun, failed = tuple(self._begun), tuple(self._failed)
        self._begun.clear()
        self._failed.clear()
        # Of a copy that failed some launches may have been taken.
        if (begun or failed) and not self._try_sync():
            return MoveOutcome(finished=(), failed=begun + failed)
        return MoveOutcome(finished=begun, failed=failed)

    def _try_copy(self, move: BlockMove) -> bool:
        source, target = move.source, move.target
        try:
            self._copy(self._pools[source.tier], source.block_id, self._pools[target.tier], target.block_id)
        except (CopyError, RuntimeError) as error:  # torch's, of a device or an allocator
            self._note_failure(f"block {source.block_id} of {source.tier} was not copied to the accelerator: {error}")
            return False
        return True

    def _try_sync(self) -> bool:
        try:
            self._stream.wait_here()
        except RuntimeError as error:
            self._note_failure(f"the stream of promoted blocks failed: {error}")
            return False
        return True

    def _note_failure(self, words: str) -> None:
        """What fails in every step is said once."""
        logger.log(logging.DEBUG if words == self._last_failure else logging.WARNING, "%s", words)
        self._last_failure = words


class TileCopy:
    """Copies blocks of a pinned pool in tile order into a pool of rows on a GPU: the copy engine brings a block as it
    is, and the GPU lays out its rows.

    Args:
        source: within reach of the device of `target`.
        target: of rows, in a floating format.
    """

    def __init__(self, source: TiledKVPool, target: KVPool) -> None:
        self._source, self._target = source, target
        spec, device = source.spec, target.device
        heads = spec.num_layers * spec.num_kv_heads
        self._tiles = [
            torch.empty((heads, 1, *part.shape[3:]), dtype=part.dtype, device=device) for part in source.tensors
        ]
        # [L · Hkv, N, …] → [L · Hkv, 1, …]
        self._copies = [
            RunCopies(part.flatten(0, 1), staged) for part, staged in zip(source.tensors, self._tiles, strict=True)
        ]
        rows = (heads, spec.block_size, spec.head_dim)
        self._k, self._v = (torch.empty(rows, dtype=target.k.dtype, device=device) for _ in range(2))

    def __call__(self, source: KVPool, source_id: int, target: KVPool, target_id: int) -> None:
        """Launch a copy of one block; one buffer serves them all, in the stream's order.

        Raises:
            CopyError: it is a block of other pools, or the driver refuses.
        """
        if source is not self._source or target is not self._target:
            raise CopyError(f"blocks of tier {source.tier} are not brought to tier {target.tier} in this way")
        stream = ctypes.c_void_p(torch.cuda.current_stream(target.device).cuda_stream)
        for copies in self._copies:
            copies.launch(stream, first=source_id, place=0, num=1)
        k, v, *scales = self._tiles
        k_scales, v_scales = scales or (None, None)
        tiles.unpack_blocks(k, v, self._k, self._v, k_scales=k_scales, v_scales=v_scales)
        for pool, rows in ((target.k, self._k), (target.v, self._v)):
            to: Tensor = pool[:, :, target_id]  # [L, Hkv, P, D]
            to.copy_(rows.view(to.shape))
