"""The compiled module (csrc/bind/module.cpp). Use it through `ambidex.kernels.cpu.native`."""

import numpy as np
import numpy.typing as npt

def isa() -> str:
    """The fastest instruction set of `available_isas()`; ops use it unless told otherwise."""

def available_isas() -> list[str]:
    """The instruction sets that this machine runs, slowest first: of `generic`, `avx2`, `avx512`."""

def merge_states(
    out_a: npt.NDArray[np.float32],
    lse_a: npt.NDArray[np.float32],
    out_b: npt.NDArray[np.float32],
    lse_b: npt.NDArray[np.float32],
    out: npt.NDArray[np.float32],
    lse: npt.NDArray[np.float32],
    *,
    isa: str | None = None,
) -> None:
    """Join partial attentions over disjoint sets of keys, into `out` and `lse`.

    Args:
        out_a, out_b: [R, D] fp32, contiguous; not read in rows whose lse is −inf.
        lse_a, lse_b: [R] fp32, natural log, −inf where no key was seen.
        out, lse: where the result goes, [R, D] and [R] fp32; may be the inputs themselves.
        isa: one of `available_isas()`; None for the fastest.
    Raises:
        TypeError: an array is not fp32, not contiguous, read-only where written, or has another number of axes.
        ValueError: shapes differ, arrays overlap in part, or `isa` does not run here.
    Cost: moves 3 * R * D floats in the calling thread, with the GIL released; allocates nothing.
    """
