"""Native ops over rows of fp32, for steps of few tokens: the work is a microsecond, so the call must be cheap.

Measured per call on 2 cores of an AVX2 EPYC with other processes about, 1 and 16 tokens: rms_norm over 576 numbers 16
and 19 µs, torch's 38 and 48; rotate of 9 heads 28 to 46 and 33 µs, the reference 66 to 128 and 76.
"""

from contextlib import suppress
from typing import Final

import torch
from torch import Tensor

from ambidex.kernels.cpu import memory
from ambidex.kernels.cpu.memory import new_fp32

with suppress(ImportError):  # `dispatch` chooses these ops only where the module is there
    from ambidex import _native

MOST_NUMBERS: Final = 1 << 16
"""Up to so many numbers these ops are chosen: one thread takes about 20 µs for them, torch's calls as much or more."""


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, isa: str | None = None) -> Tensor:
    """See `kernels.api.rms_norm`; x and weight fp32, contiguous, in CPU memory."""
    y = new_fp32(x.shape)
    _native.rms_norm(x.numpy(), weight.numpy(), eps, y, isa=isa)
    return torch.from_numpy(y)


def likeliest(x: Tensor, *, isa: str | None = None) -> Tensor:
    """See `kernels.api.likeliest`; x fp32, contiguous, in CPU memory."""
    places = memory.new_int64((x.shape[0],))
    _native.likeliest(x.numpy(), places, isa=isa)
    return torch.from_numpy(places)


def silu_mul(gate: Tensor, up: Tensor, *, isa: str | None = None) -> Tensor:
    """See `kernels.api.silu_mul`; both fp32, contiguous, in CPU memory."""
    y = new_fp32(gate.shape)
    _native.silu_mul(gate.numpy(), up.numpy(), y, isa=isa)
    return torch.from_numpy(y)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, isa: str | None = None) -> Tensor:
    """See `kernels.api.rotate`; all fp32, contiguous, in CPU memory."""
    y = new_fp32(x.shape)
    _native.rotate(x.numpy(), cos.numpy(), sin.numpy(), y, isa=isa)
    return torch.from_numpy(y)
