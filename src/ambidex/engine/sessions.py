"""`Sessions`: cached blocks that outlive the process. Decides which are saved, and whether a request loads or computes.

Blocks of ended requests are saved one a step, and all of them while the engine is idle. A request that is about to
start, and of whose blocks more lie on disk than in memory, gets them from there if reading them takes less time than
computing their tokens would, by the rates measured so far.
"""

import hashlib
import itertools
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from ambidex.core.config import EngineConfig
from ambidex.core.errors import ConfigError, CopyError, IntegrityError
from ambidex.core.ids import RequestId
from ambidex.core.request import Request
from ambidex.core.step import BlockRef, NamedBlock, SavedFigures
from ambidex.engine.stats import EngineStats
from ambidex.formats.folder_lock import FolderLock
from ambidex.kv.block_keys import BlockKey, BlockKeys
from ambidex.kv.manager import KVManager, PrefixHit

logger = logging.getLogger(__name__)


class BlockStore(Protocol):
    """What keeps blocks on disk (`storage/saved_blocks.py`)."""

    @property
    def read_bytes_per_s(self) -> float | None:
        """How fast blocks have been read so far; None: none has been."""

    @property
    def is_writing(self) -> bool:
        """Something that was copied is not written yet."""

    def figures(self) -> SavedFigures:
        """Counts."""

    def has(self, key: bytes) -> bool:
        """Whether a block of that name lies there."""

    def size_of(self, key: bytes) -> int:
        """Its bytes."""

    def try_save(self, block: NamedBlock, place: BlockRef) -> bool:
        """Copy a block; False if too much waits to be written."""

    def load(self, block: NamedBlock, place: BlockRef) -> None:
        """Fill a place with a block.

        Raises:
            IntegrityError, CopyError: it cannot be used.
        """

    def touch(self, key: bytes, used_s: float) -> None:
        """A block was of use."""

    def drop(self, owner: bytes | None = None) -> int:
        """Delete blocks."""

    def close(self, end_s: float | None = None) -> int:
        """Write what was copied, until a time of `time.monotonic`; returns how many blocks were not."""


