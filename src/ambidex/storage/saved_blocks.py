"""`SavedBlocks`: copies blocks from the pools into files and back. Which ones, and when, is decided elsewhere.

A block is copied to the host at once and written by a thread of its own; a block that is read goes through a pool of
one block that is like the one it came from, so it lies afterwards as a copy between tiers would have put it.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import Final

import numpy as np
import torch

from ambidex.core.errors import CopyError, IntegrityError
from ambidex.core.ids import Tier
from ambidex.core.kv_spec import KVSpec
from ambidex.core.step import BlockRef, NamedBlock, SavedFigures
from ambidex.core.units import MIB, format_size
from ambidex.storage.block_files import BlockHead, read_block_file, read_block_head, write_block_file
from ambidex.storage.block_folder import BlockFolder
from ambidex.storage.copy import CopyBlock
from ambidex.storage.kv_pool import KVPool, RowKVPool
from ambidex.storage.tiled_pool import TiledKVPool

logger = logging.getLogger(__name__)

MAX_PENDING_BYTES: Final = 64 * MIB
"""Copied, but not written yet; at least one block."""
LAST_FILE_S: Final = 1.0
"""For the file that is being written when time is up; a disk that hangs keeps no engine from ending."""
_NEWEST: Final = 0.3
"""Weight of the newest reading in the mean rate."""


class SavedBlocks:
    """Blocks as files, for one engine.

    Args:
        folder: where they lie.
        identity: names all that K and V depend on beside the tokens.
        pools: the KV of each tier.
        copy: how a block is copied between two pools.
        locate: the block of a pool that the control plane's block is.
    """

    def __init__(
        self,
        folder: BlockFolder,
        identity: bytes,
        pools: Mapping[Tier, KVPool],
        *,
        copy: CopyBlock,
        locate: Callable[[BlockRef], BlockRef],
    ) -> None:
        self._folder = folder
        self._identity = identity
        self._pools = {tier: pool for tier, pool in pools.items() if pool.num_blocks}
        self._copy = copy
        self._locate = locate
        self._scratch: dict[KVSpec, KVPool] = {}
        self._pending: dict[bytes, int] = {}
        self._jobs: queue.SimpleQueue[tuple[BlockHead, memoryview] | None] = queue.SimpleQueue()
        self._num_loaded = 0
        self._num_refused = len(folder.unknown)
        self._has_warned = False  # of a block that is not used
        self._num_failed = 0
        self._read_rate: float | None = None
        self._end_s: float | None = None
        self._num_given_up = 0  # copied, but there was no time to write them
        if folder.unknown:
            logger.warning(
                "the session folder holds %d entries that are none of its own, they are left alone: %s",
                len(folder.unknown), ", ".join(folder.unknown[:3]),
            )  # fmt: skip
        self._writer = threading.Thread(target=self._write_all, name="ambidex-sessions", daemon=True)
        self._writer.start()

    @property
    def read_bytes_per_s(self) -> float | None:
        """How fast blocks have been read so far, into their tier; None: none has been."""
        return self._read_rate

    @property
    def is_writing(self) -> bool:
        """Something that was copied is not written yet."""
        return bool(self._pending)

    def figures(self) -> SavedFigures:
        """Counts since the start, and what lies there now."""
        counts = self._folder.counts()
        return SavedFigures(
            num_blocks=counts.num_blocks,
            num_bytes=counts.num_bytes,
            num_loaded=self._num_loaded,
            num_refused=self._num_refused,
            num_failed=self._num_failed,
        )

    def has(self, key: bytes) -> bool:
        """Whether a block of that name lies there, as far as is known without reading it."""
        return key in self._folder

    def size_of(self, key: bytes) -> int:
        """Bytes of a block's file; 0 if there is none."""
        return self._folder.size_of(key)

    def try_save(self, block: NamedBlock, place: BlockRef) -> bool:
        """Copy a block, which is then written as soon as the disk lets it; False if too much waits to be written.

        A block that lies there already is not written again.
        """
        if block.key in self._folder or block.key in self._pending:
            return True
        place = self._locate(place)
        pool = self._pools[place.tier]
        num_bytes = pool.spec.bytes_per_block
        if self._pending and sum(self._pending.values()) + num_bytes > MAX_PENDING_BYTES:
            return False
        scratch = self._scratch_like(pool)
        self._copy(pool, place.block_id, scratch, 0)
        head = BlockHead(
            identity=self._identity,
            key=block.key,
            parent=block.parent,
            tokens=block.tokens,
            block_idx=block.block_idx,
            owner=block.owner,
            spec=pool.spec,
        )
        payload = torch.cat([part.reshape(-1).view(torch.uint8) for part in scratch.tensors])
        self._pending[block.key] = num_bytes
        self._jobs.put((head, payload.numpy().data))
        return True

    def load(self, block: NamedBlock, place: BlockRef) -> None:
        """Fill a place of a pool with a block.

        Raises:
            IntegrityError: its file is not what was written, or holds another block; it is deleted.
            CopyError: it could not be copied.
        """
        begun_s = time.perf_counter()
        place = self._locate(place)
        try:
            head, payload = read_block_file(self._folder.path_of(block.key, block.block_idx))
            scratch = self._check(block, head)
        except (IntegrityError, OSError) as error:
            self._refuse(block.key, error)
            raise IntegrityError(f"a saved block cannot be used: {error}") from error
        data = torch.from_numpy(np.frombuffer(payload, np.uint8).copy())
        start = 0
        for part in scratch.tensors:
            flat = part.reshape(-1).view(torch.uint8)
            flat.copy_(data[start : start + flat.numel()])
            start += flat.numel()
        try:
            self._copy(scratch, 0, self._pools[place.tier], place.block_id)
        except RuntimeError as error:
            raise CopyError(f"a saved block could not be copied to tier {place.tier}: {error}") from error
        rate = len(payload) / max(time.perf_counter() - begun_s, 1e-9)
        self._read_rate = rate if self._read_rate is None else (1 - _NEWEST) * self._read_rate + _NEWEST * rate
        self._num_loaded += 1

    def touch(self, key: bytes, used_s: float) -> None:
        """A block was of use at a time, in seconds since the epoch."""
        self._folder.touch(key, used_s)

    def drop(self, owner: bytes | None = None) -> int:
        """Delete all blocks, or those of one owner; returns how many. Cost: reads the head of each."""
        self.flush()
        num_dropped = 0
        for key in self._folder.list_keys():
            try:
                is_meant = owner is None or read_block_head(self._folder.path_of(key, 0)).owner == owner
            except (IntegrityError, OSError) as error:
                self._refuse(key, error)
                continue
            num_dropped += is_meant and self._folder.remove(key)
        return num_dropped

    def flush(self) -> None:
        """Wait until all that was copied is written."""
        while self._pending:
            time.sleep(0.001)

    def close(self, end_s: float | None = None) -> int:
        """Write what was copied, and let another engine use the folder.

        Args:
            end_s: a time of `time.monotonic` after which no file is begun; None: all are written.
        Returns:
            Blocks that were copied and not written.
        """
        self._end_s = end_s
        self._jobs.put(None)
        self._writer.join(None if end_s is None else max(0.0, end_s - time.monotonic()) + LAST_FILE_S)
        self._folder.close()
        return self._num_given_up + len(self._pending)

    def _write_all(self) -> None:
        """The thread: write blocks until told to end."""
        while (job := self._jobs.get()) is not None:
            head, payload = job
            if self._end_s is not None and time.monotonic() >= self._end_s:
                self._num_given_up += 1
                del self._pending[head.key]
                continue
            try:
                num_bytes = write_block_file(self._folder.path_of(head.key, head.block_idx), head, [payload])
                self._folder.note(head.key, head.block_idx, num_bytes)
            except Exception as error:  # whatever it is: without this thread the end of the engine would wait for ever
                level = logging.INFO if self._num_failed else logging.WARNING
                self._num_failed += 1
                why = getattr(error, "strerror", None) or error
                logger.log(level, "a block of %s was not saved: %s", format_size(len(payload)), why)
            finally:
                del self._pending[head.key]

    def _check(self, block: NamedBlock, head: BlockHead) -> KVPool:
        """The pool of one block that is like the one the file's block came from.

        Raises:
            IntegrityError: it is another block, of another model or layout.
        """
        if head.identity != self._identity:
            raise IntegrityError("the file is of another model, format or version")
        if (head.key, head.parent, head.tokens) != (block.key, block.parent, block.tokens):
            raise IntegrityError("the file holds other tokens than its name says")
        alike = next((pool for pool in self._pools.values() if pool.spec == head.spec), None)
        if alike is None:
            spec = head.spec
            raise IntegrityError(
                f"the file holds K and V in {spec.dtypes} in {spec.order}, blocks of {spec.block_size} tokens, "
                f"which no tier keeps now"
            )
        return self._scratch_like(alike)

    def _scratch_like(self, pool: KVPool) -> KVPool:
        """A pool of one block in host memory."""
        if pool.spec not in self._scratch:
            if isinstance(pool, TiledKVPool):
                made: KVPool = TiledKVPool(pool.spec, pool.tier, 1, native=pool.native, pinned=False)
            else:
                made = RowKVPool(pool.spec, pool.tier, 1, device=torch.device("cpu"), pinned=False)
            for part in made.tensors:
                part.zero_()  # what pads a row is written to the file, too
            self._scratch[pool.spec] = made
        return self._scratch[pool.spec]

    def _refuse(self, key: bytes, error: Exception) -> None:
        level = logging.INFO if self._has_warned else logging.WARNING
        self._num_refused += 1
        self._has_warned = True
        logger.log(level, "a saved block is not used and deleted: %s", error)
        self._folder.remove(key)
