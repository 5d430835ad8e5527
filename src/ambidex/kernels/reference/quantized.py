"""Packed matrices in plain torch, on any device; the layout is that of csrc/ops/quant.h, for types with runs alone."""

from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor

GROUP_ROWS: Final = 16
RECORD_BYTES: Final[Mapping[str, int]] = {"Q8_0": 32 + 8 * 64, "Q4_0": 32 + 4 * 64, "Q4_1": 64 + 4 * 64}
"""Types that are read here, and bytes of a record of 16 rows and 32 numbers: 16 fp16 scales, for Q4_1 as many minima,
then lines of 64 bytes."""


def dense(data: Tensor, kind: str, num_rows: int) -> Tensor:
    """The numbers of a packed matrix.

    Args:
        data: [ceil(N / 16), bytes of 16 rows] uint8; kind: one of RECORD_BYTES; num_rows: N.
    Returns:
        [N, K] fp32 on the device of data.
    """
    records = data.view(data.shape[0], -1, RECORD_BYTES[kind])  # [G, K / 32, bytes]
    scales = records[..., :32].contiguous().view(torch.float16).float()  # [G, K / 32, 16]
    words = records[..., 64 if kind == "Q4_1" else 32 :].contiguous().view(torch.int32)
    words = words.view(*words.shape[:2], -1, GROUP_ROWS)  # [G, K / 32, lines, 16]
    if kind == "Q8_0":
        numbers = torch.stack([words << (24 - 8 * byte) >> 24 for byte in (0, 2, 1, 3)], dim=3)
    else:
        shifts = [16 * (i % 2) + 4 * (i // 2) for i in range(8)]
        numbers = torch.stack([((words >> shift) & 15) - 8 * (kind == "Q4_0") for shift in shifts], dim=3)
    values = numbers.flatten(2, 3).float() * scales[:, :, None]  # [G, K / 32, 32, 16]
    if kind == "Q4_1":
        values += records[..., 32:64].contiguous().view(torch.float16).float()[:, :, None]
    return values.permute(0, 3, 1, 2).flatten(2).flatten(0, 1)[:num_rows].contiguous()
