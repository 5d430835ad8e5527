"""The lanes of decode steps that read keys in DRAM beside the CPU's: the stream lane, and under the bounded policy the
scan lane."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass

from ambidex.attention.bounded_scan import MIN_SCANNED_BLOCKS, BoundedScan
from ambidex.attention.scan_rule import ScanAlways, ScanRule
from ambidex.attention.scanned import ScanLane, why_no_scan_lane
from ambidex.attention.streamed import LaneRates, measure_lane_rates, why_no_stream
from ambidex.core.config import EngineConfig
from ambidex.core.errors import ConfigError
from ambidex.core.ids import Tier
from ambidex.core.policy import PolicyName
from ambidex.engine.compose.choices import Choices
from ambidex.kernels.dispatch import choose
from ambidex.runner.decode import DecodeForm
from ambidex.storage.host_memory import HostMemory
from ambidex.storage.kv_pool import KVPool
from ambidex.storage.tiled_pool import TiledKVPool

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StreamChoice:
    """Which share of the keys in DRAM the GPU reads over the link in decode steps, and why; the rates, if measured."""

    share: float
    why: str
    rates: LaneRates | None = None


@dataclass(frozen=True, slots=True)
class ScanChoice:
    """Which decode steps scan their keys in DRAM, and what the GPU scans with; `why_no_lane`: why it has no part."""

    rule: ScanRule | ScanAlways | None = None
    lane: ScanLane | None = None
    why_no_lane: str | None = None


def explain_stream(stream: StreamChoice, scan: ScanChoice) -> str:
    """Why the share of the keys in DRAM is what it is, and whether it is so of those that are scanned."""
    return stream.why + (f"; of scanned ones 0: {scan.why_no_lane}" if scan.why_no_lane is not None else "")


def choose_scan(
    choices: Choices,
    bounded: BoundedScan | None,
    stream: StreamChoice,
    min_scanned: int | None,
    memory: HostMemory,
) -> ScanChoice:
    """How decode steps beside a GPU scan keys under the bounded policy.

    Args:
        min_scanned: whole blocks in DRAM from which they do; None: as follows from measured rates, if there are any.
    """
    if bounded is None or Tier.DRAM not in bounded.copies or choices.decode_form is DecodeForm.PROGRAM:
        return ScanChoice()
    copy, kv = bounded.copies[Tier.DRAM], choices.kv.specs[Tier.DRAM]
    lane, why_no_lane = None, why_no_scan_lane(kv) if stream.share > 0 else None
    if stream.share > 0 and choices.stream is not None and choices.stream.scan_blocks:
        why_no_lane = copy.pin(memory) if choices.device.type == "cuda" else None
        if why_no_lane is None:
            lane = ScanLane(
                choices.spec, copy, choices.device, max_mass=bounded.max_mass, max_blocks=choices.stream.scan_blocks
            )
            bounded.lane_kept = lane.shown_kept
        else:
            logger.warning("the GPU scans no keys in DRAM, decode is slower: the copy is not pinned: %s", why_no_lane)
    rule: ScanRule | ScanAlways = ScanAlways((min_scanned or MIN_SCANNED_BLOCKS) * kv.block_size)
    if stream.rates is not None and min_scanned is None:
        link = stream.rates.link if stream.share > 0 else 0.0
        rule = ScanRule(
            link + stream.rates.dram,
            link=link,
            scan_rate=(link if lane is not None else 0.0) + stream.rates.dram,
            exact_bytes=kv.bytes_per_token_layer,
            scanned_bytes=kv.num_kv_heads * copy.key_bytes,
            kept_bytes=kv.num_kv_heads * copy.kept_bytes,
        )
    return ScanChoice(rule, lane, why_no_lane)


def choose_stream(config: EngineConfig, choices: Choices, pools: Mapping[Tier, KVPool]) -> StreamChoice:
    """Which share of the keys in DRAM the GPU reads over the link in decode steps.

    Raises:
        ConfigError: a share is asked for that cannot be had.
    """
    reason = find_no_stream(choices, pools)
    dtypes = choices.kv.specs[Tier.DRAM].dtypes
    if reason is None and config.stream_percent is None and dtypes.k.has_scales:
        reason = f"the CPU reads {dtypes} where it lies; `stream_percent` asks for the link beside it"
    if reason is None and config.stream_percent != 0 and (choices.stream is None or not choices.stream.step_blocks):
        reason = "the part of the GPU's budget that is for streamed keys holds no block of a layer"
    dram = pools[Tier.DRAM]
    if reason is not None or not isinstance(dram, TiledKVPool):
        if config.policy is PolicyName.FLEXGEN and choices.device.type == "cuda":
            raise ConfigError(
                f"`policy` flexgen reads all keys in DRAM over the link, which cannot be had: {reason}: change that, "
                f"or use `policy` exact"
            )
        if config.stream_percent:
            raise ConfigError(f"`stream_percent` {config.stream_percent} cannot be had, use 0: {reason}")
        rates = None
        if choices.bounded.is_native and choices.device.type == "cuda" and isinstance(dram, TiledKVPool):
            rates = measure_lane_rates(dram, reads_link=False) if dram.num_blocks else None
        return StreamChoice(0.0, str(reason), rates)
    if config.stream_percent is not None and not choices.bounded.is_native:
        return StreamChoice(config.stream_percent / 100, "asked for")
    rates = measure_lane_rates(dram, reads_link=choices.device.type == "cuda")
    if config.stream_percent is not None:
        return StreamChoice(config.stream_percent / 100, "asked for", rates)
    return StreamChoice(rates.share, str(rates), rates)


def find_no_stream(choices: Choices, pools: Mapping[Tier, KVPool]) -> str | None:
    """Why decode steps have no stream lane; None if they have one."""
    dram = pools[Tier.DRAM]
    if choices.device.type != "cuda":
        return "there is no GPU that could read DRAM over a link"
    if choices.decode_form is not DecodeForm.CAPTURED:
        return f"decode steps are not captured: {choices.decode_form_why}"
    name = choices.policy.settings.name
    if name.has_fixed_steps:
        return f"policy {name} has the link for chosen rows"
    dtypes = choices.kv.specs[Tier.DRAM].dtypes
    if choices.bounded.is_native and dtypes.k.has_scales:
        return f"the accelerator has no bounded scan of keys in {dtypes}"
    for op in ("unpack_blocks", "attend_paged") if dtypes.k.has_scales else ("attend_tiles",):
        if choose(op, choices.device.type).name != "triton":
            return choose(op, choices.device.type).reason
    if not isinstance(dram, TiledKVPool) or not dram.num_blocks:
        return "no K and V lie in DRAM in tile order"
    if not dram.is_pinned:
        return "the driver refused to pin the DRAM tier"
    return why_no_stream(choices.spec, choices.kv.specs)
