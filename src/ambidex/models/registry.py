"""From the name of an architecture to its model."""

from collections.abc import Mapping
from importlib import import_module
from typing import Final

import torch

from ambidex.core.errors import UnsupportedModelError
from ambidex.core.model_spec import ModelSpec
from ambidex.kernels.linear import LinearContext
from ambidex.layers.parameter import ParameterFactory
from ambidex.models.base import CausalLM

ARCHITECTURES: Final[Mapping[str, str]] = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "opt": "OPTForCausalLM",
    "falcon": "FalconForCausalLM",
}
"""Architecture, which is also the name of its module here → class."""


def build_model(
    spec: ModelSpec,
    *,
    device: torch.device,
    dtype: torch.dtype,
    activation_dtype: torch.dtype | None = None,
    linear: LinearContext | None = None,
    matrix_device: torch.device | None = None,
) -> CausalLM:
    """Build a model whose parameters are allocated on `device` but not yet filled (see `models/weights.py`).

    Args:
        dtype: of matrices; activation_dtype: of vectors and activations, None for `dtype`.
        linear: what the matrix products share; None for torch's products.
        matrix_device: where matrices are allocated; None for `device`.
    Raises:
        UnsupportedModelError: there is no such architecture.
    """
    class_name = ARCHITECTURES.get(spec.architecture)
    if class_name is None:
        raise UnsupportedModelError(
            f"architecture {spec.architecture!r} is not supported: known are {', '.join(sorted(ARCHITECTURES))}"
        )
    # Imported only now: one broken or slow family must not touch the others.
    model_class = getattr(import_module(f"ambidex.models.{spec.architecture}"), class_name)
    factory = ParameterFactory(device, dtype, activation_dtype, linear or LinearContext(), matrix_device)
    model: CausalLM = model_class(spec, factory)
    return model
