"""`PartialKeys`: a few columns of K, turned so that they hold most of each score: InfiniGen's predictor.

Source: arXiv:2406.19707, section 4; github.com/snu-comparch/InfiniGen. For each KV head, A are the right singular
vectors of the prompt's queries: q·k = (qA)·(kA), and the columns of QA differ as much as columns can, so few of them
tell most. The columns with the largest Σ|q̃| + Σ|k̃| over the prompt are kept, `percent` of them.

Differences from the authors' code: A is made from each request's own prompt, not offline from one sample, after rotary
positions for all models (theirs fuses A into the weights where it can); columns by the sum over queries and keys as in
the paper (their speed code looks at queries alone); of a long prompt's queries, some, evenly spread (`infinigen.py`),
since all of them would take more memory than K; with shared KV heads, the queries of a group together; and where these
are fewer than D, so that rounding alone would turn the columns behind the first so many, something else does (`_TILT`).
"""

from typing import Final, Protocol

import torch
from torch import Tensor

from ambidex.attention.select.policy import FarSelector, Rows, group_scores
from ambidex.core.kv_spec import num_partial_columns

_TILT: Final = 0.1
"""Where a prompt has fewer queries than they have columns: by this share of their mean square the last column is made
larger than the first, those between by less. So turns do not depend on how queries were rounded, nor on who shared the
prompt's steps. With SmolLM2 in 16 bits, of nine prompts of 1 to 20 tokens four still had another answer in company with
0.001, one with 0.1 (all nine with 0, in fp32, too)."""


class PartialKeys:
    """Predicts scores from some columns.

    `turn` [Hkv, D, d]: the kept columns of A; `rows`: K through it, [Hkv, n, d].
    """

    def __init__(self, turn: Tensor, rows: Rows) -> None:
        self._turn = turn
        self._rows = rows

    @classmethod
    def of(cls, q: Tensor, k: Tensor, *, percent: int, capacity: int = 0) -> "PartialKeys":
        """From queries [n, Hq, D] of a prompt and its keys [Hkv, S, D], with room for `capacity` keys in all."""
        num_kv_heads, _, head_dim = k.shape
        grouped = q.view(len(q), num_kv_heads, -1, head_dim).permute(1, 0, 2, 3).reshape(num_kv_heads, -1, head_dim)
        # The right singular vectors of a matrix are the eigenvectors of its Gram matrix, which is small.
        gram = grouped.double().transpose(1, 2) @ grouped.double()
        if grouped.shape[1] < head_dim:
            shares = torch.linspace(0, _TILT, head_dim, dtype=gram.dtype, device=gram.device)
            squares = gram.diagonal(dim1=1, dim2=2)  # a view
            squares += squares.mean(1, keepdim=True) * shares
        turn = torch.linalg.eigh(gram).eigenvectors.float()  # [Hkv, D, D]
        sizes = (grouped @ turn).abs().sum(1) + (k @ turn).abs().sum(1)  # [Hkv, D]
        columns = sizes.topk(num_partial_columns(head_dim, percent), dim=1).indices  # [Hkv, d]
        kept = turn.gather(2, columns[:, None].expand(-1, head_dim, -1))
        return cls(kept, Rows.of(k @ kept, capacity=capacity))

    @property
    def num_keys(self) -> int:
        """Rows of a head."""
        return self._rows.values.shape[1]

    @property
    def num_bytes(self) -> int:
        """Of all rows."""
        return self._rows.values.numel() * self._rows.values.element_size()

    @property
    def num_columns(self) -> int:
        """Columns that are kept."""
        return self._turn.shape[2]

    @property
    def buffers(self) -> tuple[Tensor, Tensor]:
        """Where the rows lie, [Hkv, capacity, d], and what turns a key into one, [Hkv, D, d]; both contiguous, fp32."""
        return self._rows.buffer, self._turn

    def append(self, k: Tensor) -> "PartialKeys":
        """With more keys [Hkv, n, D] behind."""
        return PartialKeys(self._turn, self._rows.append(k @ self._turn))

    def extend(self) -> "PartialKeys":
        """With one more key behind, whose row is still to be written."""
        return PartialKeys(self._turn, self._rows.extend(1))

    def scores(self, q: Tensor, scale: float) -> Tensor:
        """Predicted scores of a query [Hq, D] with all keys: [Hq, S]."""
        num_kv_heads = len(self._turn)
        turned = q.view(num_kv_heads, -1, q.shape[1]) @ self._turn  # [Hkv, G, d]
        return group_scores(turned.flatten(0, 1)[None], self._rows.values, scale)[:, 0]


class PartialSelector(FarSelector, Protocol):
    """A selector that chooses by partial keys, if it does not by scores of all far keys."""

    def extend_partial(self) -> PartialKeys:
        """Take in one more key, whose row whoever computes the step writes."""
        ...
