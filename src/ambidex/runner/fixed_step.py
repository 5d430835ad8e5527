"""`FixedStep`: all that a decode step of fixed form launches, from its inputs on the device to logits and chosen tokens
there."""

from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import Tensor

from ambidex.attention.decode_inputs import DecodeInputs, DecodeTokens
from ambidex.attention.hybrid import HybridAttention
from ambidex.attention.paged import PagedAttention
from ambidex.core.model_spec import ModelSpec
from ambidex.kernels import api
from ambidex.models.base import AttentionOp, CausalLM
from ambidex.runner.host_answers import HostAnswers
from ambidex.runner.input_batch import InputBatch
from ambidex.runner.step_lanes import StepLanes
from ambidex.storage.kv_pool import KVPool
from ambidex.storage.lane_clock import LaneClock, Part

Forward = Callable[[CausalLM, InputBatch, AttentionOp], Tensor]


class FixedStep:
    """What steps of all sizes share.

    Args:
        forward: how the model is called.
        pool: the accelerator's keys.
        inputs: where the steps' few numbers lie.
        lanes: those of DRAM.
        clock: times the lanes of each step; None: nobody does.

    Attributes:
        logits: [max_rows, V] fp32; `chosen` [max_rows] int64, the likeliest tokens, −1 where logits are not finite.
    """

    def __init__(
        self,
        model: CausalLM,
        spec: ModelSpec,
        forward: Forward,
        pool: KVPool,
        *,
        inputs: DecodeInputs,
        lanes: StepLanes,
        clock: LaneClock | None,
    ) -> None:
        self._model = model
        self._spec = spec
        self._forward = forward
        self._pool = pool
        self._inputs = inputs
        self._lanes = lanes
        self._clock = clock
        max_rows, device = inputs.max_rows, pool.device
        self.logits = torch.empty(max_rows, spec.vocab_size, dtype=torch.float32, device=device)
        self.chosen = torch.empty(max_rows, dtype=torch.int64, device=device)
        self._all_rows = torch.arange(max_rows, device=device)
        self._tokens = DecodeTokens(max_rows=max_rows, device=device)

    def compute(self, num_rows: int, host: HostAnswers | None) -> None:
        """Launch a step of so many rows.

        Args:
            host: what the CPU does in it; None: nothing.
        """
        rows = self._inputs.device(num_rows)
        rows.extend_table()
        batch = InputBatch(
            token_ids=self._tokens.read(rows),
            positions=rows.positions,
            sampled_rows=self._all_rows[:num_rows],
            sampled_ids=(),
        )
        paged = PagedAttention(self._spec, self._pool, rows)
        attention: AttentionOp = paged
        hybrid: HybridAttention | None = None
        if self._lanes.sees_dram:
            attention = hybrid = self._lanes.hybrid(paged, None if host is None else host.keys, rows)
        logits = self.logits[:num_rows]
        with self._lanes.handing_over(host), self._clock.span(Part.STEP) if self._clock is not None else nullcontext():
            if hybrid is not None:
                hybrid.begin()
            hidden = self._forward(self._model, batch, attention)
            if hybrid is not None:
                hybrid.end()
            logits.copy_(self._model.logits(hidden))
        self._lanes.settle_weights()
        chosen = api.likeliest(logits)
        self.chosen[:num_rows].copy_(chosen)
        self._tokens.write(chosen)
