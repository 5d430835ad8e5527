"""`EngineStatus`: what can be seen of an engine from another thread, at one moment."""

from dataclasses import dataclass

from ambidex.core.ids import Tier
from ambidex.engine.pulse import Beat
from ambidex.engine.stats import EngineStats


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStatus:
    """Counters as of the last step, and where the engine's thread is now.

    `last_token_s` is a time of `time.monotonic`, None before the first token. `capacity_bytes` is what the KV pools
    hold, `weights_bytes` what the parameters take, on each tier.
    """

    stats: EngineStats
    num_waiting: int
    num_running: int
    capacity_bytes: dict[Tier, int]
    weights_bytes: dict[Tier, int]
    beat: Beat
    last_token_s: float | None
