"""`Workload`: the traffic that a prediction is for, and `KVShares`: where its keys and values are attended."""

from dataclasses import dataclass

from ambidex.core.errors import ConfigError
from ambidex.core.kv_dtypes import KVDTypes


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Decode steps of `batch` requests with `context` tokens each in the cache, after prompts of `prompt` tokens that
    were computed in chunks of at most `chunk` tokens.

    Raises:
        ConfigError: a number is below 1.
    """

    batch: int = 1
    context: int = 2048
    prompt: int = 2048
    chunk: int = 512
    kv_dtypes: KVDTypes | None = None
    """Formats of K and V in DRAM; None: that of the weights' 16-bit form."""

    def __post_init__(self) -> None:
        for name in ("batch", "context", "prompt", "chunk"):
            if getattr(self, name) < 1:
                raise ConfigError(f"`{name}` is {getattr(self, name)}: it must be at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class KVShares:
    """Shares of the tokens of a context, adding up to 1: those in GPU memory, those in DRAM that the CPU attends over,
    and those in DRAM that travel to the GPU in every step."""

    on_gpu: float = 1.0
    on_cpu: float = 0.0
    streamed: float = 0.0

    def __post_init__(self) -> None:
        shares = (self.on_gpu, self.on_cpu, self.streamed)
        if not all(0.0 <= share <= 1.0 for share in shares) or abs(sum(shares) - 1.0) > 1e-6:
            raise ConfigError(f"shares of keys {shares} must be fractions that add up to 1")
