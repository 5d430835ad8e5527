"""Which matrices of a GGUF file a model keeps quantised, and what they weigh."""

from collections.abc import Iterable, Mapping

from torch import nn

from ambidex.core.model_spec import ModelSpec
from ambidex.kernels.cpu.quantized import BLOCKS, QuantizedMatrix, packed_bytes
from ambidex.models.gguf_names import find_hf_name


def find_kept(spec: ModelSpec) -> dict[str, str]:
    """Names of the matrices that have a native product as they are stored, and their types."""
    names = ((find_hf_name(stored, spec), kind) for stored, kind in spec.quantized if kind in BLOCKS)
    return {name: kind for name, kind in names if name is not None}


def describe_kept(spec: ModelSpec) -> tuple[str, str]:
    """The types that are kept and those that are not, each as a list for people; empty where there are none."""
    return _list_types(set(find_kept(spec).values())), _list_types({kind for _, kind in spec.quantized} - BLOCKS.keys())


def count_weights_bytes(model: nn.Module, kept: Mapping[str, str]) -> dict[nn.Parameter, int]:
    """Bytes of each parameter of a model, which may have no storage, if those that `kept` names are quantised."""
    return {
        parameter: next(
            (packed_bytes(kept[name], tuple(parameter.shape)) for name in names if name in kept),
            parameter.numel() * parameter.element_size(),
        )
        for parameter, names in names_of_parameters(model).items()
    }


def names_of_parameters(model: nn.Module) -> dict[nn.Parameter, list[str]]:
    """Every parameter and its names: a tied one has several."""
    names_of: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names_of.setdefault(parameter, []).append(name)
    return names_of


def put_in_place(model: nn.Module, kept: Mapping[str, str], stored_names: Iterable[str]) -> dict[str, QuantizedMatrix]:
    """Replace parameters by quantised matrices, which are still to be filled.

    Args:
        kept: names and types; stored_names: names of all tensors of the files, in their order. Of a tied parameter the
            first name that is there says the type.
    Returns:
        The matrices under all names that they have.
    """
    placed: dict[str, QuantizedMatrix] = {}
    order = {name: place for place, name in enumerate(stored_names)}
    for parameter, names in names_of_parameters(model).items():
        first = min((name for name in names if name in order), key=order.__getitem__)
        if first in kept:
            num_rows, width = parameter.shape
            matrix = QuantizedMatrix.zeros(kept[first], (num_rows, width))
            placed |= dict.fromkeys(names, matrix)
    for name, matrix in placed.items():
        owner, _, attribute = name.rpartition(".")
        module = model.get_submodule(owner)
        delattr(module, attribute)
        setattr(module, attribute, matrix)
    return placed


def _list_types(kinds: Iterable[str]) -> str:
    *others, last = sorted(kinds) or [""]
    return f"{', '.join(others)} and {last}" if others else last
