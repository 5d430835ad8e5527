"""`ShownPrompts`: tells a policy what it needs of the tokens of prompts, which attend all keys."""

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from ambidex.attention.select.policy import AllKeys, Need, Policy, PromptRows
from ambidex.attention.step_requests import Work
from ambidex.core.ids import KVPart
from ambidex.core.model_spec import ModelSpec
from ambidex.storage.kv_pool import KVPool

SHOWN_QUERIES: Final = 64
"""Of a prompt that is not computed."""


class ShownPrompts:
    """Shows prompts to the selectors of their requests.

    Args:
        spec: heads and head_dim (the scale is head_dim ** -0.5).
        pool: the accelerator's, whose format rows are kept in.
        order: has what the accelerator is given next find the rows that were just stored.
        settle: waits for them, so that the host finds them, too.
    """

    def __init__(
        self,
        policy: Policy,
        spec: ModelSpec,
        pool: KVPool,
        *,
        order: Callable[[], None],
        settle: Callable[[], None],
    ) -> None:
        self._policy = policy
        self._spec = spec
        self._pool = pool
        self._order = order
        self._settle = settle
        self._scale = spec.head_dim**-0.5

    def show(self, layer_idx: int, work: Work, q: Tensor, k: Tensor, v: Tensor) -> None:
        """Tell the policy what it needs of the prompt's tokens of a request.

        Args:
            q: [T, Hq, D]; k, v: [T, Hkv, D], of all tokens of the step, rotated, and stored.
        """
        rows, selector, needs = work.prompt_rows, work.selectors[layer_idx], self._policy.needs
        if not work.num_prompt_rows or work.state.request.max_output_tokens == 1:  # then nothing is decoded
            return
        if Need.ROWS in needs:
            selector.add_rows(*self._as_kept(k[rows], v[rows]))
        if Need.PROMPT in needs:
            if work.context.is_read_by_host:
                self._settle()
            else:
                self._order()
            shown = q[rows].to(self._policy.prompt_dtype or q.dtype)
            keys = work.context.read(KVPart.K, layer_idx, shown.dtype)[:, : work.num_keys(rows.stop - 1)]
            selector.see_prompt(PromptRows(q=shown, k=keys, scale=self._scale))

    def show_random(self, work: Work) -> None:
        """Show a prompt that is not computed, with K and V that lie in the pools, and random queries, as large as the
        keys."""
        if not self._policy.needs & {Need.ROWS, Need.PROMPT}:
            return
        for layer_idx, selector in enumerate(work.selectors):
            if not isinstance(selector, AllKeys):
                k, v = (work.context.read(part, layer_idx, torch.float32) for part in KVPart)
                selector.add_rows(k[:, work.start :], v[:, work.start :])
                shape = (min(work.num_rows, SHOWN_QUERIES), self._spec.num_q_heads, self._spec.head_dim)
                q = torch.randn(shape, device=self._pool.device) * k.std()
                selector.see_prompt(PromptRows(q=q, k=k, scale=self._scale))

    def _as_kept(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Rows [n, Hkv, D] as the pools keep them: [Hkv, n, D] fp32."""
        rounded = [
            self._pool.round(part, rows).float().transpose(0, 1) for part, rows in zip(KVPart, (k, v), strict=True)
        ]
        return rounded[0], rounded[1]
