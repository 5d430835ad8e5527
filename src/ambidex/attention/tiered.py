"""`TieredAttention`: exact attention over keys that lie on several tiers, each attended by its own lane."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from ambidex.attention.chunk_stream import ChunkStream
from ambidex.attention.cpu import CPULane
from ambidex.attention.metadata import NewRows, OldKeys, WindowView, build_step
from ambidex.attention.own import attend_own
from ambidex.attention.parts import PartAttention
from ambidex.attention.readers import Prepared, Reader, make_reader
from ambidex.attention.state import AttentionState, empty, merge, merge_rows
from ambidex.core.errors import ShapeError
from ambidex.core.ids import KVPart, Lane, Tier
from ambidex.core.model_spec import ModelSpec
from ambidex.core.step import ScheduledRequest
from ambidex.kernels import api
from ambidex.storage.kv_pool import KVPool
from ambidex.storage.tile_writer import TileWriter

_LANES = {Tier.GPU: Lane.GPU, Tier.DRAM: Lane.CPU}


class TieredAttention:
    """The attention of one model over the pools of both tiers; what `models.base.AttentionOp` asks for.

    A step is `begin(requests)`, then `attend` once for each layer; `lane_bytes` then says what was read.

    Args:
        spec: heads, windows and head_dim (the scale is head_dim ** -0.5).
        pools: `Tier.GPU`, the accelerator's, and `Tier.DRAM`, in host memory, with blocks of one size; either may have
            zero blocks.
        wrap: what stands in for the reader of a tier; None: the reader itself.
        cpu_lane: None: the plain one.
        stream: attends on the accelerator over keys in DRAM that many queries see; None: the CPU lane does.
        writer: writes new rows into the DRAM pool from the accelerator; None: the host does, and waits for them.

    Attributes:
        pools: as given.
    """

    def __init__(
        self,
        spec: ModelSpec,
        pools: Mapping[Tier, KVPool],
        *,
        wrap: Callable[[Tier, Reader], Reader] | None = None,
        cpu_lane: CPULane | None = None,
        stream: ChunkStream | None = None,
        writer: TileWriter | None = None,
    ) -> None:
        self._scale = spec.head_dim**-0.5
        self._windows = spec.windows
        self.pools = {tier: pools[tier] for tier in _LANES}
        self._has_positions = spec.alibi_slopes is not None
        self._own = PartAttention(self._scale, spec.alibi_slopes, self.pools[Tier.GPU].device)
        self._readers = {
            tier: make_reader(pool, scale=self._scale, slopes=spec.alibi_slopes) for tier, pool in self.pools.items()
        }
        if wrap is not None:
            self._readers = {tier: wrap(tier, reader) for tier, reader in self._readers.items()}
        self._reads_own = [tier for tier, reader in self._readers.items() if reader.reads_own]
        self._cpu = cpu_lane or CPULane()
        self._stream = stream
        self._writer = writer
        self._lanes = (*_LANES.values(), *((Lane.STREAM,) if stream is not None else ()))
        self.begin(())

    @property
    def lane_bytes(self) -> Mapping[Lane, int]:
        """Bytes of visible K and V that each lane read since `begin`; own keys from no pool count for the GPU lane."""
        return dict(self._lane_bytes)

    def begin(self, requests: Sequence[ScheduledRequest]) -> None:
        """Prepare for a step whose T tokens are those of `requests`, in their order.

        Raises:
            InternalError: the blocks of a request do not cover its tokens, or lie on a tier without a pool.
        """
        self._lane_bytes = dict.fromkeys(self._lanes, 0)
        self._step = build_step(
            requests,
            block_size=self.pools[Tier.GPU].spec.block_size,
            windows=self._windows,
            devices={tier: pool.device for tier, pool in self.pools.items()},
            reads_own=self._reads_own,
            has_positions=self._has_positions,
        )
        streamed = {
            window: [part for part in view.old[Tier.DRAM] if self._is_streamed(Tier.DRAM, part)]
            for window, view in self._step.views.items()
        }
        self._cpu_rows: dict[int | None, slice] = {}
        self._prepared: dict[int | None, dict[Tier, Prepared]] = {}
        for window, view in self._step.views.items():
            self._prepared[window] = {}
            for tier, all_parts in view.old.items():
                parts = [part for part in all_parts if not self._is_streamed(tier, part)]
                num_tokens = self._step.num_tokens
                if parts and tier is Tier.DRAM:
                    rows = slice(parts[0].rows.start, parts[-1].rows.stop)
                    parts, num_tokens = [_shifted(part, rows.start) for part in parts], rows.stop - rows.start
                    self._cpu_rows[window] = rows
                if parts:
                    self._prepared[window][tier] = self._readers[tier].prepare(parts, num_tokens)
        self._num_streamed = {
            window: sum(part.keys.stop - part.keys.start for part in parts) for window, parts in streamed.items()
        }
        if self._writer is not None:
            self._writer.begin(requests)
        if self._stream is not None:
            self._stream.begin(streamed)

    def attend(
        self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor, *, angles: tuple[Tensor, Tensor] | None = None
    ) -> Tensor:
        """Store K and V of the step, then attend over the old keys on both tiers and the step's own.

        NOTE: slots of the step are read only where `build_step` counts an own key among the old ones.

        Args:
            q: [T, Hq, D]; k, v: [T, Hkv, D], on the accelerator, in one floating format. K and V are rounded to the
                pools' formats first, so the answer does not depend on when a key is read.
            angles: cos and sin that q and k are rotated by first; None: they are not.
        Returns:
            [T, Hq, D] in the dtype of q.
        Raises:
            ShapeError: T is not what `begin` was told, or the tensors do not fit the pools.
        Cost: on CUDA, waits for q if the CPU attends over old keys in DRAM.
        """
        if q.shape[0] != self._step.num_tokens:
            raise ShapeError(f"q: expected T={self._step.num_tokens} tokens of this step, got {q.shape[0]}")
        if angles is not None:
            q, k = api.rotate(q, *angles), api.rotate(k, *angles)
        window = self._windows[layer_idx]
        view, prepared = self._step.views[window], self._prepared[window]
        for new in self._step.new_rows:
            self._store(layer_idx, new, k, v)
        if self._writer is not None and Tier.DRAM in prepared:
            self._writer.join()  # the CPU lane reads what was just stored, once q has arrived
        cpu_rows = self._cpu_rows.get(window, slice(0, 0))  # the others' queries need not cross the link
        pending = self._cpu.begin(layer_idx, q[cpu_rows], prepared[Tier.DRAM]) if Tier.DRAM in prepared else None
        states = []
        if view.own is not None:
            pool = self.pools[Tier.GPU]
            states.append(attend_own(q, pool.round(KVPart.K, k), pool.round(KVPart.V, v), view.own, self._own))
        if Tier.GPU in prepared:
            states.append(prepared[Tier.GPU].attend(layer_idx, q))
        if self._stream is not None and self._num_streamed[window]:
            states = [self._stream.attend(layer_idx, q, _join(states, q))]
        if pending is not None and cpu_rows == slice(0, len(q)):
            states.append(pending.wait())
        elif pending is not None:
            states = [merge_rows(_join(states, q), pending.wait(), cpu_rows)]
        if self._writer is not None and layer_idx == len(self._windows) - 1:
            self._writer.join()  # moves and later steps read the rows
        self._count_bytes(view, self._num_streamed[window])
        return _join(states, q).out.to(q.dtype)

    def settle(self) -> None:
        """Order what follows behind the rows of a step that broke off: its blocks may soon be another's."""
        if self._writer is not None:
            self._writer.join()

    def _is_streamed(self, tier: Tier, part: OldKeys) -> bool:
        return tier is Tier.DRAM and self._stream is not None and self._stream.takes(part)

    def _count_bytes(self, view: WindowView, num_streamed: int) -> None:
        for tier, num_keys in view.num_keys.items():
            num_here = num_keys - num_streamed if tier is Tier.DRAM else num_keys
            self._lane_bytes[_LANES[tier]] += num_here * self.pools[tier].spec.bytes_per_token_layer
        if num_streamed:
            self._lane_bytes[Lane.STREAM] += num_streamed * self.pools[Tier.DRAM].spec.bytes_per_token_layer

    def _store(self, layer_idx: int, new: NewRows, k: Tensor, v: Tensor) -> None:
        if new.tier is Tier.DRAM and self._writer is not None:
            self._writer.write(layer_idx, k, v)
            return
        pool = self.pools[new.tier]
        k, v = (rows if new.rows is None else rows[new.rows] for rows in (k, v))
        pool.store(layer_idx, new.slots, k.to(pool.device), v.to(pool.device))


def _shifted(part: OldKeys, num_rows: int) -> OldKeys:
    """The part among the rows from `num_rows` on."""
    return replace(part, rows=slice(part.rows.start - num_rows, part.rows.stop - num_rows))


def _join(states: Sequence[AttentionState], q: Tensor) -> AttentionState:
    """The state over all keys, `out` fp32: what is merged again is not rounded."""
    if not states:
        return empty(*q.shape, device=q.device)
    joined = states[0]
    for state in states[1:]:
        joined = merge(joined, state)
    return joined
