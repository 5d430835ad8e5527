"""How layers get their parameters: uninitialised, on one device and in given formats, never trained."""

from dataclasses import dataclass, field

import torch
from torch import nn

from ambidex.kernels.linear import LinearContext, LinearOp


@dataclass(frozen=True, slots=True)
class ParameterFactory:
    """Makes the parameters of one model, which `models/weights.py` fills, and its matrix products.

    Args:
        device: where parameters lie.
        dtype: of matrices, which nearly all bytes are.
        activation_dtype: of vectors, and of what flows between layers; None for `dtype`.
        linear: what the products share.
        matrix_device: where matrices lie; None for `device`. On the meta device they take no memory until they are
            loaded.
    """

    device: torch.device
    dtype: torch.dtype
    activation_dtype: torch.dtype | None = None
    linear: LinearContext = field(default_factory=LinearContext)
    matrix_device: torch.device | None = None

    def new_matrix(self, num_rows: int, width: int) -> nn.Parameter:
        """An uninitialised parameter [num_rows, width] in `dtype` that takes no gradient."""
        data = torch.empty((num_rows, width), device=self.matrix_device or self.device, dtype=self.dtype)
        return nn.Parameter(data, requires_grad=False)

    def new_vector(self, width: int) -> nn.Parameter:
        """An uninitialised parameter [width] in the format of activations that takes no gradient."""
        data = torch.empty(width, device=self.device, dtype=self.activation_dtype or self.dtype)
        return nn.Parameter(data, requires_grad=False)

    def new_linear_op(self) -> LinearOp:
        """The product of one place of the model."""
        return LinearOp(self.linear)
