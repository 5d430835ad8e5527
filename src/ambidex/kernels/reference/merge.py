"""Merge of two partial attentions, in fp32.

    lse = log(e^lse_a + e^lse_b)
    out = out_a + w (out_b - out_a)        w = e^lse_b / (e^lse_a + e^lse_b) = sigmoid(lse_b - lse_a)

Source: online softmax, arXiv:1805.02867.
"""

import torch
from torch import Tensor


def merge_states(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, out_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """See `kernels.api.merge_states`."""
    weight = torch.sigmoid(lse_b - lse_a).nan_to_num_(0.0)  # −inf − (−inf): neither side saw a key, both outs are 0
    out = torch.lerp(out_a.float(), out_b.float(), weight.unsqueeze(-1))
    return out.to(out_dtype), torch.logaddexp(lse_a, lse_b)
