"""Reading and writing blocks of a KV pool."""

from torch import Tensor


def gather_blocks(pool: Tensor, block_ids: Tensor) -> Tensor:
    """See `kernels.api.gather_blocks`."""
    return pool.index_select(1, block_ids).flatten(1, 2)


def store_rows(pool: Tensor, slots: Tensor, rows: Tensor) -> None:
    """See `kernels.api.store_rows`."""
    pool.view(pool.shape[0], -1, pool.shape[3]).index_copy_(1, slots, rows.transpose(0, 1))
