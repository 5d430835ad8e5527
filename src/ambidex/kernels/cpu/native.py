"""The door to the compiled module `ambidex._native`: hands tensors over as arrays, without a copy."""

import torch
from torch import Tensor

from ambidex.core.errors import NativeModuleError, ShapeError
from ambidex.kernels.shapes import check_shapes

# A machine without the module still imports this file and uses the reference ops: only use is an error.
try:
    from ambidex import _native
except ImportError as error:
    _import_error: ImportError | None = error
else:
    _import_error = None


def isa() -> str:
    """The instruction set that native ops use on this machine: `generic`, `avx2` or `avx512`.

    Raises:
        NativeModuleError: the compiled module is missing or does not load.
    """
    _check_loaded()
    return _native.isa()


def available_isas() -> tuple[str, ...]:
    """The instruction sets that this machine runs, slowest first.

    Raises:
        NativeModuleError: the compiled module is missing or does not load.
    """
    _check_loaded()
    return tuple(_native.available_isas())


def merge_states(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, *, isa: str | None = None
) -> tuple[Tensor, Tensor]:
    """Join partial attentions over disjoint sets of keys.

    Args:
        out_a, out_b: [T, Hq, D] fp32 in CPU memory, contiguous; not read in rows whose lse is −inf.
        lse_a, lse_b: [T, Hq] likewise, natural log, −inf where no key was seen.
        isa: one of `available_isas()`, for tests; None for the fastest.
    Returns:
        `out` [T, Hq, D] and `lse` [T, Hq] over the union of keys; 0 and −inf where neither side saw one.
    Raises:
        NativeModuleError: the compiled module is missing or does not load.
        ShapeError: shapes differ, or a tensor is not fp32, not contiguous or not in CPU memory.
        ValueError: this machine does not run `isa`.
    Cost: moves 3 * T * Hq * D floats in the calling thread, with the GIL released.
    """
    _check_loaded()
    check_shapes(out_a=(out_a, "T Hq D"), lse_a=(lse_a, "T Hq"), out_b=(out_b, "T Hq D"), lse_b=(lse_b, "T Hq"))
    _check_layout(out_a=out_a, lse_a=lse_a, out_b=out_b, lse_b=lse_b)
    out, lse = torch.empty_like(out_a), torch.empty_like(lse_a)
    rows = (lse.numel(), out.shape[2])  # [R, D]
    _native.merge_states(
        out_a.detach().numpy().reshape(rows),
        lse_a.detach().numpy().reshape(-1),
        out_b.detach().numpy().reshape(rows),
        lse_b.detach().numpy().reshape(-1),
        out.numpy().reshape(rows),
        lse.numpy().reshape(-1),
        isa=isa,
    )
    return out, lse


def _check_loaded() -> None:
    if _import_error is not None:
        raise NativeModuleError(
            f"the compiled module ambidex._native cannot be loaded ({_import_error}): build it with `make setup` "
            f"in the source tree, or `pip install .` (needs a C++17 compiler such as g++ 12)"
        ) from _import_error


def _check_layout(**tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        if tensor.dtype != torch.float32 or tensor.device.type != "cpu" or not tensor.is_contiguous():
            layout = "contiguous" if tensor.is_contiguous() else f"strides {tensor.stride()}"
            raise ShapeError(
                f"{name}: expected contiguous torch.float32 on cpu, got {tensor.dtype} on {tensor.device}, {layout}"
            )
