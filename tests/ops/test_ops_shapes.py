"""`check_shapes` and `check_alike`."""

import pytest
import torch

from ambidex.core.errors import ShapeError
from ambidex.kernels.shapes import check_alike, check_shapes


def test_check_shapes_when_axes_agree_passes() -> None:
    check_shapes(q=(torch.empty(3, 4, 8), "T Hq D"), k=(torch.empty(2, 0, 8), "Hkv S D"))


def test_check_shapes_when_a_size_differs_names_tensor_axis_and_sizes() -> None:
    with pytest.raises(ShapeError) as caught:
        check_shapes(q=(torch.empty(3, 4, 64), "T Hq D"), v=(torch.empty(100, 2, 32), "S Hkv D"))
    assert str(caught.value) == "v: expected D=64 in [S, Hkv, D], got 32 (shape (100, 2, 32))"


def test_check_shapes_when_an_axis_is_missing_raises() -> None:
    with pytest.raises(ShapeError) as caught:
        check_shapes(q=(torch.empty(3, 4), "T Hq D"))
    assert str(caught.value) == "q: expected [T, Hq, D], got 2 axes (shape (3, 4))"


def test_check_alike_when_dtypes_differ_raises() -> None:
    with pytest.raises(ShapeError, match=r"b is torch\.float16 on cpu, but a is torch\.float32 on cpu"):
        check_alike(a=torch.empty(1), b=torch.empty(1, dtype=torch.float16))
