"""Where the Triton kernels are tested: on the GPU, and without one in Triton's interpreter."""

import os
from importlib.util import find_spec
from typing import Any

import pytest
import torch

HAS_INTERPRETER = find_spec("triton") is not None and os.environ.get("TRITON_INTERPRET") == "1"
INTERPRETED = pytest.mark.skipif(not HAS_INTERPRETER, reason="triton is not installed, or compiles for the GPU here")
DEVICES = [pytest.param("cpu", marks=INTERPRETED), pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPE_CASES = [
    *(pytest.param("cpu", dtype, marks=INTERPRETED) for dtype in (torch.float32, torch.float16)),
    *(pytest.param("cuda", dtype, marks=pytest.mark.gpu) for dtype in (torch.float32, torch.bfloat16, torch.float16)),
]
"""(device, dtype). The interpreter computes products of bf16 matrices wrongly."""


if HAS_INTERPRETER:
    # Triton 3.6 turns a loop's bound, an array of one number, into an int by int(array), which numpy 2.4 refuses.
    from triton.runtime import interpreter

    _patch_lang_tensor = interpreter._patch_lang_tensor

    def _patch_lang_tensor_for_numpy(tensor: type, scope: Any) -> None:
        _patch_lang_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = _patch_lang_tensor_for_numpy
