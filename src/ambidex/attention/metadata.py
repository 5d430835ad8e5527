"""`StepAttention`: what all layers share about a step, built once a step from plain values.

One request of a step, start = 10, three new tokens, blocks of 4 on two tiers:

    position    0  1  2  3 | 4  5  6  7 | 8  9 10 11 | 12
    block       gpu 7      | dram 2     | gpu 4      | gpu 5
    read as     old, GPU   | old, CPU   | old  own   | own
                                               └ start

Old keys are read from the pools, each tier by its lane; own keys, those of the step itself, are attended directly. The
one own key of a request with a single new token is stored first and read as an old one, if its tier's reader says so.
Old keys of a tier stand in ascending position, so what a query's window shuts out is a prefix: whole blocks are left
out, then rows of the first block. Only a chunk, whose queries have different windows, needs a mask.
"""

from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ambidex.core.errors import InternalError
from ambidex.core.ids import Tier
from ambidex.core.step import ScheduledRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class OldKeys:
    """Old keys of one request on one tier, and the queries that see any of them under one window."""

    rows: slice
    """Queries, among the step's T tokens."""
    block_ids: Tensor
    """[n] int64 on the tier's device, ascending in position."""
    run: slice | None
    """The blocks as a slice of the pool when their ids are consecutive: then nothing needs to be gathered."""
    keys: slice
    """Visible keys, among the n · P rows of the blocks. Rows outside were never stored or lie before the window."""
    mask: Tensor | None
    """[queries, keys] bool on the tier's device; None: every query sees every key."""
    query_positions: Tensor | None = None
    """[queries] int64 on the tier's device, if positions were asked for."""
    key_positions: Tensor | None = None
    """[keys] int64 likewise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnChunk:
    """Two or more new tokens of one request, which see each other causally."""

    rows: slice
    mask: Tensor | None
    """[chunk, chunk] bool where the window is shorter than the chunk; None: plain causal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnKeys:
    """The step's own keys that are attended directly: chunks, and single tokens, each of which sees itself alone."""

    chunks: tuple[OwnChunk, ...]
    single_rows: Tensor | None
    """[n] int64 on the accelerator; None: no single tokens, or `all_are_single`."""
    all_are_single: bool
    """All T rows are single tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowView:
    """The step as layers with one sliding window see it."""

    old: Mapping[Tier, tuple[OldKeys, ...]]
    own: OwnKeys | None
    """None: every own key is read as an old one."""
    num_keys: Mapping[Tier, int]
    """Keys that are read, by tier; own ones that are attended directly count for the accelerator's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewRows:
    """New K and V rows that are stored on one tier."""

    tier: Tier
    rows: Tensor | None
    """[n] int64 on the accelerator; None: all of the step's rows."""
    slots: Tensor
    """[n] int64 on the tier's device: block_id · P + offset."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepAttention:
    """Attention metadata of one step; build it with `build_step`."""

    num_tokens: int
    views: Mapping[int | None, WindowView]
    new_rows: tuple[NewRows, ...]


def build_step(
    requests: Sequence[ScheduledRequest],
    *,
    block_size: int,
    windows: Sequence[int | None],
    devices: Mapping[Tier, torch.device],
    reads_own: Collection[Tier] = (),
    has_positions: bool = False,
) -> StepAttention:
    """Cut a step into what each lane reads and where new rows go.

    Args:
        requests: in the order in which their tokens stand in the step.
        block_size: tokens of a block.
        windows: sliding windows of the layers in tokens, None for full attention; repeats are welcome.
        devices: where each tier's pool lies; `Tier.GPU` is the accelerator.
        reads_own: tiers on which the key of a single new token is read as an old one, after it was stored.
        has_positions: old keys and their queries come with their positions, for attention that depends on them.
    Raises:
        InternalError: the blocks of a request do not cover its tokens, or lie on a tier without a pool.
    Cost: on CUDA, one small copy a tier and one for each mask; with positions, two for each request, tier and window.
    """
    tables = {tier: _Table() for tier in devices}
    cuts, num_tokens = [], 0
    for request in requests:
        cut = _Cut(request, first_row=num_tokens, block_size=block_size, tables=tables, reads_own=reads_own)
        cuts.append(cut)
        num_tokens += cut.num_rows
    ids = {tier: torch.tensor(table.ids, dtype=torch.int64, device=devices[tier]) for tier, table in tables.items()}
    return StepAttention(
        num_tokens=num_tokens,
        views={
            window: _view(cuts, window, ids=ids, devices=devices, has_positions=has_positions)
            for window in set(windows)
        },
        new_rows=tuple(
            NewRows(
                tier=tier,
                rows=None
                if len(table.rows) == num_tokens
                else torch.tensor(table.rows, dtype=torch.int64, device=devices[Tier.GPU]),
                slots=torch.tensor(table.slots, dtype=torch.int64, device=devices[tier]),
            )
            for tier, table in tables.items()
            if table.rows
        ),
    )


class _Table:
    """Block ids, rows and slots of one tier over all requests, so that each goes to its device in one copy."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.rows: list[int] = []
        self.slots: list[int] = []


class _TierBlocks:
    """Blocks of one request on one tier that hold keys to read: their places in the context and their ids."""

    def __init__(self, first_id: int) -> None:
        self.first_id = first_id  # where the ids begin in the tier's table
        self.indices: list[int] = []
        self.ids: list[int] = []


