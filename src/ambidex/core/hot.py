"""Hot blocks: which blocks of DRAM have copies on the accelerator, what that is decided by, and what came of it."""

from dataclasses import dataclass

from ambidex.core.step import BlockRef


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockScore:
    """What is known of a block in host memory: `score`, its kept keys of all looks, the older the less; `num_looks` in
    which keys of it were kept."""

    block: BlockRef
    score: int
    num_looks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HotState:
    """`wanted` blocks shall have copies, the hottest first, at most `most` of them, which measured times lower and
    raise; in `num_slow` looks, one after the other, steps with copies were the slower ones. The next look is the
    `interval`-th step from this one."""

    scores: tuple[BlockScore, ...] = ()
    wanted: tuple[BlockRef, ...] = ()
    most: int
    num_slow: int = 0
    interval: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HotLook:
    """What a look saw: `kept` keys by block; `room`, places of the accelerator that copies may have; seconds of the
    look itself, which attended no copies, and of the fastest step with them since the last one (None: there was
    none)."""

    kept: tuple[tuple[BlockRef, int], ...]
    room: int
    look_s: float
    step_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class HotDecision:
    """What became of a state by a look."""

    before: HotState
    look: HotLook
    after: HotState


@dataclass(frozen=True, slots=True, kw_only=True)
class HotFigures:
    """`num_blocks` have copies now. Since the start: copies that arrived, and that were given up; keys that looks saw
    kept of blocks in host memory, and those of them whose block had a copy."""

    num_blocks: int = 0
    num_promoted: int = 0
    num_dropped: int = 0
    num_looks: int = 0
    num_kept: int = 0
    num_hits: int = 0

    @property
    def hit_rate(self) -> float:
        """Share of the kept keys whose block had a copy; 0 if none were kept."""
        return self.num_hits / self.num_kept if self.num_kept else 0.0
