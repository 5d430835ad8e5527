"""Report rows on what became of settings that are given in tokens and kept in blocks."""

from collections.abc import Iterator

from ambidex.core.config import EngineConfig
from ambidex.core.regions import Regions
from ambidex.engine.report import ReportRow


def region_rows(config: EngineConfig, *, num_gpu_blocks: int, max_context_len: int) -> Iterator[ReportRow]:
    """What stays on the accelerator tier, where that is not what was asked for word by word.

    Args:
        num_gpu_blocks: blocks of the accelerator tier.
        max_context_len: tokens of the longest context.
    """
    size, asked = config.block_size, config.kv_gpu_tokens
    if asked is not None and asked != num_gpu_blocks * size:
        yield ReportRow(
            section="kv",
            name="kv_gpu_tokens",
            value=f"{num_gpu_blocks * size} tokens",
            why=f"{asked} were asked for: rounded up to blocks of {size}",
        )
    if config.recent_window is None:
        yield ReportRow(section="kv", name="recent_window", value="as many as fit", why="none was asked for")
        return
    regions = Regions(block_size=size, num_sink_tokens=config.num_sink_tokens, recent_window=config.recent_window)
    # The window moves through its blocks, so at the worst place it touches one more than at the best.
    lens = range(max(1, max_context_len - size), max_context_len + 1)
    num_sink = max(regions.num_sink_blocks(length) for length in lens)
    num_recent = max(regions.num_recent_blocks(length) for length in lens)
    if num_sink + num_recent <= num_gpu_blocks:
        value, why = (
            f"up to {num_recent * size} tokens",
            f"{config.recent_window} were asked for: whole blocks of {size}",
        )
    else:
        # The order in which a context's share of the tier is filled: kv/residency.py.
        newest = min(1, num_gpu_blocks)
        left = max(0, num_gpu_blocks - newest - num_sink)
        value = f"at most {(newest + left) * size} tokens"
        why = (
            f"{config.recent_window} were asked for, with the sink {num_sink + num_recent} blocks of {size}: the "
            f"accelerator tier holds {num_gpu_blocks} for all requests"
        )
    yield ReportRow(section="kv", name="recent_window", value=value, why=why)
