"""`PartAttention`: queries over rows of K and V that lie side by side, with or without slopes."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ambidex.attention.metadata import OldKeys
from ambidex.core.errors import InternalError
from ambidex.kernels import alibi, api


class PartAttention:
    """Attention of one model over rows, on one device.

    Args:
        scale: factor of q·k.
        slopes: of query heads; None: scores do not depend on distance.
    """

    def __init__(self, scale: float, slopes: Sequence[float] | None, device: torch.device) -> None:
        self.scale = scale
        self.slopes = None if slopes is None else torch.tensor(slopes, device=device)  # [Hq] fp32

    def attend_old(self, q: Tensor, k: Tensor, v: Tensor, part: OldKeys) -> tuple[Tensor, Tensor]:
        """Queries [T, Hq, D] of a part over its visible rows [Hkv, S, D]; see `kernels.api.attend`."""
        if self.slopes is None:
            return api.attend(q, k, v, scale=self.scale, mask=part.mask)
        if part.query_positions is None or part.key_positions is None:
            raise InternalError("attention with slopes is handed keys without positions")
        return alibi.attend(
            q, k, v, scale=self.scale, slopes=self.slopes, mask=part.mask,
            query_positions=part.query_positions, key_positions=part.key_positions,
        )  # fmt: skip

    def attend_chunk(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Tokens of a chunk over each other: q [T, Hq, D], k and v [Hkv, T, D]; mask None: causally."""
        if self.slopes is None:
            return api.attend(q, k, v, scale=self.scale, causal=mask is None, mask=mask)
        positions = torch.arange(q.shape[0], device=q.device)  # differences alone count
        return alibi.attend(
            q, k, v, scale=self.scale, slopes=self.slopes, causal=mask is None, mask=mask,
            query_positions=positions, key_positions=positions,
        )  # fmt: skip
