"""Metrics of what only some engines have."""

from ambidex.core.hot import HotFigures
from ambidex.engine.pulse import Pulse
from ambidex.engine.stats import EngineStats
from ambidex.engine.status import EngineStatus
from ambidex.server.metrics import Metrics


def metrics_of(stats: EngineStats) -> set[str]:
    """The lines of an engine's metrics."""
    status = EngineStatus(
        stats=stats, num_waiting=0, num_running=0, capacity_bytes={}, weights_bytes={},
        beat=Pulse().now, last_token_s=None,
    )  # fmt: skip
    return set(Metrics(dict).text(status).decode().splitlines())


def test_hot_blocks_are_counted_where_there_can_be_any() -> None:
    hot = HotFigures(num_blocks=3, num_promoted=10, num_dropped=7, num_looks=4, num_kept=80, num_hits=20)
    lines = metrics_of(EngineStats(hot=hot))
    assert {
        "ambidex_hot_blocks 3.0",
        "ambidex_promoted_blocks_total 10.0",
        "ambidex_dropped_copies_total 7.0",
        "ambidex_hot_looks_total 4.0",
        "ambidex_looked_kept_keys_total 80.0",
        "ambidex_looked_hot_keys_total 20.0",
    } <= lines
    assert not any("hot_blocks" in line for line in metrics_of(EngineStats()))