class _Cut:
    """One request of the step, its old blocks sorted by tier and its new rows entered in the tables."""

    def __init__(
        self,
        request: ScheduledRequest,
        *,
        first_row: int,
        block_size: int,
        tables: Mapping[Tier, _Table],
        reads_own: Collection[Tier],
    ) -> None:
        self.start = request.start
        self.block_size = block_size
        self.first_row = first_row
        self.num_rows = len(request.token_ids)
        _check_blocks(request, block_size, tables)
        self.old = {tier: _TierBlocks(len(table.ids)) for tier, table in tables.items()}
        self.is_read = self.num_rows == 1 and request.blocks[self.start // block_size].tier in reads_own
        self.num_read = self.start + self.is_read  # positions before it are read from the pools
        for index, block in enumerate(request.blocks[: -(-self.num_read // block_size)]):
            self.old[block.tier].indices.append(index)
            self.old[block.tier].ids.append(block.block_id)
        for tier, table in tables.items():
            table.ids.extend(self.old[tier].ids)
        for row, position in enumerate(range(self.start, self.start + self.num_rows), first_row):
            block = request.blocks[position // block_size]
            tables[block.tier].rows.append(row)
            tables[block.tier].slots.append(block.block_id * block_size + position % block_size)


def _check_blocks(request: ScheduledRequest, block_size: int, tables: Mapping[Tier, _Table]) -> None:
    context_len = request.start + len(request.token_ids)
    if len(request.blocks) * block_size < context_len:
        raise InternalError(
            f"request {request.request_id}: {len(request.blocks)} blocks of {block_size} tokens do not cover its "
            f"context of {context_len} tokens"
        )
    if unknown := {block.tier for block in request.blocks} - tables.keys():
        raise InternalError(f"request {request.request_id}: blocks on {', '.join(sorted(unknown))}, which has no pool")


def _view(
    cuts: Sequence[_Cut],
    window: int | None,
    *,
    ids: Mapping[Tier, Tensor],
    devices: Mapping[Tier, torch.device],
    has_positions: bool,
) -> WindowView:
    old = {
        tier: tuple(
            keys for cut in cuts if (keys := _old_keys(cut, tier, window, ids[tier], has_positions)) is not None
        )
        for tier in devices
    }
    num_keys = {tier: sum(keys.keys.stop - keys.keys.start for keys in old[tier]) for tier in devices}
    num_keys[Tier.GPU] += sum(cut.num_rows for cut in cuts if not cut.is_read)
    return WindowView(old=old, own=_own_keys(cuts, window, devices[Tier.GPU]), num_keys=num_keys)


def _old_keys(cut: _Cut, tier: Tier, window: int | None, table: Tensor, has_positions: bool) -> OldKeys | None:
    """What the request's queries see of its old keys on `tier`: None if nothing."""
    blocks, size = cut.old[tier], cut.block_size
    first_visible = 0 if window is None else max(0, cut.start - window + 1)
    num_hidden = bisect_left(blocks.indices, first_visible // size)
    indices, block_ids = blocks.indices[num_hidden:], blocks.ids[num_hidden:]
    if not indices:
        return None
    first_key = max(first_visible, indices[0] * size)
    last_key = min(cut.num_read, (indices[-1] + 1) * size) - 1
    num_rows = cut.num_rows if window is None else min(cut.num_rows, last_key - cut.start + window)
    if num_rows <= 0:
        return None
    keys = slice(first_key - indices[0] * size, (len(indices) - 1) * size + last_key - indices[-1] * size + 1)
    is_run = block_ids == list(range(block_ids[0], block_ids[0] + len(block_ids)))
    begin = blocks.first_id + num_hidden
    return OldKeys(
        rows=slice(cut.first_row, cut.first_row + num_rows),
        block_ids=table[begin : begin + len(block_ids)],
        run=slice(block_ids[0], block_ids[0] + len(block_ids)) if is_run else None,
        keys=keys,
        mask=None
        if window is None or first_key > cut.start + num_rows - 1 - window
        else _window_mask(indices, keys, cut, num_rows, window).to(table.device),
        query_positions=_query_positions(cut, num_rows).to(table.device) if has_positions else None,
        key_positions=_key_positions(indices, keys, cut).to(table.device) if has_positions else None,
    )


def _window_mask(indices: Sequence[int], keys: slice, cut: _Cut, num_rows: int, window: int) -> Tensor:
    """[queries, keys] bool: the query at position p sees keys after p - window."""
    return _key_positions(indices, keys, cut)[None, :] > _query_positions(cut, num_rows)[:, None] - window


def _key_positions(indices: Sequence[int], keys: slice, cut: _Cut) -> Tensor:
    return (torch.tensor(indices)[:, None] * cut.block_size + torch.arange(cut.block_size)).flatten()[keys]


def _query_positions(cut: _Cut, num_rows: int) -> Tensor:
    return torch.arange(cut.start, cut.start + num_rows)


def _own_keys(cuts: Sequence[_Cut], window: int | None, device: torch.device) -> OwnKeys | None:
    singles = [cut.first_row for cut in cuts if cut.num_rows == 1 and not cut.is_read]
    chunks = tuple(_own_chunk(cut, window, device) for cut in cuts if cut.num_rows > 1)
    if not singles and not chunks:
        return None
    all_are_single = len(singles) == len(cuts)
    return OwnKeys(
        chunks=chunks,
        single_rows=torch.tensor(singles, device=device) if singles and not all_are_single else None,
        all_are_single=all_are_single,
    )


def _own_chunk(cut: _Cut, window: int | None, device: torch.device) -> OwnChunk:
    rows = slice(cut.first_row, cut.first_row + cut.num_rows)
    if window is None or window >= cut.num_rows:
        return OwnChunk(rows=rows, mask=None)
    band = torch.ones(cut.num_rows, cut.num_rows, dtype=torch.bool, device=device).tril()
    return OwnChunk(rows=rows, mask=band.triu(1 - window))
