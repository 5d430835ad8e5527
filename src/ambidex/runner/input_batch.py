"""`InputBatch`: the tokens of a step as tensors, request after request, and which rows give logits."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ambidex.core.ids import RequestId
from ambidex.core.step import ScheduledRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class InputBatch:
    """What the model is called with, on its device."""

    token_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    sampled_rows: Tensor  # [B] int64: the last token of each request that is sampled
    sampled_ids: tuple[RequestId, ...]
    allowed_tokens: tuple[bytes | None, ...] = ()
    """Bit mask of the tokens that each of `sampled_ids` may be given; None: any."""

    @classmethod
    def of(cls, requests: Sequence[ScheduledRequest], device: torch.device) -> "InputBatch":
        """The batch of a step's requests, in their order."""
        token_ids: list[int] = []
        positions: list[int] = []
        rows: list[int] = []
        for request in requests:
            token_ids += request.token_ids
            positions += range(request.start, request.start + len(request.token_ids))
            if request.is_sampled:
                rows.append(len(token_ids) - 1)

        def to_device(values: list[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int64, device=device)

        return cls(
            token_ids=to_device(token_ids),
            positions=to_device(positions),
            sampled_rows=to_device(rows),
            sampled_ids=tuple(request.request_id for request in requests if request.is_sampled),
            allowed_tokens=tuple(request.allowed_tokens for request in requests if request.is_sampled),
        )
