"""Which implementation of an op runs on which device: decided once, with the reason kept as text."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Final

import torch

from ambidex.core.errors import InternalError, NativeModuleError
from ambidex.kernels.cpu import native

IMPLEMENTATIONS: Final[Mapping[str, tuple[str, ...]]] = {
    "add_sums": ("reference", "triton"),
    "attend": ("reference", "torch"),
    "attend_paged": ("reference", "triton"),
    "attend_tiles": ("reference", "triton"),
    "attend_chosen": ("reference", "triton"),
    "attend_early": ("reference", "triton"),
    "attend_held": ("reference", "triton"),
    "attend_pages": ("reference", "triton"),
    "attend_predicted": ("reference", "triton"),
    "attend_windows": ("reference", "triton"),
    "choose_pages": ("reference", "triton"),
    "attend_scanned": ("reference", "triton"),
    "merge_states": ("reference", "native", "triton"),
    "linear": ("reference", "torch", "native"),
    "quantized_linear": ("reference", "triton"),
    "rms_norm": ("reference", "torch", "native", "triton"),
    "add_rms_norm": ("reference", "torch", "native", "triton"),
    "rotate": ("reference", "native", "triton"),
    "layer_norm": ("reference", "torch"),
    "rotate_and_store": ("reference", "triton"),
    "silu_mul": ("reference", "native", "triton"),
    "sum_prompt_weights": ("reference", "triton"),
    "likeliest": ("reference", "native"),
    "predict_far": ("reference", "triton"),
    "fetch_blocks": ("reference", "triton"),
    "unpack_blocks": ("reference", "triton"),
    "pack_blocks": ("reference", "triton"),
}
"""Ops with a choice, and what there is to choose from; every other op has its reference only."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The implementation chosen for an op on a device type, and why; forced: for tensors of every size; a fallback: the
    op has a kernel for the device that does not run here."""

    name: str
    reason: str
    is_forced: bool = False
    is_fallback: bool = False


_overrides: dict[str, Choice] = {}


def choose(op: str, device_type: str) -> Choice:
    """The implementation of `op` for tensors on `device_type` (`cpu`, `cuda`)."""
    return _overrides.get(op) or _decide(op, device_type)


def find_fallbacks(device_type: str) -> dict[str, str]:
    """The ops whose kernel for the device type does not run here, each with the reason."""
    choices = {op: choose(op, device_type) for op in IMPLEMENTATIONS}
    return {op: choice.reason for op, choice in choices.items() if choice.is_fallback}


@contextmanager
def override(op: str, name: str) -> Iterator[None]:
    """Force an implementation, for tests and benchmarks.

    Raises:
        InternalError: the op has no such implementation.
    """
    if name not in IMPLEMENTATIONS.get(op, ()):
        raise InternalError(f"op {op} has no implementation {name}: choose from {IMPLEMENTATIONS.get(op, ())}")
    before = _overrides.get(op)
    _overrides[op] = Choice(name, "forced by override", is_forced=True)
    try:
        yield
    finally:
        del _overrides[op]
        if before is not None:
            _overrides[op] = before


@cache
def _decide(op: str, device_type: str) -> Choice:
    if op == "attend" and device_type == "cpu":
        return Choice("torch", "torch's fused CPU attention returns the lse and reads K once for a group")
    if op == "attend" and device_type == "cuda":
        return Choice("torch", "torch's flash and memory-efficient attention; the reference where neither applies")
    if device_type == "cuda" and "triton" in IMPLEMENTATIONS.get(op, ()):
        return _decide_triton(op)
    if device_type == "cpu" and (why := _NATIVE_ON_CPU.get(op)):
        return _decide_native(op, why)
    return _decide_plain(op, device_type)


_NATIVE_ON_CPU: Final[Mapping[str, str]] = {
    "linear": "torch for many rows and for other than fp32 x",
    "rms_norm": "torch for many rows and for other than contiguous fp32",
    "add_rms_norm": "torch for many rows and for other than contiguous fp32",
    "likeliest": "the reference for other than contiguous fp32",
    "silu_mul": "the reference for many rows and for other than contiguous fp32",
    "rotate": "the reference for many rows and for other than contiguous fp32",
    "merge_states": "the reference for few rows and for other than contiguous fp32",
}
"""Ops that the compiled module has, and what else runs when."""


def _decide_plain(op: str, device_type: str) -> Choice:
    """Without kernels of our own."""
    if op in ("rms_norm", "add_rms_norm", "layer_norm"):
        return Choice("torch", "one call instead of several")
    if op == "linear":
        return Choice("torch", "torch's products")
    return Choice("reference", f"the only implementation of {op} on {device_type}")


def _decide_native(op: str, otherwise: str) -> Choice:
    try:
        return Choice("native", f"compiled module, instruction set {native.isa()}; {otherwise}")
    except NativeModuleError as error:
        return Choice(_decide_plain(op, "cpu").name, f"no compiled module: {error}", is_fallback=True)


def _decide_triton(op: str) -> Choice:
    why_not = _why_no_triton()
    if why_not is None:
        return Choice("triton", "one launch instead of several")
    return Choice("torch" if "torch" in IMPLEMENTATIONS[op] else "reference", why_not, is_fallback=True)


@cache
def _why_no_triton() -> str | None:
    """Why Triton's kernels do not run here; None if they do, or if there is no GPU to ask."""
    if find_spec("triton") is None:  # it comes with torch's builds for CUDA on Linux, and with few others
        return "the package triton is not installed"
    if not torch.cuda.is_available():
        return None
    try:
        run_probe()
    except Exception as error:  # of the compiler, the driver or a missing C compiler: whatever it is, torch goes on
        return f"Triton does not run on {torch.cuda.get_device_name()}: {type(error).__name__} {error}"
    return None


def run_probe() -> None:
    """Compile and run the smallest kernel. Cost: a second when it is compiled for the first time."""
    from ambidex.kernels.triton import activation  # lazy: the package may be missing

    gate = torch.ones(1, 32, dtype=torch.float16, device="cuda")
    activation.silu_mul(gate, gate)
    torch.cuda.synchronize()
