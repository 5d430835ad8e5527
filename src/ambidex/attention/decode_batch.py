"""`DecodeBatch`: turns the requests of a decode step into the arrays of `DecodeInputs`, and into the CPU lane's keys.

    block        gpu 7 | dram 2 | dram 5 | gpu 4        the newest block is on the accelerator
    table        7  4                                   keys side by side: those of blocks 7 and 4
    streamed     2                                      the first of those in DRAM, for the stream lane: they travel as
                                                        runs of consecutive blocks, and the stream table names their
                                                        places in the accelerator's buffer; where the scan lane has
                                                        its place it reads them where they lie: their ids
    key batch    5                                      the others, for the CPU lane

What changes little from step to step is kept: the block ids of each request as arrays, which of them a row of the
device's table already holds, and the CPU lane's key batches. A step in which no request came, went, moved a block or
opened two sends no table at all.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from ambidex.attention.contexts import Context, Contexts, TierBlocks
from ambidex.attention.decode_inputs import DecodeInputs
from ambidex.core.ids import RequestId, Tier
from ambidex.core.step import BlockRef, ScheduledRequest
from ambidex.kernels.cpu.native import KeyBatch
from ambidex.storage.step_stream import BlockRun


@dataclass(frozen=True, slots=True)
class _SentRow:
    """What a row of the device's table holds: the accelerator's blocks of a context."""

    context: Context
    blocks: tuple[BlockRef, ...]


class DecodeBatch:
    """Prepares decode steps.

    Args:
        inputs: the buffers that are filled.
        block_size: tokens of a block.
        has_cpu_lane: steps may have keys in DRAM.
        stream_share: of each request's blocks in DRAM that the stream lane takes, 0 to 1; 0 where layers have windows.
        max_streamed: blocks that it takes in a step, all requests together.
        scans: from the keys in DRAM of a step, whether the bounded policy scans them; None: it never does.
        scan_share, max_scanned: the same of the scan lane, which has the stream lane's place in such steps.
    """

    def __init__(
        self,
        inputs: DecodeInputs,
        *,
        block_size: int,
        has_cpu_lane: bool,
        stream_share: float = 0.0,
        max_streamed: int = 0,
        scans: Callable[[int], bool] | None = None,
        scan_share: float = 0.0,
        max_scanned: int = 0,
    ) -> None:
        self._inputs = inputs
        self._block_size = block_size
        self._has_cpu_lane = has_cpu_lane
        self.stream_share = stream_share if inputs.windows == (None,) else 0.0
        """May be changed between steps."""
        self._max_streamed = max_streamed
        self._scans = scans
        self.scan_share = scan_share if inputs.windows == (None,) else 0.0
        """Likewise."""
        self._max_scanned = max_scanned
        self.is_scanned = False
        """The step's keys in DRAM are scanned."""
        self._contexts = Contexts(max_requests=inputs.max_rows)
        self._sent: list[_SentRow | None] = [None] * inputs.max_rows
        self._row_starts = np.arange(inputs.max_rows, dtype=np.int64) * inputs.max_blocks
        self._own_sources = inputs.max_rows + np.arange(inputs.max_rows, dtype=np.int64)
        self._widest = None if None in inputs.windows else max(w for w in inputs.windows if w is not None)
        self._grown: list[int] = []  # rows of the table whose newest block the prepared step itself writes
        self._batched: tuple[object, ...] = ()
        self._batched_contexts: tuple[tuple[Context, tuple[BlockRef, ...]], ...] = ()
        self.num_keys: Mapping[int | None, dict[Tier, int]] = {}
        """Keys that the step's attention reads under each window, all requests together."""
        self.key_batches: Mapping[int | None, KeyBatch] | None = None
        """The CPU lane's keys under each window, maybe none; None: no key of this step lies in DRAM."""
        self.dram_ids: NDArray[np.int64] = np.zeros(0, np.int64)
        """The blocks in DRAM that they lie in."""
        self.has_cpu_keys = False
        """Some are the CPU lane's: else all of them travel."""
        self.num_dram_keys = 0
        """All of these requests' keys in DRAM, together."""
        self.num_streamed = 0
        """Keys that the stream lane or the scan lane reads in each layer, all requests together."""
        self.asked_share = 0.0
        """The lane's share when the step was prepared."""
        self.streamed_share = 0.0
        """Of the blocks in DRAM, those of these keys: that share, unless the lane's buffer holds less."""
        self.stream_runs: tuple[BlockRun, ...] = ()
        """The blocks that the stream lane reads."""

    def try_prepare(
        self,
        requests: Sequence[ScheduledRequest],
        num_rows: int,
        last_rows: Mapping[RequestId, int] | None = None,
        *,
        may_see_dram: bool = True,
    ) -> bool:
        """Fill and send the inputs of a step of `num_rows` rows, if the step has the form that they can describe.

        That is: each request has one new token, whose block lies on the accelerator, and no key that it sees lies
        where no lane reads it.

        Args:
            num_rows: at least the number of requests, at most what the inputs hold; the rest is padding.
            last_rows: rows of the step before, by request: there lie the tokens of pending requests.
            may_see_dram: keys in DRAM are part of the form.
        Returns:
            False if a request has another form; then nothing is sent, and no rule is asked whether keys are scanned.
        Cost: about a microsecond a request, and one small copy to the device; where blocks in DRAM came or went, or a
            window moved over them, a microsecond for each thousand of them.
        """
        num = len(requests)
        if not 0 < num <= num_rows or any(len(request.token_ids) != 1 for request in requests):
            return False
        if any(request.blocks[-1].tier is not Tier.GPU for request in requests):
            return False
        positions = np.array([request.start for request in requests], np.int64)
        num_blocks = np.array([len(request.blocks) for request in requests], np.int64)
        last_places = positions // self._block_size
        if (num_blocks != last_places + 1).any() or num_blocks.max() > self._inputs.max_blocks:
            return False
        contexts = self._contexts.update(requests)
        is_split = self._sees_dram(contexts, positions)
        if is_split and not (self._has_cpu_lane and may_see_dram):
            return False
        self._inputs.wait_sent()
        table_rows = self._write_table(contexts, num_rows)
        num_table_blocks = np.array([context.tiers[Tier.GPU].num for context in contexts], np.int64)
        last_blocks = np.array([request.blocks[-1].block_id for request in requests], np.int64)
        host = self._inputs.host(num_rows)
        host.token_ids[:num] = [request.token_ids[0] for request in requests]
        host.sources[:] = self._own_sources[:num_rows]
        if last_rows is not None:
            host.sources[:num] = [
                last_rows[request.request_id] if request.is_pending else source
                for request, source in zip(requests, self._own_sources.tolist(), strict=False)
            ]
        host.positions[:num] = positions
        host.slots[:num] = last_blocks * self._block_size + positions % self._block_size
        host.table_places[:] = self._row_starts[:num_rows]
        host.table_places[:num] += num_table_blocks - 1
        host.last_blocks[:num] = last_blocks
        if num < num_rows:
            host.token_ids[num:], host.positions[num:], host.last_blocks[num:] = 0, 0, 0
            host.slots[num:] = -1
        num_table_keys = (num_table_blocks - 1) * self._block_size + positions % self._block_size + 1
        self.num_keys = {
            window: {Tier.GPU: self._write_keys(window, contexts, positions, num_table_keys, num_rows), Tier.DRAM: 0}
            for window in self._inputs.windows
        }
        stream_rows = range(0)
        if is_split:
            stream_rows = self._make_key_batches(contexts, positions, num_rows)
        else:
            self.key_batches, self._batched, self.num_streamed, self.stream_runs = None, (), 0, ()
            self.is_scanned = self.has_cpu_keys = False
            host.num_streamed[:] = 0
        self._inputs.send(num_rows, table_rows=table_rows, stream_rows=stream_rows)
        return True

    def forget_step(self) -> None:
        """The step that was prepared is not computed: what it was to write into the table may not be there."""
        for row in self._grown:
            self._sent[row] = None
        self._grown = []

    def _sees_dram(self, contexts: Sequence[Context], positions: NDArray[np.int64]) -> bool:
        """Whether any request sees a key that does not lie on the accelerator."""
        dram = [context.tiers[Tier.DRAM] for context in contexts]
        if not any(blocks.num for blocks in dram):
            return False
        if self._widest is None:
            return True
        last_places = np.array([blocks.places[blocks.num - 1] if blocks.num else -1 for blocks in dram], np.int64)
        first_visible = np.maximum(positions - self._widest + 1, 0) // self._block_size
        return bool((last_places >= first_visible).any())

    def _write_table(self, contexts: Sequence[Context], num_rows: int) -> range:
        """Write the rows whose blocks the device does not know into the host's table; returns what must be sent."""
        first, last = num_rows, -1
        sent, self._grown = self._sent, []
        for row, context in enumerate(contexts):
            known = sent[row]
            if known is not None and known.context is context and known.blocks is context.blocks:
                continue
            sent[row] = _SentRow(context, context.blocks)
            if known is None or known.context is not context or not _grew_by_one(known.blocks, context.blocks):
                first, last = min(first, row), row
            else:
                self._grown.append(row)
        sent[len(contexts) : num_rows] = [None] * (num_rows - len(contexts))  # padding writes into its rows
        if last < 0:
            return range(0)
        table = self._inputs.host_table()
        for row in range(first, last + 1):
            blocks = contexts[row].tiers[Tier.GPU]
            table[row, : blocks.num] = blocks.ids[: blocks.num]
        return range(first, last + 1)

    def _write_keys(
        self,
        window: int | None,
        contexts: Sequence[Context],
        positions: NDArray[np.int64],
        num_table_keys: NDArray[np.int64],
        num_rows: int,
    ) -> int:
        """Write which keys of the table each row sees; returns how many all rows see."""
        host, num = self._inputs.host(num_rows), len(positions)
        hidden = np.zeros(num, np.int64)
        if window is not None:
            hidden = self._hidden_rows(Tier.GPU, window, contexts, positions)
        num_keys = num_table_keys - hidden
        host.first_key[window][:num], host.num_keys[window][:num] = hidden, num_keys
        if num < num_rows:
            host.first_key[window][num:], host.num_keys[window][num:] = 0, 0
        return int(num_keys.sum())

    def _hidden_rows(
        self, tier: Tier, window: int, contexts: Sequence[Context], positions: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Rows of each context's blocks on a tier that lie before its window."""
        first_visible = np.maximum(positions - window + 1, 0)
        if not any(context.tiers[Tier.DRAM].num for context in contexts):
            return first_visible if tier is Tier.GPU else np.zeros_like(positions)
        hidden = [
            context.tiers[tier].num_hidden_rows(first, self._block_size)
            for context, first in zip(contexts, first_visible.tolist(), strict=True)
        ]
        return np.array(hidden, np.int64)

    def _make_key_batches(self, contexts: Sequence[Context], positions: NDArray[np.int64], num_rows: int) -> range:
        """The keys of the CPU lane and of the other lane; returns the rows of the stream table that must be sent.

        The last step's serve again while no block moved and no window cuts them.
        """
        blocks = [context.tiers[Tier.DRAM] for context in contexts]
        num_blocks = np.array([item.num for item in blocks], np.int64)
        self.is_scanned = self._scans is not None and self._scans(int(num_blocks.sum()) * self._block_size)
        share, most = (
            (self.scan_share, self._max_scanned) if self.is_scanned else (self.stream_share, self._max_streamed)
        )
        num_streamed = (num_blocks * share).astype(np.int64)
        is_short = bool(num_streamed.sum() > most)
        if is_short:
            num_streamed = num_streamed * most // num_streamed.sum()
        ids = [(id(context), id(context.blocks)) for context in contexts]
        batched = (num_rows, self.is_scanned, num_streamed.tobytes(), *ids)
        old = self.key_batches if self._inputs.windows == (None,) and self._batched == batched else None
        host = self._inputs.host(num_rows)
        host.num_streamed[: len(blocks)] = num_streamed * self._block_size
        host.num_streamed[len(blocks) :] = 0
        self.num_streamed = int(num_streamed.sum()) * self._block_size
        self.num_dram_keys = int(num_blocks.sum()) * self._block_size
        self.has_cpu_keys = self.is_scanned or bool(num_streamed.sum() < num_blocks.sum())
        self.asked_share = share
        # Less than the share for want of room, not because blocks are whole.
        self.streamed_share = float(num_streamed.sum() / num_blocks.sum()) if is_short else share
        num_stored = (num_blocks - num_streamed) * self._block_size
        made = {}
        for window in self._inputs.windows:
            hidden = np.zeros_like(positions)
            if window is not None:
                hidden = self._hidden_rows(Tier.DRAM, window, contexts, positions)
            self.num_keys[window][Tier.DRAM] = int((num_stored - hidden).sum())
            if old is None:
                made[window] = self._key_batch(blocks, num_streamed, hidden, num_stored - hidden, num_rows)
        # The contexts are kept with the key, so that no other object gets their ids.
        self._batched, self._batched_contexts = batched, tuple((context, context.blocks) for context in contexts)
        self.key_batches = old or made
        if old is not None:
            return range(0)
        self.dram_ids = np.unique(np.concatenate([item.ids[: item.num] for item in blocks]))
        runs, place = [], 0
        table = self._inputs.host_stream_table()
        for row, (item, num) in enumerate(zip(blocks, num_streamed.tolist(), strict=True)):
            if self.is_scanned:
                table[row, :num] = item.ids[:num]
            else:
                table[row, :num] = np.arange(place, place + num)
                runs += _find_runs(item.ids[:num], place)
            place += num
        self.stream_runs = tuple(runs)
        return range(len(blocks) if place else 0)

    def _key_batch(
        self,
        blocks: Sequence[TierBlocks],
        num_streamed: NDArray[np.int64],
        first_key: NDArray[np.int64],
        num_keys: NDArray[np.int64],
        num_rows: int,
    ) -> KeyBatch:
        """One query a request, which sees the blocks behind the streamed ones, and padding that sees nothing."""
        num_padding = num_rows - len(blocks)
        ids = [item.ids[num : item.num] for item, num in zip(blocks, num_streamed.tolist(), strict=True)]
        counts = [len(array) for array in ids] + [0] * num_padding
        arrays = (
            np.concatenate(ids),
            np.cumsum([0, *counts]),
            np.pad(first_key, (0, num_padding)),
            np.pad(num_keys, (0, num_padding)),
            np.arange(num_rows + 1),
        )
        return KeyBatch(*(torch.from_numpy(array.astype(np.int64)) for array in arrays), block_size=self._block_size)


def _find_runs(ids: NDArray[np.int64], place: int) -> list[BlockRun]:
    """Blocks [n] in any order as runs of consecutive ones, side by side from `place` on: all of them are seen alike."""
    if not len(ids):
        return []
    ordered = np.sort(ids)
    cuts = [0, *(np.flatnonzero(np.diff(ordered) != 1) + 1).tolist(), len(ids)]
    return [BlockRun(first=int(ordered[begin]), place=place + begin, num=end - begin) for begin, end in pairwise(cuts)]


def _grew_by_one(known: tuple[BlockRef, ...], blocks: tuple[BlockRef, ...]) -> bool:
    return len(blocks) == len(known) + 1 and blocks[:-1] == known
