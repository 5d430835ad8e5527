"""What keeps the prefix cache on disk, made from the settings."""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from ambidex.core.config import EngineConfig
from ambidex.core.errors import ConfigError
from ambidex.core.ids import Tier
from ambidex.core.step import BlockRef
from ambidex.core.units import format_size
from ambidex.engine.compose.choices import Choices
from ambidex.engine.sessions import Sessions, session_folder
from ambidex.engine.stats import EngineStats
from ambidex.formats.fingerprint import fingerprint
from ambidex.kv.manager import KVManager
from ambidex.storage.block_folder import BlockFolder
from ambidex.storage.copy import CopyBlock
from ambidex.storage.kv_pool import KVPool
from ambidex.storage.saved_blocks import SavedBlocks


@dataclass(frozen=True, slots=True)
class CacheIdentity:
    """All that K and V depend on beside the tokens, as text, and how it is written into files."""

    text: str

    @property
    def digest(self) -> bytes:
        """32 bytes."""
        return hashlib.blake2b(self.text.encode(), digest_size=32).digest()


def find_identity(config: EngineConfig, choices: Choices) -> CacheIdentity:
    """Of one engine; where blocks outlive it, also the content of the weights, and the version that computed them.

    Raises:
        ConfigError: blocks are to be kept on disk, but there is no prefix cache, or K and V are not exact.
        ModelError: the files cannot be read.
    """
    skipped = None if choices.sparsity is None else str(choices.sparsity.sparsity)
    formats = sorted(choices.kv.specs.items())
    parts: list[object] = [choices.source.name, choices.spec, choices.dtype, formats, skipped]
    if config.session_dir is not None:
        if not config.prefix_cache_percent:
            raise ConfigError("`session_dir` needs a prefix cache: set `prefix_cache_percent`, too")
        if choices.sparsity is not None and not choices.sparsity.is_exact:
            raise ConfigError(
                f"`session_dir` keeps what other engines use, too, and `mlp_sparsity` {skipped} computes K and V by a "
                f"profile or a predictor that may change: leave one out"
            )
        parts[0] = fingerprint(choices.source.files)
        parts += [config.load_format, config.seed, _version()]
    return CacheIdentity(repr(tuple(parts)))


def make_sessions(
    config: EngineConfig,
    identity: CacheIdentity,
    pools: Mapping[Tier, KVPool],
    copy: CopyBlock,
    kv: KVManager,
    stats: Callable[[], EngineStats],
    locate: Callable[[BlockRef], BlockRef],
) -> Sessions | None:
    """What keeps blocks on disk, and decides which; None: nobody asked for it.

    Args:
        stats: gives those of the engine, once it is built.
        locate: the block of a pool that the control plane's block is.
    Raises:
        ConfigError: the folder cannot be used, or the quota holds not one block.
    """
    place = session_folder(config)
    if place is None:
        return None
    block_bytes = max((pool.spec.bytes_per_block for pool in pools.values() if pool.num_blocks), default=0)
    if config.session_quota <= block_bytes:
        raise ConfigError(
            f"`session_quota` is {format_size(config.session_quota)}: a block of {config.block_size} tokens takes "
            f"{format_size(block_bytes)} and its head: give more, or a smaller `block_size`"
        )
    folder = BlockFolder(place, identity.digest, config.session_quota)
    store = SavedBlocks(folder, identity.digest, pools, copy=copy, locate=locate)
    return Sessions(kv, store, compute_rate=lambda: _compute_rate(stats()))


def _compute_rate(stats: EngineStats) -> float | None:
    return stats.num_prefill_tokens / stats.prefill_seconds if stats.prefill_seconds else None


def _version() -> str:
    try:
        return version("ambidex")
    except PackageNotFoundError:
        return "0"
