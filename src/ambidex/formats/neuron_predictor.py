"""Trained predictors of active neurons: two small matrices a layer, in a file beside the model.

    score = fc2 · relu(fc1 · x)         fc1 [r, E], fc2 [F, r]: x is what the MLP gets, a score for each of F neurons

as PowerInfer's GGUF files have them (`blk.N.fc1.weight`, `blk.N.fc2.weight`; arXiv:2312.12456), after Deja Vu
(arXiv:2310.17157). A neuron is expected to be active where its score is above a threshold: that of the file
(`powerinfer.sparse_threshold`), or 0, which is where the logits of a trained classifier say one half. The same names
are read from a safetensors file. A GGUF file may be the whole model: all else in it is left alone.
"""

import re
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ambidex.core.errors import ModelFileError
from ambidex.core.model_spec import ModelSpec
from ambidex.formats.gguf import GGUFFile
from ambidex.formats.safetensors import SafetensorsFile
from ambidex.formats.tensor_info import TensorInfo

THRESHOLD_KEY: Final = "powerinfer.sparse_threshold"
_NAME: Final = re.compile(r"blk\.(\d{1,6})\.fc([12])\.weight")
_OF_A_MODEL: Final = "token_embd.weight"
_SHOWN: Final = 4
_NUMPY_DTYPES: Final = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}


class PredictorFile:
    """The predictors of all layers of a model.

    Args:
        path: a .gguf file, or a safetensors file.
        spec: of the model that they are for.
    Raises:
        ModelFileError: the file cannot be read, lacks a layer, has one that is not there, or a shape that does not fit.

    Attributes:
        ranks: r of each layer.
        threshold: of scores.
    """

    def __init__(self, path: Path, spec: ModelSpec) -> None:
        self.path = path
        self._file = GGUFFile(path) if path.suffix == ".gguf" else SafetensorsFile(path)
        metadata = self._file.metadata if isinstance(self._file, GGUFFile) else {}
        threshold = metadata.get(THRESHOLD_KEY, 0.0)
        if not isinstance(threshold, int | float) or not np.isfinite(threshold):
            raise ModelFileError(f"{path}: `{THRESHOLD_KEY}` is {threshold!r}: it must be a number")
        self.threshold = float(threshold)
        found = {name: _NAME.fullmatch(name) for name in self._file.tensors}
        others = [name for name, match in found.items() if match is None]
        if others and not (isinstance(self._file, GGUFFile) and _OF_A_MODEL in self._file.tensors):
            raise ModelFileError(f"{path} holds {_list(others)}: predictors are blk.N.fc1.weight and blk.N.fc2.weight")
        layers = {int(match[1]) for match in found.values() if match is not None}
        if extra := sorted(layers - set(range(spec.num_layers))):
            raise ModelFileError(
                f"{path} has predictors of layers {_list(map(str, extra))}: the model has the layers 0 to "
                f"{spec.num_layers - 1}; is it another model's?"
            )
        names = [_name(layer, place) for layer in range(spec.num_layers) for place in (1, 2)]
        if missing := [name for name in names if name not in self._file.tensors]:
            raise ModelFileError(f"{path} lacks {_list(missing)}: a predictor has two matrices in every layer")
        self.ranks = tuple(self._check(layer, spec) for layer in range(spec.num_layers))

    def matrices(self, layer_idx: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """fc1 [r, E] and fc2 [F, r] of a layer, in new arrays."""
        first, second = (self._read(_name(layer_idx, place)) for place in (1, 2))
        return first, second

    def _check(self, layer_idx: int, spec: ModelSpec) -> int:
        """The rank of a layer's predictor."""
        first, second = (self._file.tensors[_name(layer_idx, place)] for place in (1, 2))
        rank = first.shape[0] if len(first.shape) == 2 else 0
        wanted = ((rank, spec.hidden_size), (spec.intermediate_size, rank))
        for info, shape in zip((first, second), wanted, strict=True):
            if rank == 0 or tuple(info.shape) != shape:
                raise ModelFileError(
                    f"{self.path}: {info.name} has the shape {list(info.shape)}: for this model fc1 must be "
                    f"[r, {spec.hidden_size}] and fc2 [{spec.intermediate_size}, r]; is it another model's?"
                )
            if isinstance(self._file, SafetensorsFile) and info.dtype not in _NUMPY_DTYPES:
                raise ModelFileError(
                    f"{self.path}: {info.name} has the dtype {info.dtype}: must be one of {', '.join(_NUMPY_DTYPES)}"
                )
        return rank

    def _read(self, name: str) -> NDArray[np.float32]:
        info: TensorInfo = self._file.tensors[name]
        if isinstance(self._file, GGUFFile):
            try:
                return self._file.dequantize(name)
            except NotImplementedError as error:
                raise ModelFileError(f"{self.path}: {name} has a format that cannot be read: {error}") from error
        values = np.frombuffer(self._file.read(name), _NUMPY_DTYPES[info.dtype]).reshape(info.shape)
        if info.dtype == "BF16":
            return (values.astype(np.uint32) << 16).view(np.float32)
        return values.astype(np.float32)


def _name(layer_idx: int, place: int) -> str:
    return f"blk.{layer_idx}.fc{place}.weight"


def _list(names: "list[str] | map[str]") -> str:
    names = list(names)
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{', '.join(name[:60] for name in names[:_SHOWN])}{more}"
