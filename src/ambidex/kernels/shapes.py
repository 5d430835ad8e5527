"""Shape comments that run: `check_shapes(q=(q, "T Hq D"), k=(k, "Hkv S D"))` at an op's door."""

from functools import lru_cache

from torch import Tensor

from ambidex.core.errors import ShapeError


def check_shapes(**tensors: tuple[Tensor, str]) -> None:
    """Check that each tensor has the named axes and that an axis has one size in all of them.

    Args:
        tensors: name → (tensor, axes), axes being names separated by spaces, e.g. `"T Hq D"`.
    Raises:
        ShapeError: a number of axes or a size differs; the message names tensor, axis and both sizes.
    Cost: about a microsecond a tensor.
    """
    sizes: dict[str, int] = {}
    for name, (tensor, text) in tensors.items():
        axes, shape = _axes(text), tensor.shape
        if len(axes) != len(shape):
            raise ShapeError(f"{name}: expected [{', '.join(axes)}], got {len(shape)} axes (shape {tuple(shape)})")
        for axis, size in zip(axes, shape, strict=True):
            if sizes.setdefault(axis, size) != size:
                raise ShapeError(
                    f"{name}: expected {axis}={sizes[axis]} in [{', '.join(axes)}], got {size} (shape {tuple(shape)})"
                )


def check_alike(**tensors: Tensor) -> None:
    """Check that all tensors have one dtype and lie on one device.

    Raises:
        ShapeError: a dtype or a device differs from the first tensor's.
    """
    items = iter(tensors.items())
    first_name, first = next(items)
    for name, tensor in items:
        if tensor.dtype != first.dtype or tensor.device != first.device:
            raise ShapeError(
                f"{name} is {tensor.dtype} on {tensor.device}, but {first_name} is {first.dtype} on {first.device}"
            )


@lru_cache
def _axes(text: str) -> tuple[str, ...]:
    return tuple(text.split())
