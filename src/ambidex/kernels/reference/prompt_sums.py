"""What queries of a prompt give the keys that they see, added up over the queries, in plain torch: the truth."""

from typing import Final

import torch
from torch import Tensor

from ambidex.kernels.noise import Noise, gumbel_noise

MAX_SCORES: Final = 1 << 24
"""That are held at once: 64 MiB."""
MAX_NOISY_SCORES: Final = 1 << 21
"""The same with noise, which is made in words of 8 bytes: 16 MiB, and as much beside them."""


def sum_prompt_weights(q: Tensor, k: Tensor, *, scale: float, noise: Noise | None) -> Tensor:
    """See `kernels.api.sum_prompt_weights`. Piece by piece: memory is bounded however many queries there are. On a GPU,
    which some 20 launches for a few queries of a long prompt would keep waiting, pieces with noise are no smaller."""
    num_queries, num_q_heads, head_dim = q.shape
    num_kv_heads, num_keys, _ = k.shape
    is_small = noise is not None and q.device.type == "cpu"
    piece = max(1, (MAX_NOISY_SCORES if is_small else MAX_SCORES) // (num_q_heads * num_keys))
    keys = k.float().transpose(1, 2)  # [Hkv, D, S]
    sums = torch.zeros((num_kv_heads, num_keys), dtype=torch.float32, device=q.device)
    for begin in range(0, num_queries, piece):
        some = q[begin : begin + piece].float()
        first = num_keys - num_queries + begin  # where the first of them stands
        num_seen = first + len(some)
        grouped = some.view(len(some), num_kv_heads, -1, head_dim).permute(1, 2, 0, 3).flatten(1, 2)  # [Hkv, G · n, D]
        x = (grouped @ keys[:, :, :num_seen] * scale).view(num_q_heads, len(some), num_seen)
        if noise is not None:
            positions = torch.arange(first, num_seen, device=q.device)
            x = x.add_(gumbel_noise(noise.seed, positions, num_q_heads, num_seen)).div_(noise.tau)
        is_later = torch.ones(len(some), num_seen, dtype=torch.bool, device=q.device).triu_(first + 1)
        weights = x.masked_fill_(is_later, -torch.inf).softmax(-1)
        sums[:, :num_seen] += weights.sum(1).view(num_kv_heads, -1, num_seen).sum(1)
    return sums
