"""Copies of hot blocks on the accelerator under the bounded policy: whether there are any, how many, who makes them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from ambidex.core.config import EngineConfig
from ambidex.core.errors import ConfigError
from ambidex.core.ids import Tier
from ambidex.core.kv_spec import KVSpec
from ambidex.core.policy import PolicyName
from ambidex.core.units import MIB
from ambidex.engine.bounded_form import BoundedForm
from ambidex.engine.report import ReportRow
from ambidex.formats.control_trace import Decision
from ambidex.kv.manager import KVManager
from ambidex.runner.decode import DecodeForm
from ambidex.sched.hot import HotBlocks
from ambidex.storage.copy import CopyBlock, copy_block
from ambidex.storage.kv_pool import KVPool
from ambidex.storage.promotions import Promotions, TileCopy
from ambidex.storage.tiled_pool import TiledKVPool

_BYTES_OF_STEP: Final = 64 * MIB
"""Of the accelerator that a step's copies fill, at least one block: over PCIe 5 x16 somewhat more than 1 ms."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HotChoice:
    """At most `most` blocks have copies, for which contexts leave `num_reserved` blocks of the accelerator tier; and
    why. `most` 0: there are none."""

    most: int
    num_reserved: int
    why: str


def find_no_hot(config: EngineConfig, form: DecodeForm, bounded: BoundedForm) -> str | None:
    """Why there are no copies of hot blocks; None if there can be."""
    if config.policy is not PolicyName.BOUNDED:
        return f"`policy` {config.policy} has none"
    if config.hot_tokens == 0:
        return "asked for"
    if not bounded.is_native:
        return bounded.why
    if form not in (DecodeForm.FIXED, DecodeForm.CAPTURED):
        return "without a GPU both tiers lie in host memory"
    return None


def staging_bytes(specs: Mapping[Tier, KVSpec]) -> int:
    """Bytes of the accelerator through which a block comes: as it lies in DRAM, and its rows."""
    return specs[Tier.DRAM].bytes_per_block + specs[Tier.GPU].bytes_per_block


def choose_hot(config: EngineConfig, num_blocks: Mapping[Tier, int], why_no_hot: str | None) -> HotChoice:
    """How many copies there may be.

    Raises:
        ConfigError: some are asked for that cannot be had, or leave too little to contexts.
    """
    size, num_gpu = config.block_size, num_blocks.get(Tier.GPU, 0)
    if why_no_hot is None and not num_blocks.get(Tier.DRAM, 0):
        why_no_hot = "no K and V lie in DRAM"
    if why_no_hot is not None:
        if config.hot_tokens:
            raise ConfigError(f"`hot_tokens` {config.hot_tokens} cannot be had, leave it out: {why_no_hot}")
        return HotChoice(most=0, num_reserved=0, why=why_no_hot)
    if config.hot_tokens is None:
        return HotChoice(most=num_gpu, num_reserved=0, why="what is free beside sink and recent tokens")
    num_hot = -(-config.hot_tokens // size)
    # A context's sink, its newest tokens as they were asked for, which lie in one block more than they fill, and the
    # block that it opens next.
    least = -(-config.num_sink_tokens // size) + -(-(config.recent_window or 0) // size) + 2
    if num_hot + least > num_gpu:
        raise ConfigError(
            f"`hot_tokens` {config.hot_tokens} are {num_hot} blocks of {size}: the accelerator tier holds {num_gpu}, "
            f"and sink and recent tokens of one request need {least}: ask for at most "
            f"{max(0, num_gpu - least) * size}, or raise `kv_gpu_tokens` or `gpu_memory`"
        )
    return HotChoice(most=num_hot, num_reserved=num_hot, why="asked for")


def make_hot(
    choice: HotChoice,
    kv: KVManager,
    pools: Mapping[Tier, KVPool],
    copy: CopyBlock,
    tell: Callable[[Decision], None] | None,
) -> HotBlocks | None:
    """Who decides which blocks are copied; None: nobody.

    Args:
        copy: as in `make_promotions`.
    """
    if not choice.most:
        return None
    near = pools[Tier.GPU]
    most_moves = max(1, _BYTES_OF_STEP // near.spec.bytes_per_block)
    if near.device.type == "cuda" and not _brings_tiles(pools, copy):
        most_moves = 1  # the host lays out rows, and the step waits for it
    return HotBlocks(kv, most=choice.most, most_moves=most_moves, tell=tell)


def make_promotions(choice: HotChoice, pools: Mapping[Tier, KVPool], copy: CopyBlock) -> Promotions | None:
    """Who copies them; None: nobody.

    Args:
        copy: how blocks move otherwise: copies take the same way where it is checked or paced.
    """
    if not choice.most:
        return None
    dram = pools[Tier.DRAM]
    if _brings_tiles(pools, copy) and isinstance(dram, TiledKVPool):
        return Promotions(pools, copy=TileCopy(dram, pools[Tier.GPU]))
    return Promotions(pools, copy=copy)


def _brings_tiles(pools: Mapping[Tier, KVPool], copy: CopyBlock) -> bool:
    """Whether the copy engine and the GPU bring blocks without the host."""
    near, dram = pools[Tier.GPU], pools[Tier.DRAM]
    is_plain = copy is copy_block and near.device.type == "cuda"
    return is_plain and isinstance(dram, TiledKVPool) and dram.is_within_reach(near.device)


def hot_row(choice: HotChoice) -> ReportRow:
    """What the report says of them."""
    value = f"copies of up to {choice.most} blocks" if choice.most else "no copies"
    return ReportRow(section="kv", name="hot_blocks", value=value, why=choice.why)
