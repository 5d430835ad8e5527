"""`ProgramSteps`: decode steps on a CPU, each recorded once for a number of requests and then run as a native program.

A step has this form if each request has one new token and all keys lie in pools in tile order. The first step of a kind
is computed by Python and torch while it is recorded, which is its answer; later ones are one native call. If a step
cannot be recorded, programs are given up with one warning, and every step takes the ordinary path.
"""

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ambidex.attention.bounded_scan import BoundedScan, collect_figures, find_bounds, scanned_bytes
from ambidex.attention.contexts import Contexts
from ambidex.attention.tiled_step import TiledAttention, TiledInputs, find_positions
from ambidex.core.errors import UnrecordableError
from ambidex.core.ids import Lane, Tier
from ambidex.core.model_spec import ModelSpec
from ambidex.core.step import ScheduledRequest, SelectionFigures
from ambidex.kernels import api
from ambidex.kernels.cpu.recorded import Arena, Program, Recording
from ambidex.models.base import AttentionOp, CausalLM
from ambidex.runner.decode import DecodeOutput
from ambidex.runner.input_batch import InputBatch
from ambidex.storage.tiled_pool import TiledKVPool

logger = logging.getLogger(__name__)

MOST_ROWS: Final = 64
"""Requests of a step that is recorded; larger steps gain little: theirs is the time of products. There is no padding,
which would cost a CPU real work: each number of requests has a program of its own."""

_LANES: Final = {Tier.GPU: Lane.GPU, Tier.DRAM: Lane.CPU}


@dataclass(frozen=True, slots=True)
class _Recorded:
    program: Program
    logits: Tensor
    """[B, V] fp32, written by each run; another program's run may write there, too."""
    chosen: Tensor
    """[B] int64, likewise: the likeliest tokens."""


class ProgramSteps:
    """Runs decode steps as programs; see `FixedSteps`.

    Args:
        forward: how the model is called.
        pools: the KV of both tiers, in tile order.
        max_rows: requests of a step, at most MOST_ROWS of which are recorded.
        bounded: the bounded policy; None: all keys are attended.
    """

    def __init__(
        self,
        *,
        model: CausalLM,
        spec: ModelSpec,
        forward: Callable[[CausalLM, InputBatch, AttentionOp], Tensor],
        pools: Mapping[Tier, TiledKVPool],
        max_rows: int,
        bounded: BoundedScan | None = None,
    ) -> None:
        self._model = model
        self._spec = spec
        self._forward = forward
        self._bounded = bounded
        self._pools = {tier: pool for tier, pool in pools.items() if pool.num_blocks}
        self._block_size = next(iter(pools.values())).spec.block_size
        self._max_rows = min(max_rows, MOST_ROWS)
        self._num_layers = Counter(spec.windows)
        self._contexts = Contexts(max_requests=self._max_rows)
        self._inputs: dict[int, TiledInputs] = {}
        self._arena = Arena()
        self._recorded: dict[tuple[int, tuple[Tier, ...]], _Recorded] = {}
        self.num_failures = 0
        """Steps that could not be recorded: 0 or 1."""

    def close(self) -> None:
        """See `FixedSteps`: each step has ended when it returns."""

    def forget(self) -> None:
        """Weights were bound anew: steps are recorded again."""
        self._recorded.clear()

    def try_run(self, requests: Sequence[ScheduledRequest]) -> DecodeOutput | None:
        """Run a step if it has the form of a decode step, else return None and leave everything as it was.

        Must be called within `torch.inference_mode`.

        Raises:
            ShapeError: the plan names a block or a token that is not there.
        """
        positions = find_positions(requests, block_size=self._block_size, most=self._max_rows)
        if positions is None or self.num_failures:
            return None
        contexts = self._contexts.update(requests)
        inputs = self._find_inputs(len(requests))
        inputs.fill(requests, contexts, positions)
        tiers = tuple(tier for tier in self._pools if any(context.tiers[tier].num for context in contexts))
        recorded = self._recorded.get((len(requests), tiers))
        is_replayed = recorded is not None
        if recorded is not None:
            recorded.program.run()
        else:
            recorded = self._try_record(inputs, tiers)
        if recorded is None:
            return None
        return DecodeOutput(
            logits=recorded.logits,
            chosen=recorded.chosen,
            lane_bytes=lambda: self._lane_bytes(inputs, tiers),
            is_replayed=is_replayed,
            selection=None if self._bounded is None else lambda: self._selection(requests, inputs, tiers, positions),
        )

    def try_launch(self, requests: Sequence[ScheduledRequest]) -> None:
        """None: a program computes in the calling thread."""

    def _find_inputs(self, num_rows: int) -> TiledInputs:
        if num_rows not in self._inputs:
            self._inputs[num_rows] = TiledInputs(
                num_rows,
                windows=tuple(self._num_layers),
                block_size=self._block_size,
                tiers=tuple(self._pools),
                bounded=self._bounded,
            )
        return self._inputs[num_rows]

    def _try_record(self, inputs: TiledInputs, tiers: Sequence[Tier]) -> _Recorded | None:
        """Compute the step and record it; None if programs had to be given up.

        NOTE: computing a step twice is harmless: it stores the same rows in the same slots.
        """
        attention = TiledAttention(self._spec, {tier: self._pools[tier] for tier in tiers}, inputs)
        rows = torch.arange(inputs.num_rows)
        batch = InputBatch(token_ids=inputs.token_ids, positions=inputs.positions, sampled_rows=rows, sampled_ids=())
        recording = Recording(self._arena)
        try:
            with recording:
                hidden = self._forward(self._model, batch, attention)
                logits = self._model.logits(hidden).contiguous()
                chosen = api.likeliest(logits)
        except UnrecordableError as error:
            self.num_failures += 1
            self._recorded.clear()
            logger.warning("decode steps are not recorded and take longer: %s", error)
            return None
        recording.program.keep(self._model, attention, inputs)
        recorded = _Recorded(recording.program, self._arena.alias(logits), chosen)
        self._recorded[inputs.num_rows, tuple(tiers)] = recorded
        return recorded

    def _selection(
        self,
        requests: Sequence[ScheduledRequest],
        inputs: TiledInputs,
        tiers: Sequence[Tier],
        positions: NDArray[np.int64],
    ) -> SelectionFigures:
        figures = {tier: inputs.figures[tier].numpy() for tier in tiers}
        found = collect_figures(figures, inputs.num_scanned, int(positions.sum()) + len(positions))
        if self._bounded is None or self._bounded.check is None or inputs.copies is None:
            return found
        num_verified, max_error = self._bounded.check.check(
            requests, inputs.scanned_rows, inputs.copies, find_bounds(figures)
        )
        return replace(found, num_verified=num_verified, max_error=max_error)

    def _lane_bytes(self, inputs: TiledInputs, tiers: Sequence[Tier]) -> dict[Lane, int]:
        """Bytes of K and V that each lane read in the step."""
        num_bytes = dict.fromkeys(_LANES.values(), 0)
        if self._bounded is not None:
            num_bytes |= scanned_bytes(
                {tier: self._bounded.copies[tier] for tier in tiers},
                {tier: inputs.figures[tier].numpy() for tier in tiers},
                inputs.num_scanned, self._spec, _LANES,
            )  # fmt: skip
        for window, by_tier in inputs.num_keys.items():
            for tier, num_keys in by_tier.items():
                size = self._pools[tier].spec.bytes_per_token_layer
                num_bytes[_LANES[tier]] += size * num_keys * self._num_layers[window]
        return num_bytes