class Sessions:
    """Joins the prefix cache and what keeps its blocks on disk.

    Args:
        compute_rate: tokens of prompts computed per second so far; None: none has been.
    """

    def __init__(self, kv: KVManager, store: BlockStore, *, compute_rate: Callable[[], float | None]) -> None:
        self._kv = kv
        self._store = store
        self._compute_rate = compute_rate
        self._num_restored_tokens = 0
        self._num_recomputed_tokens = 0

    @property
    def has_unsaved(self) -> bool:
        """Cached blocks may be left that are not on disk, or not yet."""
        return self._kv.has_unsaved or self._store.is_writing

    def restore(self, request: Request, keys: BlockKeys, prefix: PrefixHit) -> bool:
        """Bring blocks from disk into the prefix cache, behind those of a request's prefix that are there.

        Args:
            prefix: what was found of it in this step.
        Returns:
            True if there are more of them now.
        """
        size = self._kv.block_size
        names = keys.first((request.num_tokens - 1) // size, request.token_ids)
        start = len(prefix.blocks)
        found = list(itertools.takewhile(lambda name: self._store.has(name.key), names[start:]))
        if not found:
            return False
        if not self._is_worth_reading(found):
            self._num_recomputed_tokens += len(found) * size
            return False
        lease = self._kv.open(RequestId(f"what is restored for {request.request_id}"), prefix)
        try:
            end = (start + len(found)) * size
            if not self._kv.try_extend(lease, end, num_known_tokens=request.num_tokens):
                return False
            places = self._kv.table(lease, end)[start:]
            num_loaded = self._load(keys, found, places, start)
            self._kv.keep_computed(lease, keys, request.token_ids, (start + num_loaded) * size)
        finally:
            self._kv.release(lease)
        used_s = time.time()
        for name in names[: start + num_loaded]:
            self._store.touch(name.key, used_s)
        self._num_restored_tokens += num_loaded * size
        return num_loaded > 0

    def save_next(self) -> bool:
        """Save one block; False if there is none, or too much waits to be written."""
        block = self._kv.next_unsaved()
        if block is None:
            return False
        named = _named(block.name, block.block_idx, block.tenant)
        if not self._store.try_save(named, block.place):
            self._kv.put_back_unsaved(block)
            return False
        return True

    def drop(self, tenant: str | None) -> int:
        """Delete what is on disk, of one tenant or of all; returns the blocks."""
        return self._store.drop(None if tenant is None else _owner(tenant))

    def record(self, stats: EngineStats) -> None:
        """Note the counts as they stand."""
        figures = self._store.figures()
        stats.num_saved_blocks, stats.saved_bytes = figures.num_blocks, figures.num_bytes
        stats.num_refused_files, stats.num_failed_saves = figures.num_refused, figures.num_failed
        stats.num_restored_tokens = self._num_restored_tokens
        stats.num_recomputed_tokens = self._num_recomputed_tokens

    def close(self, *, is_trusted: bool = True, save_s: float | None = None) -> None:
        """Save what is left, unless the engine's state is unknown, and end.

        Args:
            save_s: time for it, in seconds; what is not saved by then is named in the log. None: as long as it takes.
        """
        end_s = None if save_s is None else time.monotonic() + save_s
        while is_trusted and self._kv.has_unsaved and (end_s is None or time.monotonic() < end_s):
            if not self.save_next():
                time.sleep(0.001)
        left = list(iter(self._kv.next_unsaved, None)) if is_trusted else []
        num_left = sum(not self._store.has(block.name.key) for block in left) + self._store.close(end_s)
        if num_left:
            logger.warning(
                "%d blocks of the prefix cache were not saved, there were %.3g s for it: their tokens will be computed "
                "anew", num_left, save_s,
            )  # fmt: skip

    def _load(self, keys: BlockKeys, names: Sequence[BlockKey], places: Sequence[BlockRef], start: int) -> int:
        """Load blocks until one cannot be used; returns how many."""
        for num_loaded, (name, place) in enumerate(zip(names, places, strict=True)):
            try:
                self._store.load(_named(name, start + num_loaded, keys.tenant), place)
            except (IntegrityError, CopyError):  # what keeps them has said so
                return num_loaded
        return len(names)

    def _is_worth_reading(self, names: Sequence[BlockKey]) -> bool:
        num_bytes = sum(self._store.size_of(name.key) for name in names)
        return is_load_faster(
            num_bytes=num_bytes,
            num_tokens=len(names) * self._kv.block_size,
            read_bytes_per_s=self._store.read_bytes_per_s,
            compute_tokens_per_s=self._compute_rate(),
        )


def is_load_faster(
    *, num_bytes: int, num_tokens: int, read_bytes_per_s: float | None, compute_tokens_per_s: float | None
) -> bool:
    """Whether K and V of so many tokens are read sooner than computed; yes where a rate is not known yet, so that it
    becomes known."""
    if read_bytes_per_s is None or compute_tokens_per_s is None:
        return True
    return num_bytes / read_bytes_per_s < num_tokens / compute_tokens_per_s


def _named(name: BlockKey, block_idx: int, tenant: str) -> NamedBlock:
    return NamedBlock(key=name.key, parent=name.parent, tokens=name.tokens, block_idx=block_idx, owner=_owner(tenant))


def _owner(tenant: str) -> bytes:
    return hashlib.blake2b(tenant.encode(), digest_size=16).digest()


def session_folder(config: EngineConfig) -> Path | None:
    """Where blocks are kept on disk; None: nobody asked for it.

    Raises:
        ConfigError: it names the home of a user that there is not.
    """
    try:
        return None if config.session_dir is None else Path(config.session_dir).expanduser()
    except RuntimeError as error:
        raise ConfigError(f"`session_dir` {config.session_dir} cannot be used: {error}") from error


def check_session_folder(config: EngineConfig) -> None:
    """See now whether an engine could use its folder, which it takes once its weights are there.

    Raises:
        ConfigError: it cannot be used, or another engine uses it.
    """
    folder = session_folder(config)
    if folder is not None:
        FolderLock(folder, setting="session_dir").close()
