"""Products with a matrix that lies neuron by neuron: `h @ rows`, where most numbers of h may be 0.

    sum_all      every row: dense
    sum_bags     each token's rows with a number other than 0, one after the other, whatever the other tokens need
    sum_union    the rows that some token needs, gathered once for all tokens

The three give the same sums but for roundings. `table` holds all rows of a place, those of other matrices among them,
so that one call reaches neurons that lie in several pieces.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ambidex.kernels.linear import LinearContext

_BLOCK_NUMBERS = 1 << 18
"""Numbers that are widened at a time: 1 MiB in fp32, which a core's cache holds."""


def sum_all(h: Tensor, rows: Sequence[Tensor], context: LinearContext) -> Tensor:
    """Dense: Σ over pieces of `h` [T, Σ n] with rows [n, E] of each piece.

    Args:
        h: fp32 or in the dtype of the rows, on their device.
    Returns:
        [T, E] in the dtype of h. Other dtypes than h's are widened to fp32, but for bf16 on a CPU that multiplies it,
        where h and the product are rounded to bf16.
    Cost: reads each row once.
    """
    total: Tensor | None = None
    start = 0
    for piece in rows:
        part = h[:, start : start + piece.shape[0]]
        start += piece.shape[0]
        product = _multiply(part, piece, context)
        total = product if total is None else total.add_(product)
    assert total is not None, "a place has rows"
    return total


def _multiply(h: Tensor, rows: Tensor, context: LinearContext) -> Tensor:
    if h.dtype == rows.dtype:
        return torch.mm(h, rows)
    if context.multiplies_bf16 and rows.dtype == torch.bfloat16:
        return torch.mm(h.to(torch.bfloat16), rows).to(h.dtype)
    size = max(1, _BLOCK_NUMBERS // rows.shape[1])
    total = h.new_zeros((h.shape[0], rows.shape[1]), dtype=torch.float32)
    for start in range(0, rows.shape[0], size):
        block = context.scratch.widen(rows[start : start + size])
        total.addmm_(h[:, start : start + size].float(), block)
    return total.to(h.dtype)


def sum_bags(h: Tensor, table: Tensor, places: Tensor, *, num_bags: int) -> Tensor:
    """Each token's own rows.

    Args:
        h: [T, n] fp32 in CPU memory.
        table: [R, E]; fp32, bf16 or fp16.
        places: [n] int64, the row of each neuron.
        num_bags: pieces that a token's rows are cut into, which threads take in turn.
    Returns:
        [T, E] fp32. With 16-bit rows the numbers of h and each piece's sum are rounded to their dtype, as on a GPU.
    Cost: reads a row once for each token that needs it.
    """
    cuts = torch.arange(num_bags)
    if h.shape[0] == 1:  # the same in fewer calls, which are what a step of one token has
        neurons = h[0].nonzero()[:, 0]
        offsets, values = cuts * len(neurons) // num_bags, h[0, neurons]
    else:
        tokens, neurons = h.nonzero(as_tuple=True)
        counts = torch.bincount(tokens, minlength=h.shape[0])
        begins = counts.cumsum(0) - counts
        offsets = (begins[:, None] + counts[:, None] * cuts // num_bags).view(-1)  # [T · num_bags]
        values = h[tokens, neurons]
    sums = torch.embedding_bag(table, places[neurons], offsets, False, 0, False, values.to(table.dtype))[0]
    return sums.view(h.shape[0], num_bags, table.shape[1]).float().sum(1)


def sum_union(h: Tensor, table: Tensor, places: Tensor, union: Tensor, context: LinearContext) -> Tensor:
    """The rows that some token needs.

    Args:
        h, table, places: as in `sum_bags`.
        union: [k] int64, the neurons whose column of h is not 0 everywhere.
    Returns:
        [T, E] fp32, rounded as by `sum_all`.
    Cost: reads each of the rows once, and writes them once.
    """
    return _multiply(h[:, union], torch.index_select(table, 0, places[union]), context)
