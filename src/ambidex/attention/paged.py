"""`PagedAttention`: the attention of a decode step whose keys all lie on the accelerator, for `DecodeInputs`."""

import torch
from torch import Tensor

from ambidex.attention.decode_inputs import DecodeRows
from ambidex.attention.state import AttentionState
from ambidex.core.model_spec import ModelSpec
from ambidex.kernels import api
from ambidex.storage.kv_pool import KVPool


class PagedAttention:
    """What `models.base.AttentionOp` asks for, for one new token a row; its launches do not depend on the context.

    K and V of the new token are stored first and then read from the pool like those of older ones. A step whose older
    keys lie on other tiers, too, joins `store` and `attend_pool` with states of its own.

    Args:
        spec: windows and head_dim (the scale is head_dim ** -0.5).
        pool: the accelerator's.
        rows: the inputs of a step of B rows.
    """

    def __init__(self, spec: ModelSpec, pool: KVPool, rows: DecodeRows) -> None:
        self._scale = spec.head_dim**-0.5
        self._windows = spec.windows
        self._pool = pool
        self._rows = rows

    def attend(
        self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor, *, angles: tuple[Tensor, Tensor] | None = None
    ) -> Tensor:
        """Rotate q and k, store k and v in their slots, and attend over the visible keys, the new ones included.

        Args:
            q: [B, Hq, D]; k, v: [B, Hkv, D], on the accelerator, in the dtype of the pool.
            angles: cos and sin; None: nothing is rotated.
        Returns:
            [B, Hq, D] in the dtype of q; 0 for padding.
        Raises:
            ShapeError: the tensors fit neither the rows nor the pool.
        """
        q = self.store(layer_idx, q, k, v, angles=angles)
        return self._attend(layer_idx, q, out_dtype=None).out

    def store(self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor, *, angles: tuple[Tensor, Tensor] | None) -> Tensor:
        """Rotate q and k and store k and v; returns the rotated queries."""
        k_pool, v_pool = self._pool.layer(layer_idx)
        return api.rotate_and_store(q, k, v, k_pool, v_pool, self._rows.slots, angles=angles)

    def attend_pool(self, layer_idx: int, q: Tensor) -> AttentionState:
        """The state of rotated queries over the row's keys in the pool, to be merged with others: `out` is fp32."""
        return self._attend(layer_idx, q, out_dtype=torch.float32)

    def _attend(self, layer_idx: int, q: Tensor, *, out_dtype: torch.dtype | None) -> AttentionState:
        k_pool, v_pool = self._pool.layer(layer_idx)
        window = self._windows[layer_idx]
        out, lse = api.attend_paged(
            q, k_pool, v_pool, self._rows.block_table, self._rows.first_key[window], self._rows.num_keys[window],
            scale=self._scale, out_dtype=out_dtype,
        )  # fmt: skip
        return AttentionState(out, lse)
