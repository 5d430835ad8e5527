"""`DecodeBatch`: turns the requests of a decode step into the arrays of `DecodeInputs`.

What changes little from step to step is kept: the block ids of each request as an array, and which of them a row of the
device's table already holds. A step in which no request came, went or opened two blocks sends no table at all.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ambidex.attention.decode_inputs import DecodeInputs
from ambidex.core.ids import RequestId, Tier
from ambidex.core.step import BlockRef, ScheduledRequest


@dataclass(slots=True, kw_only=True)
class _Context:
    """The blocks of one request as they were last seen."""

    blocks: tuple[BlockRef, ...] = ()
    ids: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))  # at least as long as `blocks`
    last_elsewhere: int = -1
    """Index of the last block that does not lie on the accelerator; −1: all do."""


@dataclass(frozen=True, slots=True)
class _SentRow:
    """What a row of the device's table holds: the first `num_blocks` blocks of a context."""

    context: _Context
    blocks: tuple[BlockRef, ...]


class DecodeBatch:
    """Prepares decode steps.

    Args:
        inputs: the buffers that are filled.
        block_size: tokens of a block.
    """

    def __init__(self, inputs: DecodeInputs, *, block_size: int) -> None:
        self._inputs = inputs
        self._block_size = block_size
        self._contexts: dict[RequestId, _Context] = {}
        self._sent: list[_SentRow | None] = [None] * inputs.max_rows
        self._row_starts = np.arange(inputs.max_rows, dtype=np.int64) * inputs.max_blocks
        self._widest = None if None in inputs.windows else max(w for w in inputs.windows if w is not None)
        self.num_keys: Mapping[int | None, int] = {}
        """Keys that the step's attention reads under each window, all requests together."""

    def try_prepare(self, requests: Sequence[ScheduledRequest], num_rows: int) -> bool:
        """Fill and send the inputs of a step of `num_rows` rows, if the step has the form that they can describe.

        That is: each request has one new token, and all keys that it sees lie on the accelerator.

        Args:
            num_rows: at least the number of requests, at most what the inputs hold; the rest is padding.
        Returns:
            False if a request has another form; then nothing is sent.
        Cost: about a microsecond a request, and one small copy to the device.
        """
        num = len(requests)
        if not 0 < num <= num_rows or any(len(request.token_ids) != 1 for request in requests):
            return False
        positions = np.array([request.start for request in requests], np.int64)
        num_blocks = np.array([len(request.blocks) for request in requests], np.int64)
        last_places = positions // self._block_size
        if (num_blocks != last_places + 1).any() or num_blocks.max() > self._inputs.max_blocks:
            return False
        contexts = self._update_contexts(requests)
        if self._is_elsewhere(contexts, positions):
            return False
        self._inputs.wait_sent()
        table_rows = self._write_table(contexts, num_rows)
        last_blocks = np.array([request.blocks[-1].block_id for request in requests], np.int64)
        host = self._inputs.host(num_rows)
        host.token_ids[:num] = [request.token_ids[0] for request in requests]
        host.positions[:num] = positions
        host.slots[:num] = last_blocks * self._block_size + positions % self._block_size
        host.table_places[:] = self._row_starts[:num_rows]
        host.table_places[:num] += last_places
        host.last_blocks[:num] = last_blocks
        if num < num_rows:
            host.token_ids[num:], host.positions[num:], host.last_blocks[num:] = 0, 0, 0
            host.slots[num:] = -1
        self.num_keys = {window: self._write_keys(window, positions, num_rows) for window in self._inputs.windows}
        self._inputs.send(num_rows, table_rows=table_rows)
        return True

    def _update_contexts(self, requests: Sequence[ScheduledRequest]) -> list[_Context]:
        known, found = self._contexts, []
        for request in requests:
            context = known.get(request.request_id)
            if context is None:
                context = known[request.request_id] = _Context()
            if context.blocks is not request.blocks and context.blocks != request.blocks:
                _follow(context, request.blocks)
            found.append(context)
        if len(known) > 2 * self._inputs.max_rows:  # requests that have ended, or that decode no longer
            self._contexts = {request.request_id: known[request.request_id] for request in requests}
        return found

    def _is_elsewhere(self, contexts: Sequence[_Context], positions: NDArray[np.int64]) -> bool:
        """Whether any request sees a key that does not lie on the accelerator."""
        if all(context.last_elsewhere < 0 for context in contexts):
            return False
        if self._widest is None:
            return True
        last_elsewhere = np.array([context.last_elsewhere for context in contexts], np.int64)
        first_visible = np.maximum(positions - self._widest + 1, 0) // self._block_size
        return bool((last_elsewhere >= first_visible).any())

    def _write_table(self, contexts: Sequence[_Context], num_rows: int) -> range:
        """Write the rows whose blocks the device does not know into the host's table; returns what must be sent."""
        first, last = num_rows, -1
        sent = self._sent
        for row, context in enumerate(contexts):
            known = sent[row]
            if known is not None and known.context is context and known.blocks is context.blocks:
                continue
            sent[row] = _SentRow(context, context.blocks)
            if known is None or known.context is not context or not _grew_by_one(known.blocks, context.blocks):
                first, last = min(first, row), row
        sent[len(contexts) : num_rows] = [None] * (num_rows - len(contexts))  # padding writes into its rows
        if last < 0:
            return range(0)
        table = self._inputs.host_table()
        for row in range(first, last + 1):
            table[row, : len(contexts[row].blocks)] = contexts[row].ids[: len(contexts[row].blocks)]
        return range(first, last + 1)

    def _write_keys(self, window: int | None, positions: NDArray[np.int64], num_rows: int) -> int:
        host, num = self._inputs.host(num_rows), len(positions)
        num_keys = positions + 1
        if window is not None:
            num_keys = np.minimum(num_keys, window)
        host.first_key[window][:num], host.num_keys[window][:num] = positions + 1 - num_keys, num_keys
        if num < num_rows:
            host.first_key[window][num:], host.num_keys[window][num:] = 0, 0
        return int(num_keys.sum())


def _follow(context: _Context, blocks: tuple[BlockRef, ...]) -> None:
    """Take over a request's blocks; only those behind what both have in common are looked at."""
    num_known = len(context.blocks)
    if blocks[:num_known] != context.blocks:  # moved to another tier, or computed again after a preemption
        num_known, context.last_elsewhere = 0, -1
    if len(blocks) > len(context.ids):
        grown = np.zeros(2 * len(blocks), np.int32)
        grown[:num_known] = context.ids[:num_known]
        context.ids = grown
    for index in range(num_known, len(blocks)):
        context.ids[index] = blocks[index].block_id
        if blocks[index].tier is not Tier.GPU:
            context.last_elsewhere = index
    context.blocks = blocks


def _grew_by_one(known: tuple[BlockRef, ...], blocks: tuple[BlockRef, ...]) -> bool:
    return len(blocks) == len(known) + 1 and blocks[:-1] == known
